"""A hypothesis state machine for a tree cache, against the plain model of `kvsched.testing.cache_model`.

What lives here: random calls of `kvsched.protocols.TreeCache`, at tiny sizes, wrong ones included, and what must hold after
each. What does not: tests with names (`kvsched.testing.cache_suite`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsched.errors import InvalidHandle
from kvsched.protocols import Handle, TreeCache
from kvsched.testing.cache_model import Order, PlainCache, PlainHandle
from kvsched.testing.pool_suite import pages_of, refused
from kvsched.units import Tokens

CacheFactory = Callable[[int], TreeCache]
"""Makes an empty cache of pages of so many tokens."""

PAGES = 24
NAMESPACES: tuple[Hashable, ...] = ((), (), (), (), ("a", "bc"), ("ab", "c"), None)
"""Mostly one, so that content is used again. Two others become one when somebody joins them into a string."""

Shape = tuple[list[int], int]
"""A prompt: which of two pages stands at each place, and how many tokens of one more page follow."""
shapes: st.SearchStrategy[Shape] = st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, 2))
"""Few and short, so that prompts are equal, share prefixes, and part within a node."""


def tokens_of(tokens: Any) -> Tokens:
    """Token ids as the protocol wants them, read-only as those of a request are."""
    array = np.array(tokens, dtype=np.int32)
    array.flags.writeable = False
    return array


class CacheMachine(RuleBasedStateMachine):
    """Random calls. Page ids are used again as soon as they are evicted, so that a stale one shows."""

    factory: ClassVar[CacheFactory]
    order: ClassVar[Order | None] = None
    settled = False
    """Whether the last call was right in every respect."""

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.cache: TreeCache = type(self).factory(page_size)
        self.model = PlainCache(page_size)
        self.free = list(range(PAGES))
        self.live: list[tuple[Handle, PlainHandle]] = []
        self.grown = self.cache.grown
        self.size = 0
        assert self.cache.page_size == page_size

    def prompt(self, shape: Shape) -> list[int]:
        """The tokens of a shape. The two pages differ in their last token only."""
        size = self.model.page_size
        return [token for page in shape[0] for token in [*[7] * (size - 1), page]] + [7] * min(shape[1], size - 1)

    def lock_both(self, namespace: Hashable, tokens: list[int], priority: int = 0) -> tuple[Handle, PlainHandle]:
        """Lock in the cache and in the model."""
        self.settled = False
        return self.cache.lock(namespace, tokens_of(tokens), priority), self.model.lock(namespace, tokens, priority)

    def unlock_both(self, handle: Handle, plain: PlainHandle, used: bool = True) -> None:
        """Unlock in both."""
        self.settled = False
        self.cache.unlock(handle, used)
        self.model.unlock(plain, used)

    @rule(namespace=st.sampled_from(NAMESPACES), shape=shapes)
    def match(self, namespace: Hashable, shape: Shape) -> None:
        self.settled = False
        tokens = self.prompt(shape)
        got = self.cache.match(namespace, tokens_of(tokens))
        assert got == self.model.match(namespace, tokens), f"match of {tokens} is {got}"

    @rule(namespace=st.sampled_from(NAMESPACES), shape=shapes, priority=st.integers(-1, 1))
    def lock(self, namespace: Hashable, shape: Shape, priority: int) -> None:
        self.live.append(self.lock_both(namespace, self.prompt(shape), priority))

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99), shape=shapes, adopt=st.booleans())
    def extend(self, at: int, shape: Shape, adopt: bool) -> None:
        self.insert(*self.live[at % len(self.live)], self.prompt(shape), adopt)

    def insert(self, handle: Handle, plain: PlainHandle, tokens: list[int], adopt: bool = True) -> None:
        """Extend in both, by as many whole pages of `tokens` as there are free pages."""
        self.settled = False
        size = self.model.page_size
        n = min(len(tokens) // size, len(self.free))
        tokens = tokens[: n * size]
        own = [self.free.pop() for _ in range(n)]
        got = self.cache.extend(handle, tokens_of(tokens), pages_of(*own), adopt=adopt)
        want = self.model.extend(plain, tokens, own, adopt)
        assert (None if got is None else got.tolist()) == want, f"extend by {tokens} on pages {own} answered {got}, expected {want}"
        self.free += [page for page in own if want is None or page not in want]

    @rule(namespace=st.sampled_from(NAMESPACES), shape=shapes, priority=st.integers(-1, 1))
    def run_a_request(self, namespace: Hashable, shape: Shape, priority: int) -> None:
        """Lock, insert and unlock in one go: what fills a tree."""
        tokens = self.prompt(shape)
        handle, plain = self.lock_both(namespace, tokens, priority)
        self.insert(handle, plain, tokens[handle.length :])
        self.unlock_both(handle, plain)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99), used=st.sampled_from([True, True, False]))
    def unlock(self, at: int, used: bool) -> None:
        handle, plain = self.live.pop(at % len(self.live))
        self.unlock_both(handle, plain, used)
        refused(InvalidHandle, lambda: self.cache.unlock(handle))
        refused(InvalidHandle, lambda: self.cache.exclusive(handle))
        refused(InvalidHandle, lambda: self.cache.extend(handle, tokens_of([]), pages_of()))

    @rule()
    def unlock_a_foreign_handle(self) -> None:
        self.settled = False
        other = type(self).factory(self.model.page_size)
        refused(InvalidHandle, lambda: self.cache.unlock(other.lock((), tokens_of([]))))

    @rule(n=st.sampled_from([1, 1, 1, 2, 2, 3, 5, 0, PAGES, None]))
    def evict(self, n: int | None) -> None:
        """The moment of eviction: exactly the promise, nobody who is held, and whom the order names. None clears."""
        self._forget((self.cache.clear() if n is None else self.cache.evict(n)).tolist(), PAGES if n is None else n)

    def _forget(self, pages: list[int], n: int) -> None:
        self.settled = False
        promised = min(n, self.model.evictable)
        assert len(pages) == promised, f"{promised} pages were promised of {n} asked for, and {pages} delivered"
        assert len(set(pages)) == len(pages), f"a page was evicted twice: {pages}"
        order = type(self).order
        if order is not None:
            due = self.model.victims(n, order, pages)
            assert set(pages) == due, f"evicted {sorted(pages)} where {sorted(due)} were due: {self.model.cells}"
        self.model.forget(pages)
        self.free += pages

    @invariant()
    def all_is_well(self) -> None:
        self.settled = False
        self._counters_and_handles()
        self._content()
        self._grown()
        self.cache.check()
        self.settled = True

    def _counters_and_handles(self) -> None:
        cache, model = self.cache, self.model
        assert (cache.evictable, cache.locked) == (model.evictable, model.locked), (
            f"evictable, locked are {cache.evictable}, {cache.locked}, expected {model.evictable}, {model.locked}"
        )
        for handle, plain in self.live:
            assert handle.length == len(plain.tokens), f"{handle} protects {handle.length}, expected {plain.tokens}"
            assert handle.pages.tolist() == model.pages(plain), f"{handle} has pages {handle.pages}"
            assert cache.exclusive(handle) == model.exclusive(plain), f"exclusive({handle}) is {cache.exclusive(handle)}"

    def _content(self) -> None:
        """What is cached is found, and every page has one owner."""
        for namespace, tokens in self.model.cells:
            assert self.cache.match(namespace, tokens_of(tokens)) == len(tokens), f"{tokens} is not found"
        cached = [cell.page for cell in self.model.cells.values()]
        assert sorted(cached + self.free) == list(range(PAGES)), f"cached {cached} and free {self.free} are not all pages"

    def _grown(self) -> None:
        """It moves when content is added, and never back."""
        size, grown = len(self.model.cells), self.cache.grown
        assert grown >= self.grown, "grown went back"
        assert grown > self.grown or size <= self.size, "content was added and grown stood still"
        self.grown, self.size = grown, size

    def teardown(self) -> None:
        """Everything can be let go and forgotten. Not tried after a failure, whose message it would hide."""
        if not self.settled:
            return
        for handle, plain in self.live:
            self.unlock_both(handle, plain)
        self.live = []
        self._forget(self.cache.clear().tolist(), PAGES)
        self._counters_and_handles()
        assert not self.model.cells, "something is still cached after all was let go and cleared"


def cache_machine(
    factory: CacheFactory, order: Order | None = None, base: type[CacheMachine] = CacheMachine
) -> type[CacheMachine]:
    """A hypothesis state machine over caches that `factory` makes. Its `TestCase` attribute is what a test runner collects.

    order: whom an eviction must choose, exactly; see `kvsched.testing.cache_model.ORDERS`. None: anyone it may choose.
    base: a subclass of `CacheMachine` with more rules, for a cache that can do more.
    """

    class Machine(base):  # type: ignore[valid-type, misc]  # a class that is known when this runs
        pass

    Machine.factory = staticmethod(factory)
    Machine.order = None if order is None else staticmethod(order)
    Machine.__name__ = Machine.__qualname__ = f"CacheMachine[{getattr(factory, '__name__', 'factory')}]"
    return Machine
