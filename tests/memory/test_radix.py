"""RadixCache: conformance under every policy, structure that the protocol does not show, and pool and tree together."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from trees import LONG, SHORT, calls_made, fingerprint

from kvsched.errors import AccountingError, ConfigError, InvalidHandle, InvalidRequest
from kvsched.memory import POLICIES, NullCache, PagePool, RadixCache
from kvsched.memory.node import WIDTH
from kvsched.protocols import Handle, Pool, TreeCache
from kvsched.request import Namespace
from kvsched.testing.cache_machine import cache_machine, tokens_of
from kvsched.testing.cache_model import ORDERS
from kvsched.testing.cache_suite import CacheConformance, NullCacheConformance, span
from kvsched.testing.pool_suite import pages_of


@pytest.mark.parametrize("policy", POLICIES)
class TestRadixCache(CacheConformance):
    @pytest.fixture(autouse=True)
    def choose(self, policy: str) -> None:
        self.policy = policy

    def make(self, page_size: int) -> RadixCache:
        return RadixCache(page_size, self.policy)

    def fingerprint(self, cache: Any) -> Any:
        return fingerprint(cache)


class TestNullCache(NullCacheConformance):
    def make(self, page_size: int) -> NullCache:
        return NullCache(page_size)


def test_random_calls_against_the_model() -> None:
    """The other policies run in test_eviction.py, with pins too."""
    run_state_machine_as_test(cache_machine(RadixCache, ORDERS["lru"]), settings=SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_random_calls_against_the_model_for_long(policy: str) -> None:
    run_state_machine_as_test(cache_machine(lambda size: RadixCache(size, policy), ORDERS[policy]), settings=LONG)


def test_they_are_what_the_protocols_ask_for() -> None:
    pool: Pool = PagePool(4, 1)
    cache: TreeCache = RadixCache(1)
    null: TreeCache = NullCache(1)
    for thing, protocol in ((pool, Pool), (cache, TreeCache), (null, TreeCache), (cache.lock((), span(0, 1)), Handle), (null.lock((), span(0, 1)), Handle)):
        assert isinstance(thing, protocol)


def build(cache: RadixCache, prompts: list[list[int]]) -> None:
    for turn, prompt in enumerate(prompts):
        whole = prompt[: len(prompt) - len(prompt) % cache.page_size]
        handle = cache.lock((), tokens_of(whole))
        n = (len(whole) - handle.length) // cache.page_size
        cache.extend(handle, tokens_of(whole[handle.length :]), np.arange(100 * turn, 100 * turn + n, dtype=np.int32))
        if turn % 3:
            cache.unlock(handle)


prompts = st.lists(st.integers(0, 1), max_size=14)


@SHORT
@given(page_size=st.integers(1, 3), content=st.lists(prompts, max_size=8), asked=prompts)
def test_match_and_path_read_only(page_size: int, content: list[list[int]], asked: list[int]) -> None:
    cache = RadixCache(page_size)
    build(cache, content)
    before = fingerprint(cache)
    for namespace in ((), "unknown"):
        cache.match(namespace, tokens_of(asked))
        cache.path(namespace, tokens_of(asked))
    assert fingerprint(cache) == before


def test_the_fingerprint_sees_a_split_a_touch_and_a_lock() -> None:
    """The test above is worth as much as its fingerprint."""
    cache = RadixCache(1)
    build(cache, [[9], [0, 0, 0, 0], [0, 1]])
    for call in (lambda: cache.lock((), span(0, 1)), lambda: cache.retain((), tokens_of([0, 0]), "x"), lambda: cache.unlock(next(iter(cache._handles)))):
        before = fingerprint(cache)
        call()
        assert fingerprint(cache) != before


@SHORT
@given(page_size=st.integers(1, 3), content=st.lists(prompts, max_size=8), one=prompts, other=prompts)
def test_paths_part_where_prompts_part(page_size: int, content: list[list[int]], one: list[int], other: list[int]) -> None:
    cache = RadixCache(page_size)
    build(cache, content)
    first, second = cache.path((), tokens_of(one)), cache.path((), tokens_of(other))
    shared = [a for a, b in zip(first, second, strict=False) if a == b]
    assert list(first[: len(shared)]) == shared == list(second[: len(shared)]), "paths meet again after they parted"
    assert (not first) == (not cache._roots)
    for prompt, path in ((one, first), (other, second)):
        handle = cache.lock((), tokens_of(prompt))
        assert (handle.length > 0) == (len(path) > 1), "a match has nodes besides the root"
        cache.unlock(handle)


def test_path_of_an_unknown_namespace_is_empty() -> None:
    cache = RadixCache(1)
    assert cache.path("x", span(0, 3)) == ()
    build(cache, [[0, 1, 2]])
    assert len(cache.path((), span(0, 3))) == 2
    assert len(cache.path((), span(50, 53))) == 1


# Structure.


def nodes_below(cache: RadixCache, namespace: Hashable = ()) -> int:
    stack, count = [cache._roots[namespace]], -1
    while stack:
        count += 1
        stack.extend((stack.pop().children or {}).values())  # type: ignore[arg-type]
    return count


def test_a_prompt_inserted_in_chunks_by_one_handle_is_one_node() -> None:
    cache = RadixCache(16)
    handle = cache.lock((), span(0, 16))
    for start in range(0, 128_000, 8_192):
        chunk = span(start, min(start + 8_192, 128_000))
        cache.extend(handle, chunk, np.arange(start // 16, start // 16 + len(chunk) // 16, dtype=np.int32))
    assert nodes_below(cache) == 1
    assert handle.pages.tolist() == [*range(8_000)]
    cache.check()


def test_a_leaf_that_others_hold_or_used_does_not_grow() -> None:
    for used in (True, False):
        cache = RadixCache(1)
        handle = cache.lock((), span(0, 2))
        cache.extend(handle, span(0, 2), pages_of(0, 1))
        other = cache.lock((), span(0, 2))
        if used:
            cache.unlock(other)
        cache.extend(handle, span(2, 4), pages_of(2, 3))
        assert nodes_below(cache) == 2
        assert other.length == 2
        assert cache.exclusive(handle) == (4 if used else 2)
        cache.check()


def test_a_lock_in_the_tail_costs_the_tail() -> None:
    """A cap at the last page splits a long node; neither part may be copied whole."""
    cache = RadixCache(16)
    handle = cache.lock((), span(0, 128_000))
    cache.extend(handle, span(0, 128_000), np.arange(8_000, dtype=np.int32))
    leaf = handle.node
    assert leaf is not None
    long = leaf.tokens
    short = cache.lock((), span(0, 127_984))
    assert short.node is not None
    assert short.node.tokens is long, "the long part is the object it was"
    assert len(leaf.tokens) == 16 * WIDTH
    cache.lock((), span(0, 16))
    assert short.node.tokens is long
    cache.check()


def test_locking_a_locked_path_does_not_walk_it_again() -> None:
    """Many requests share a deep path: all but the first lock it at its end only."""
    depths = []
    for depth in (4, 64):
        cache = RadixCache(1)
        held = cache.lock((), span(0, 1))
        for turn in range(depth):
            cache.extend(held, span(turn, turn + 1), pages_of(turn))
            cache.unlock(cache.lock((), span(0, turn + 1)))
        assert nodes_below(cache) == depth
        node = held.node
        assert node is not None
        depths.append(calls_made(lambda cache=cache, node=node: (cache._acquire(node), cache._forsake(node))))  # type: ignore[misc]
    assert depths[0] == depths[1]


def test_a_namespace_that_nobody_needs_is_forgotten() -> None:
    cache = RadixCache(1)
    empty = cache.lock("held", span(0, 2))
    assert len(cache._roots) == 1
    cache.unlock(empty)
    assert not cache._roots
    handle = cache.lock("content", span(0, 2))
    cache.extend(handle, span(0, 2), pages_of(0, 1))
    cache.unlock(handle)
    cache.evict(2)
    assert not cache._roots


def test_the_requests_namespace_is_a_namespace() -> None:
    cache = RadixCache(1)
    build(cache, [])
    for turn, space in enumerate([Namespace(adapter="a", salt="b"), Namespace(adapter="ab"), Namespace(version="a", salt="b"), Namespace()]):
        assert cache.match(space, span(0, 3)) == 0
        handle = cache.lock(space, span(0, 3))
        cache.extend(handle, span(0, 3), np.arange(3 * turn, 3 * turn + 3, dtype=np.int32))
        cache.unlock(handle)
        assert cache.match(Namespace(space.adapter, space.version, space.salt), span(0, 3)) == 3


def test_cached_pages_lists_them_all() -> None:
    cache = RadixCache(1)
    assert len(cache.cached_pages()) == 0
    build(cache, [[0, 1, 2], [0, 1, 9], [5]])
    assert sorted(cache.cached_pages().tolist()) == [0, 1, 2, 100, 200]


# Cost.


def test_c19_an_eviction_costs_the_same_in_any_tree() -> None:
    costs = []
    for leaves in (200, 5_000):
        cache = RadixCache(1)
        for leaf in range(leaves):
            handle = cache.lock((), tokens_of([leaf // 10, leaf, 1]))
            cache.extend(handle, tokens_of([leaf // 10, leaf, 1])[handle.length :], np.arange(3 * leaf, 3 * leaf + 3 - handle.length, dtype=np.int32))
            cache.unlock(handle)
        costs.append(calls_made(lambda cache=cache: [cache.evict(1) for _ in range(100)]))  # type: ignore[misc]
    assert costs[1] <= costs[0] * 1.1


def test_locking_and_unlocking_for_ever_does_not_fill_the_queues() -> None:
    cache = RadixCache(1)
    build(cache, [[9], [0, 1], [2, 3], [4, 5]])
    for _ in range(5_000):
        cache.unlock(cache.lock((), tokens_of([0, 1])))
    assert len(cache._victims._heap) < 200
    cache.check()


def test_an_insert_costs_what_is_inserted_not_what_the_handle_has() -> None:
    costs = []
    for length in (100, 100_000):
        cache = RadixCache(1)
        handle = cache.lock((), span(0, length))
        cache.extend(handle, span(0, length), np.arange(length, dtype=np.int32))
        costs.append(calls_made(lambda cache=cache, handle=handle, at=length: cache.extend(handle, span(at, at + 8), pages_of(*range(at, at + 8)))))  # type: ignore[misc]
    assert costs[0] == costs[1]


# Arguments.


@pytest.mark.parametrize("page_size", [0, -1, 1.5, True, None, "16"])
def test_a_bad_page_size_is_refused(page_size: Any) -> None:
    for kind in (RadixCache, NullCache):
        with pytest.raises(ConfigError, match="page_size must be an integer of at least 1"):
            kind(page_size)


@pytest.mark.parametrize("call", [
    lambda cache, handle: cache.match([], span(0, 2)), lambda cache, handle: cache.lock({}, span(0, 2)),
    lambda cache, handle: cache.path([], span(0, 2)), lambda cache, handle: cache.retain([], span(0, 2), "x"),
    lambda cache, handle: cache.retain((), span(0, 2), []), lambda cache, handle: cache.unretain([]),
    lambda cache, handle: cache.match((), np.zeros((2, 2), dtype=np.int32)), lambda cache, handle: cache.lock((), [0.5]),
    lambda cache, handle: cache.lock((), np.array([2**31])), lambda cache, handle: cache.extend(handle, span(3, 4), [1.5]),
    lambda cache, handle: cache.extend(handle, span(3, 4), [[1]]), lambda cache, handle: cache.evict(1.0), lambda cache, handle: cache.evict(True),
])
def test_bad_arguments_are_refused_and_change_nothing(call: Any) -> None:
    cache = RadixCache(1)
    handle = cache.lock((), span(0, 3))
    cache.extend(handle, span(0, 3), pages_of(0, 1, 2))
    before = fingerprint(cache)
    with pytest.raises(InvalidRequest):
        call(cache, handle)
    assert fingerprint(cache) == before


def test_other_integer_sequences_are_accepted() -> None:
    cache = RadixCache(1)
    plain: Any = [0, 1, 2]
    handle = cache.lock((), plain)
    cache.extend(handle, plain, plain)
    strided: Any = np.array([0, 9, 1, 9, 2, 9])[::2]
    assert cache.match((), strided) == 3


def test_pages_of_a_handle_that_was_given_back_cannot_be_read() -> None:
    cache = RadixCache(1)
    handle = cache.lock((), span(0, 3))
    cache.unlock(handle)
    with pytest.raises(InvalidHandle, match="its pages may belong to others"):
        _ = handle.pages


@pytest.mark.parametrize("stranger", [None, 7, "handle", NullCache(1).lock((), span(0, 1))])
def test_what_is_no_handle_is_refused(stranger: Any) -> None:
    cache = RadixCache(1)
    with pytest.raises(InvalidHandle):
        cache.unlock(stranger)
    with pytest.raises(InvalidHandle):
        NullCache(1).unlock(stranger)


# The audit.


@pytest.mark.parametrize(("break_it", "text"), [
    (lambda cache, leaf: setattr(cache, "_evictable", 99), "counters say"),
    (lambda cache, leaf: setattr(leaf, "locks", 2), "locks are not 0 handles"),
    (lambda cache, leaf: leaf.tokens.extend(b"0000"), "tokens do not fill the pages"),
    (lambda cache, leaf: setattr(leaf, "ticket", 0), "wrong queue"),
    (lambda cache, leaf: setattr(leaf, "parent", None), "a child hangs wrongly"),
    (lambda cache, leaf: setattr(leaf, "children", {}), "something empty was kept"),
    (lambda cache, leaf: leaf.pages.__setitem__(slice(0, 4), leaf.parent.pages[:4]), "a page stands in the tree twice"),
    (lambda cache, leaf: cache._pins.update(x=[]), "pins by owner and pins by node differ"),
    (lambda cache, leaf: setattr(cache._victims, "_live", 5), "a queue holds a node that is gone, or miscounts"),
    (lambda cache, leaf: cache._handles.add(RadixCache(1).lock((), span(0, 1))), "a handle ends at a node that is gone"),
])
def test_the_audit_finds_what_is_broken_and_prints_the_state(break_it: Any, text: str) -> None:
    cache = RadixCache(1)
    build(cache, [[8], [0, 1, 2, 3], [0, 1, 4]])
    leaf = next(node for node in cache._victims.items() if len(node.pages) == WIDTH)
    cache.check()
    break_it(cache, leaf)
    with pytest.raises(AccountingError, match=text) as caught:
        cache.check()
    assert "locked=" in str(caught.value)
    assert "<node" in str(caught.value)


def test_the_null_caches_audit_finds_a_drift() -> None:
    cache = NullCache(1)
    cache._handles = -1
    with pytest.raises(AccountingError, match="1 handles more"):
        cache.check()


# Pool and tree together.


class Host:
    """Requests that allocate, insert, evict and give back, with every page accounted for after each call."""

    def __init__(self, seed: int, policy: str, pages: int = 48) -> None:
        self.random = random.Random(seed)
        self.pool = PagePool(pages, 2, reserved_pages=1)
        self.cache = RadixCache(2, policy)
        self.requests: list[tuple[Any, list[int], list[int]]] = []  # handle, tokens, private pages

    def get(self, n: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        short = max(0, n - self.pool.free)
        if short > self.cache.evictable:
            return None
        before = self.cache.evictable
        if short:
            self.pool.release(self.cache.evict(short))
        assert before - self.cache.evictable == short, "C18: more was evicted than was missing"
        return self.pool.alloc(n)

    def admit(self) -> None:
        tokens = [self.random.randrange(2) for _ in range(2 * self.random.randrange(1, 7))]
        handle = self.cache.lock((), tokens_of(tokens))
        pages = self.get(len(tokens) // 2 - handle.length // 2 + self.random.randrange(2))
        if pages is None:
            self.cache.unlock(handle, used=False)
        else:
            self.requests.append((handle, tokens, pages.tolist()))

    def compute(self, request: tuple[Any, list[int], list[int]]) -> None:
        handle, tokens, private = request
        n = min((len(tokens) - handle.length) // 2, len(private), self.random.randrange(1, 4))
        own = pages_of(*private[:n])
        got = self.cache.extend(handle, tokens_of(tokens[handle.length : handle.length + 2 * n]), own)
        assert got is not None
        self.pool.release(own[got != own])
        del private[:n]

    def end(self, request: tuple[Any, list[int], list[int]]) -> None:
        self.requests.remove(request)
        handle, _, private = request
        self.pool.release(pages_of(*private))
        self.cache.unlock(handle)

    def step(self) -> None:
        move = self.random.randrange(6)
        if move <= 1:
            self.admit()
        elif move <= 3 and self.requests:
            self.compute(self.random.choice(self.requests))
        elif move == 4 and self.requests:
            self.end(self.random.choice(self.requests))
        elif move == 5:
            self.pool.release(self.cache.evict(self.random.randrange(4)))

    def audit(self) -> None:
        private = [page for _, _, pages in self.requests for page in pages]
        cached = self.cache.cached_pages().tolist()
        out = self.pool.handed_out().tolist()
        assert sorted(private + cached) == out, "C22: free, tree and private pages are not a partition of the pool"
        assert self.pool.free + self.cache.evictable + self.cache.locked + len(private) == self.pool.usable
        self.pool.check()
        self.cache.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_c22_pool_and_tree_share_every_page(policy: str, steps: int) -> None:
    for seed in range(2):
        host = Host(seed, policy)
        for _ in range(steps):
            host.step()
            host.audit()
        for request in list(host.requests):
            host.end(request)
        host.pool.release(host.cache.clear())
        host.audit()
        assert host.pool.free == host.pool.usable


def test_c13_what_is_locked_for_one_cannot_be_evicted_for_another() -> None:
    """Four pages, one of them cached: A matches it and needs one more; B needs three and must wait."""
    pool, cache = PagePool(4, 16), RadixCache(16)
    first = cache.lock((), span(0, 16))
    cache.extend(first, span(0, 16), pool.alloc(1))
    cache.unlock(first)
    a, b = cache.lock((), span(0, 32)), cache.lock((), span(100, 148))
    assert (a.length, b.length) == (16, 0)
    pages = pool.alloc(1)
    assert pool.free + cache.evictable == 2, "B's three pages are not there"
    assert sorted([*a.pages.tolist(), *pages.tolist()]) == [0, 1]


def test_c20_the_shortfall_is_counted_in_pages() -> None:
    """Page 64, 3,000 tokens are 47 pages: with 40 free exactly 7 are evicted, with 47 none."""
    pool, cache = PagePool(147, 64), RadixCache(64)
    handle = cache.lock((), span(0, 6400))
    cache.extend(handle, span(0, 6400), pool.alloc(100))
    cache.unlock(handle)
    need = -(-3000 // 64)
    assert need == 47
    before = fingerprint(cache)
    assert len(cache.evict(max(0, need - pool.free))) == 0
    assert fingerprint(cache) == before
    pool.alloc(7)
    pool.release(cache.evict(max(0, need - pool.free)))
    assert (pool.free, cache.evictable) == (47, 93)
