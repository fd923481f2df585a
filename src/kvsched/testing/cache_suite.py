"""Conformance of a tree cache: tests with names, each for one thing `kvsched.protocols.TreeCache` promises.

What lives here: `CacheConformance`, and `NullCacheConformance` for a cache that keeps nothing (`caches` is False). What does
not: random calls (`kvsched.testing.cache_machine`), and which content an eviction policy chooses.

    from kvsched.testing.cache_suite import CacheConformance, cache_machine

    class TestMyCache(CacheConformance):
        def make(self, page_size):
            return MyCache(page_size)

    TestMyCacheMachine = cache_machine(MyCache).TestCase
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from kvsched.errors import HostError, InvalidHandle
from kvsched.protocols import Handle, TreeCache
from kvsched.testing.cache_machine import cache_machine, tokens_of
from kvsched.testing.pool_suite import pages_of, refused
from kvsched.units import Pages, Tokens

__all__ = ["CacheConformance", "NullCacheConformance", "cache_machine"]


def span(start: int, stop: int) -> Tokens:
    """Tokens that differ from each other, so that equal spans are equal content and others are not."""
    return tokens_of(range(start, stop))


def counts(cache: TreeCache) -> tuple[int, int, int]:
    """What a call that changes nothing leaves as it was."""
    return cache.evictable, cache.locked, cache.grown


class _Made:
    """What both suites need: a cache to test."""

    def make(self, page_size: int) -> TreeCache:
        """A fresh, empty cache of pages of `page_size` tokens."""
        raise NotImplementedError


class NullCacheConformance(_Made):
    """Tests of a cache that keeps nothing. Define `make`; pytest collects the rest."""

    def test_it_says_so(self) -> None:
        cache = self.make(16)
        assert cache.caches is False
        assert cache.page_size == 16

    def test_nothing_is_found(self) -> None:
        cache = self.make(4)
        assert cache.match((), span(0, 8)) == 0
        handle = cache.lock((), span(0, 8))
        assert (handle.length, len(handle.pages), cache.exclusive(handle)) == (0, 0, 0)
        cache.unlock(handle)
        cache.check()

    def test_extend_is_refused_and_takes_nothing(self) -> None:
        cache = self.make(4)
        handle = cache.lock((), span(0, 8))
        refused(HostError, lambda: cache.extend(handle, span(0, 4), pages_of(1)))
        refused(HostError, lambda: cache.extend(handle, span(0, 4), pages_of(1), adopt=False))
        assert (handle.length, counts(cache), len(cache.clear())) == (0, (0, 0, 0), 0)
        cache.unlock(handle)

    def test_a_handle_is_given_back_once(self) -> None:
        cache = self.make(4)
        handle = cache.lock((), span(0, 8))
        cache.unlock(handle)
        refused(InvalidHandle, lambda: cache.unlock(handle))
        refused(InvalidHandle, lambda: cache.unlock(self.make(4).lock((), span(0, 8))))
        cache.check()

    def test_there_is_nothing_to_evict(self) -> None:
        cache = self.make(4)
        assert len(cache.evict(10)) == 0
        refused(HostError, lambda: cache.evict(-1))


class CacheConformance(_Made):
    """Tests of one cache class. Define `make`; pytest collects the rest."""

    def fingerprint(self, cache: TreeCache) -> Any:  # noqa: ARG002 -- for those who override it
        """Everything that a call which only reads must leave as it was, as a value. Override it: the default sees nothing."""
        return None

    def put(self, cache: TreeCache, tokens: Tokens, first_page: int, namespace: Hashable = ()) -> Handle:
        """Lock `tokens` and insert what is missing, on pages numbered from `first_page`; the handle stays locked."""
        handle = cache.lock(namespace, tokens)
        fresh = tokens[handle.length :]
        n = len(fresh) // cache.page_size
        cache.extend(handle, fresh, np.arange(first_page, first_page + n, dtype=np.int32))
        return handle

    def keep(self, cache: TreeCache, tokens: Tokens, first_page: int, namespace: Hashable = ()) -> None:
        """`put`, then unlock."""
        cache.unlock(self.put(cache, tokens, first_page, namespace))

    # Matching.

    def test_an_empty_cache(self) -> None:
        cache = self.make(16)
        assert cache.caches is True
        assert (cache.page_size, cache.evictable, cache.locked) == (16, 0, 0)
        assert cache.match((), span(0, 64)) == 0
        assert len(cache.evict(5)) == len(cache.clear()) == 0
        cache.check()

    def test_what_was_inserted_is_found_on_its_pages(self) -> None:
        cache = self.make(4)
        self.keep(cache, span(0, 12), 10)
        assert cache.match((), span(0, 12)) == 12
        handle = cache.lock((), span(0, 12))
        assert handle.length == 12
        assert handle.pages.tolist() == [10, 11, 12]
        cache.check()

    def test_a_match_ends_at_a_page(self) -> None:
        cache = self.make(4)
        self.keep(cache, span(0, 12), 10)
        assert [cache.match((), span(0, n)) for n in (3, 4, 7, 8, 11, 12)] == [0, 4, 4, 8, 8, 12]
        assert cache.match((), tokens_of([*range(9), 99, 99, 99])) == 8
        assert cache.match((), tokens_of([*range(12), 99])) == 12

    def test_a_match_only_reads(self) -> None:
        cache = self.make(2)
        self.keep(cache, span(0, 12), 0)
        held = self.put(cache, tokens_of([0, 1, 2, 3, 50, 51]), 20)
        before = (self.fingerprint(cache), counts(cache), held.pages.tolist())
        for prompt in (span(0, 6), span(0, 12), tokens_of([0, 1, 2, 3, 4, 9]), span(100, 104), tokens_of([])):
            cache.match((), prompt)
            cache.match("unknown", prompt)
            assert (self.fingerprint(cache), counts(cache), held.pages.tolist()) == before

    def forgotten_after(self, look: Callable[[TreeCache], object]) -> list[list[int]]:
        """What a cache forgets, page by page, when somebody took a look at its oldest content before."""
        cache = self.make(1)
        for turn in range(4):
            self.keep(cache, tokens_of([turn, 10, 11]), 10 * turn)
        for _ in range(5):
            look(cache)
        return [cache.evict(1).tolist() for _ in range(12)]

    def test_a_match_does_not_save_content_from_eviction(self) -> None:
        """Two caches are told the same, but for matches: they forget the same."""
        looked = self.forgotten_after(lambda cache: cache.match((), tokens_of([0, 10, 11])))
        assert looked == self.forgotten_after(lambda _: None), "a match changed whom the cache forgets"

    def test_a_look_that_came_to_nothing_is_no_use(self) -> None:
        """A candidate that is tried in every pass and not admitted must not keep its prefix alive."""
        looked = self.forgotten_after(lambda cache: cache.unlock(cache.lock((), tokens_of([0, 10, 11]), priority=-3), used=False))
        assert looked == self.forgotten_after(lambda _: None), "a handle that was not used changed whom the cache forgets"

    # Locking.

    def test_a_lock_protects_the_whole_path(self) -> None:
        """C16: the node itself and all before it."""
        cache = self.make(4)
        self.keep(cache, span(0, 4), 1)
        handle = self.put(cache, span(0, 8), 2)
        assert (cache.locked, cache.evictable) == (2, 0)
        assert len(cache.evict(100)) == 0
        cache.unlock(handle)
        assert (cache.locked, cache.evictable) == (0, 2)

    def test_a_handle_is_given_back_once(self) -> None:
        """C16: the second time is an error that changes nothing, and counts do not drift after it."""
        cache = self.make(4)
        handle = self.put(cache, span(0, 8), 1)
        cache.unlock(handle)
        for _ in range(2):
            refused(InvalidHandle, lambda: cache.unlock(handle))
            assert (cache.locked, cache.evictable) == (0, 2)
        refused(InvalidHandle, lambda: cache.extend(handle, span(8, 12), pages_of(9)))
        refused(InvalidHandle, lambda: cache.exclusive(handle))
        again = cache.lock((), span(0, 8))
        assert (cache.locked, cache.evictable) == (2, 0)
        cache.unlock(again)
        cache.check()

    def test_a_handle_of_another_cache_is_refused(self) -> None:
        cache, other = self.make(4), self.make(4)
        foreign = self.put(other, span(0, 8), 1)
        self.put(cache, span(0, 8), 1)
        refused(InvalidHandle, lambda: cache.unlock(foreign))
        refused(InvalidHandle, lambda: cache.extend(foreign, span(8, 12), pages_of(9)))
        assert (cache.locked, other.locked) == (2, 2)

    def test_match_and_lock_are_one_operation(self) -> None:
        """C13: between a lookup and its use nobody can take the page."""
        cache = self.make(16)
        self.keep(cache, span(0, 16), 7)
        first = cache.lock((), span(0, 32))
        assert first.length == 16
        assert len(cache.evict(1)) == 0, "a page was evicted between lookup and use"
        assert first.pages.tolist() == [7]

    def test_a_zero_length_lock(self) -> None:
        cache = self.make(4)
        handle = cache.lock("new", span(0, 3))
        assert (handle.length, len(handle.pages), cache.exclusive(handle)) == (0, 0, 0)
        got = cache.extend(handle, span(0, 4), pages_of(3))
        assert got is not None
        assert got.tolist() == [3]
        cache.unlock(handle)
        assert cache.match("new", span(0, 4)) == 4

    def test_handles_hold_through_splits(self) -> None:
        cache = self.make(1)
        whole = self.put(cache, span(0, 8), 0)
        middle = cache.lock((), span(0, 5))
        fork = self.put(cache, tokens_of([0, 1, 2, 30, 31]), 20)
        for handle, pages in ((whole, [*range(8)]), (middle, [*range(5)]), (fork, [0, 1, 2, 20, 21])):
            assert handle.pages.tolist() == pages
        assert (cache.locked, cache.evictable) == (10, 0)
        cache.check()

    def test_an_unlock_uses_what_its_handle_recorded(self) -> None:
        """The tree was split since the lock: the unlock lets go of all it took, and of no more."""
        cache = self.make(1)
        whole = self.put(cache, span(0, 8), 0)
        short = cache.lock((), span(0, 3))
        cache.unlock(whole)
        assert (cache.locked, cache.evictable) == (3, 5)
        assert len(cache.evict(8)) == 5
        assert cache.match((), span(0, 8)) == 3
        cache.unlock(short)
        assert (cache.locked, cache.evictable) == (0, 3)
        assert len(cache.evict(8)) == 3
        cache.check()

    def test_an_unlock_of_the_upper_part_leaves_the_lower_one_held(self) -> None:
        cache = self.make(1)
        whole = self.put(cache, span(0, 8), 0)
        short = cache.lock((), span(0, 3))
        cache.unlock(short)
        assert (cache.locked, cache.evictable) == (8, 0)
        cache.unlock(whole)
        assert (cache.locked, cache.evictable) == (0, 8)

    def test_exclusive_is_what_an_unlock_would_free(self) -> None:
        cache = self.make(1)
        long, short = self.put(cache, span(0, 8), 0), cache.lock((), span(0, 3))
        fork = self.put(cache, tokens_of([0, 1, 2, 3, 30]), 20)
        for handle in (long, short, fork):
            promised, before = cache.exclusive(handle), cache.evictable
            cache.unlock(handle)
            assert cache.evictable == before + promised
        assert cache.locked == 0

    # Inserting.

    def test_extend_moves_the_handle(self) -> None:
        cache = self.make(2)
        handle = cache.lock((), span(0, 2))
        for turn in range(5):
            got = cache.extend(handle, span(4 * turn, 4 * turn + 4), pages_of(2 * turn, 2 * turn + 1))
            assert got is not None
            assert got.tolist() == [2 * turn, 2 * turn + 1]
            assert handle.length == 4 * turn + 4
            assert handle.pages.tolist() == [*range(2 * turn + 2)]
            assert (cache.locked, cache.evictable) == (2 * turn + 2, 0)
        cache.unlock(handle)
        assert cache.match((), span(0, 20)) == 20

    def test_extend_by_nothing(self) -> None:
        cache = self.make(2)
        handle = self.put(cache, span(0, 4), 0)
        before = counts(cache)
        got = cache.extend(handle, tokens_of([]), pages_of())
        assert got is not None
        assert len(got) == 0
        assert (handle.length, counts(cache)) == (4, before)

    def test_what_the_cache_has_stays_the_caches(self) -> None:
        """Two computed the same: the second is told the first one's pages and still owns its own."""
        cache = self.make(1)
        first, second = cache.lock((), span(0, 4)), cache.lock((), span(0, 4))
        cache.extend(first, span(0, 3), pages_of(1, 2, 3))
        got = cache.extend(second, span(0, 5), pages_of(11, 12, 13, 14, 15))
        assert got is not None
        assert got.tolist() == [1, 2, 3, 14, 15]
        assert second.pages.tolist() == [1, 2, 3, 14, 15]
        assert (cache.locked, cache.evictable) == (5, 0)
        cache.unlock(first)
        cache.unlock(second)
        assert sorted(cache.clear().tolist()) == [1, 2, 3, 14, 15], "a page that the caller owns was cached, too"

    def test_whole_duplicates_lock_what_is_there(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 6), 0)
        late = cache.lock((), tokens_of([]))
        got = cache.extend(late, span(0, 4), pages_of(20, 21, 22, 23))
        assert got is not None
        assert got.tolist() == [0, 1, 2, 3]
        assert (cache.locked, cache.evictable) == (4, 2)

    def test_without_adoption_a_duplicate_changes_nothing(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 6), 0)
        late = cache.lock((), span(0, 2))
        before = (self.fingerprint(cache), counts(cache))
        assert cache.extend(late, tokens_of([2, 3, 40]), pages_of(20, 21, 22), adopt=False) is None
        assert (late.length, late.pages.tolist()) == (2, [0, 1])
        assert (self.fingerprint(cache), counts(cache)) == before

    def test_without_adoption_new_content_is_inserted(self) -> None:
        cache = self.make(1)
        handle = self.put(cache, span(0, 2), 0)
        got = cache.extend(handle, tokens_of([40, 41]), pages_of(20, 21), adopt=False)
        assert got is not None
        assert got.tolist() == [20, 21]
        assert handle.length == 4

    def test_extend_takes_whole_pages(self) -> None:
        cache = self.make(4)
        handle = self.put(cache, span(0, 4), 0)
        before = (self.fingerprint(cache), counts(cache))
        refused(HostError, lambda: cache.extend(handle, span(4, 10), pages_of(5, 6)))
        refused(HostError, lambda: cache.extend(handle, span(4, 8), pages_of(5, 6)))
        refused(HostError, lambda: cache.extend(handle, span(4, 8), pages_of()))
        assert (handle.length, self.fingerprint(cache), counts(cache)) == (4, *before)

    def test_a_later_change_of_the_callers_arrays_changes_nothing(self) -> None:
        cache = self.make(1)
        tokens, pages = np.arange(4, dtype=np.int32), pages_of(1, 2, 3, 4)
        handle = cache.lock((), tokens)
        cache.extend(handle, tokens, pages)
        tokens += 50
        pages += 50
        assert handle.pages.tolist() == [1, 2, 3, 4]
        assert cache.match((), span(0, 4)) == 4

    def test_grown_tells_when_an_old_match_is_no_upper_bound(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 4), 0)
        seen = cache.grown
        cache.unlock(cache.lock((), span(0, 2)))
        cache.evict(1)
        self.keep(cache, span(0, 3), 10)
        assert cache.grown == seen, "nothing was added"
        self.keep(cache, span(0, 4), 20)
        assert cache.grown > seen, "content was added"

    # Evicting.

    def test_evict_delivers_what_it_promises(self) -> None:
        """Law B5, and C18, C20: exactly the shortfall, in pages; nothing where nothing is short."""
        cache = self.make(64)
        for turn in range(5):
            self.keep(cache, span(1000 * turn, 1000 * turn + 640), 10 * turn)
        assert cache.evictable == 50
        before = self.fingerprint(cache)
        assert len(cache.evict(0)) == 0
        assert self.fingerprint(cache) == before, "evict(0) touched the tree"
        seen: set[int] = set()
        for n in (1, 7, 13, 20):
            pages = cache.evict(n)
            assert pages.dtype == np.int32
            assert len(pages) == n
            seen |= set(pages.tolist())
            cache.check()
        assert len(seen) == 41, "a page was evicted twice"
        assert cache.evictable == 9
        assert len(cache.evict(100)) == 9
        refused(HostError, lambda: cache.evict(-1))

    def test_a_long_leaf_gives_up_its_tail_only(self) -> None:
        cache = self.make(2)
        self.keep(cache, span(0, 20), 0)
        assert cache.evict(3).tolist() in ([7, 8, 9], [9, 8, 7])
        assert cache.match((), span(0, 20)) == 14
        handle = cache.lock((), span(0, 20))
        assert handle.pages.tolist() == [*range(7)]
        cache.check()

    def test_nothing_is_left_behind_a_hole(self) -> None:
        """Whatever is forgotten, what is left can be found: a page goes after all that follow it."""
        cache = self.make(1)
        prompts = [tokens_of([0, 1, 2 + turn, 50, 51]) for turn in range(4)]
        for turn, prompt in enumerate(prompts):
            self.keep(cache, prompt, 10 * turn)
        while cache.evictable:
            cache.evict(1)
            found: set[int] = set()
            for prompt in prompts:
                handle = cache.lock((), prompt)
                found |= set(handle.pages.tolist())
                cache.unlock(handle)
            assert len(found) == cache.evictable, "a cached page cannot be reached any more"

    def test_the_unlocked_rest_of_a_locked_path_is_evictable(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 10), 0)
        held = cache.lock((), span(0, 4))
        assert (cache.locked, cache.evictable) == (4, 6)
        assert set(cache.clear().tolist()) == {*range(4, 10)}
        assert held.pages.tolist() == [0, 1, 2, 3]
        assert cache.match((), span(0, 10)) == 4

    def test_content_that_was_forgotten_can_come_back(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 6), 0)
        cache.evict(4)
        self.keep(cache, span(0, 6), 20)
        handle = cache.lock((), span(0, 6))
        assert handle.pages.tolist() == [0, 1, 20, 21, 22, 23]
        cache.check()

    def test_clear_forgets_all_that_is_not_held(self) -> None:
        cache = self.make(1)
        held = self.put(cache, span(0, 4), 0)
        self.keep(cache, span(100, 104), 10, "other")
        assert sorted(cache.clear().tolist()) == [10, 11, 12, 13]
        assert (cache.locked, cache.evictable) == (4, 0)
        cache.unlock(held)
        assert sorted(cache.clear().tolist()) == [0, 1, 2, 3]
        cache.check()

    # Namespaces.

    def test_namespaces_do_not_meet(self) -> None:
        """C82: values, compared as such; never a joined string."""
        cache = self.make(16)
        spaces: list[Hashable] = [("adapter", "X"), ("salt", "X"), (), None, ("adapterX",), ("ab", "c"), ("a", "bc"), "abc"]
        for turn, space in enumerate(spaces):
            assert cache.match(space, span(0, 64)) == 0, f"{space} shares content with {spaces[:turn]}"
            self.keep(cache, span(0, 64), 10 * turn, space)
        for turn, space in enumerate(spaces):
            handle = cache.lock(space, span(0, 64))
            assert handle.pages.tolist() == [*range(10 * turn, 10 * turn + 4)]
            cache.unlock(handle)
        cache.check()

    def test_an_old_version_stays_evictable(self) -> None:
        """C82: after a reload the old content is not found, and its pages are not lost."""
        cache = self.make(16)
        self.keep(cache, span(0, 64), 0, ("X", 1))
        assert cache.match(("X", 2), span(0, 64)) == 0
        assert cache.evictable == 4
        assert sorted(cache.evict(4).tolist()) == [0, 1, 2, 3]

    def test_equal_namespaces_are_one(self) -> None:
        cache = self.make(1)
        self.keep(cache, span(0, 4), 0, ("adapter", 1))
        assert cache.match(tuple(["adapter", 1]), span(0, 4)) == 4  # noqa: C409 -- an equal value that is another object

    # Determinism.

    def test_the_same_calls_forget_the_same(self) -> None:
        def story() -> list[Pages]:
            cache = self.make(1)
            out = []
            for turn in range(12):
                self.keep(cache, tokens_of([turn % 3, turn % 4, turn, 7, 8]), 100 * turn)
                if turn % 3 == 2:
                    out.append(cache.evict(turn % 5 + 1))
            return [*out, cache.clear()]

        for one, other in zip(story(), story(), strict=True):
            assert one.tolist() == other.tolist()
