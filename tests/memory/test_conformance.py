"""The suites and state machines catch what they are for: each planted fault fails, and the honest classes pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from trees import SHORT

from kvsched.memory import NullCache, PagePool, RadixCache
from kvsched.memory.node import Node
from kvsched.protocols import Handle
from kvsched.testing.cache_machine import cache_machine
from kvsched.testing.cache_model import ORDERS
from kvsched.testing.cache_suite import CacheConformance, NullCacheConformance
from kvsched.testing.pool_suite import PoolConformance, pool_machine
from kvsched.units import Pages, Tokens

HUNT = settings(max_examples=2000, stateful_step_count=50, deadline=None, derandomize=True, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


def failures(suite: Any) -> dict[str, Exception]:
    """Names of the tests of a suite that fail, and how. A suite object is made for each, as a test runner does."""
    out: dict[str, Exception] = {}
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception as error:  # noqa: BLE001 -- a fault may show as any exception
                out[name] = error
    return out


# Pools. The faulty ones keep their own check() quiet: a suite must see the fault from outside.


class Quiet(PagePool):
    def check(self) -> None:
        """Say nothing."""


class Leaky(Quiet):
    """Forgets the last of three or more pages that come back."""

    def release(self, pages: Pages) -> None:
        super().release(pages[:-1] if len(pages) > 2 else pages)


class TwoOwners(Quiet):
    """Hands a page out again while its first owner has it."""

    def alloc(self, n: int) -> Pages:
        pages = super().alloc(n)
        if n > 1:
            pages[0] = pages[-1]
        return pages


class Forgiving(Quiet):
    """Puts a page on the free list as often as it is told."""

    def release(self, pages: Pages) -> None:
        n = len(pages)
        self._stack = np.concatenate((self._stack[: self._top], pages[::-1], self._stack[self._top + n :]))
        self._mark[pages] = -1
        self._top += n


class HalfDone(Quiet):
    """Releases up to the first bad page before it complains."""

    def release(self, pages: Pages) -> None:
        for page in pages:
            super().release(np.array([page], dtype=np.int32))


class Optimist(Quiet):
    """Counts one page as free that is not."""

    @property
    def free(self) -> int:
        return super().free + (super().free < self.usable)


POOL_FAULTS: list[type[PagePool]] = [Leaky, TwoOwners, Forgiving, HalfDone, Optimist]


def pool_suite(kind: Callable[[int, int], PagePool]) -> PoolConformance:
    class Suite(PoolConformance):
        def make(self, usable: int, page_size: int) -> PagePool:
            return kind(usable, page_size)

    return Suite()


@pytest.mark.parametrize("fault", POOL_FAULTS)
def test_the_pool_suite_catches(fault: type[PagePool]) -> None:
    assert failures(pool_suite(fault)), f"{fault.__name__} passed"


@pytest.mark.parametrize("fault", POOL_FAULTS)
def test_the_pool_machine_catches(fault: type[PagePool]) -> None:
    with pytest.raises((AssertionError, Exception)) as caught:
        run_state_machine_as_test(pool_machine(fault), settings=HUNT)
    assert "deadline" not in str(caught.value).lower()


def test_honest_pools_pass() -> None:
    assert failures(pool_suite(PagePool)) == failures(pool_suite(Quiet)) == {}
    run_state_machine_as_test(pool_machine(Quiet), settings=SHORT)


# Caches.


class QuietCache(RadixCache):
    def check(self) -> None:
        """Say nothing."""


class EvictsLess(QuietCache):
    """Promises by `evictable` and delivers one page less when asked for several."""

    def evict(self, n: int) -> Pages:
        return super().evict(n - 1 if n > 2 else n)


class EvictsWholeLeaves(QuietCache):
    """Forgets the whole leaf where its tail was asked for."""

    def evict(self, n: int) -> Pages:
        node = self._victims.first()
        return super().evict(max(n, len(node.pages) // 4) if n and node else n)


class EvictsTheLocked(QuietCache):
    """Takes a page from a leaf that a handle protects when nothing else is there."""

    def evict(self, n: int) -> Pages:
        if n and not self._evictable and self._handles:
            node = max((handle.node for handle in self._handles if handle.node), key=lambda node: len(node.pages))
            if len(node.pages) and node.children is None:
                page = np.frombuffer(bytes(node.pages[-4:]), dtype=np.int32)
                del node.pages[-4:]
                del node.tokens[-4 * self.page_size :]
                self._locked -= 1
                return page
        return super().evict(n)


class ForgetsTheFront(QuietCache):
    """Forgets the first page of a leaf and keeps what follows it."""

    def evict(self, n: int) -> Pages:
        node = self._victims.first()
        if n == 1 and node is not None and len(node.pages) > 4:
            page = np.frombuffer(bytes(node.pages[:4]), dtype=np.int32)
            del node.pages[:4]
            del node.tokens[: 4 * self.page_size]
            self._evictable -= 1
            return page
        return super().evict(n)


class UnlocksByPresentShape(QuietCache):
    """A split leaves handles at the upper part, and their unlock lets go of that alone."""

    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        for handle in self._handles:
            if handle.node is node:
                handle.node = upper
                upper.locks += 1
        return upper


class UnlocksOnceMore(QuietCache):
    """Accepts a handle a second time, and counts down again."""

    def unlock(self, handle: Any, used: bool = True) -> None:
        if handle.node is None:
            self._locked -= 1
            self._evictable += 1
            return
        super().unlock(handle, used)


class SkipsTheNodeItself(QuietCache):
    """Locks the parents of where a handle ends, and not the node."""

    def _acquire(self, node: Node) -> None:
        super()._acquire(node.parent or node)

    def _forsake(self, node: Node) -> None:
        super()._forsake(node.parent or node)


class TouchesOnMatch(QuietCache):
    """A match counts as a use."""

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        handle = self.lock(namespace, tokens)
        self.unlock(handle)
        return handle.length


class CountsEveryLook(QuietCache):
    """A handle that was not used counts as a use."""

    def unlock(self, handle: Handle, used: bool = True) -> None:
        super().unlock(handle, used=True)


class JoinsNamespaces(QuietCache):
    """A namespace becomes a string."""

    def _root(self, namespace: Any) -> Any:
        return super()._root(self._joined(namespace))

    def lock(self, namespace: Any, tokens: Tokens, priority: int = 0) -> Any:
        return super().lock(self._joined(namespace), tokens, priority)

    def _joined(self, namespace: Any) -> str:
        return "".join(map(str, namespace)) if isinstance(namespace, tuple) else str(namespace)


class KeepsBoth(QuietCache):
    """Says that it took the caller's pages where it had the content already."""

    def extend(self, handle: Any, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        return None if super().extend(handle, tokens, pages, adopt) is None else pages


class AlwaysAdopts(QuietCache):
    """Exchanges pages although the caller said that it cannot."""

    def extend(self, handle: Any, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        return super().extend(handle, tokens, pages)


class CountsTheWholePath(QuietCache):
    """Says of a handle that it alone protects what others protect, too."""

    def exclusive(self, handle: Handle) -> int:
        return super().exclusive(handle) and handle.length // self.page_size


class NeverGrows(QuietCache):
    """Does not tell that content was added."""

    @property
    def grown(self) -> int:
        return 0


CACHE_FAULTS: list[type[RadixCache]] = [
    EvictsLess, EvictsWholeLeaves, EvictsTheLocked, ForgetsTheFront, UnlocksByPresentShape, UnlocksOnceMore, SkipsTheNodeItself,
    TouchesOnMatch, CountsEveryLook, JoinsNamespaces, KeepsBoth, AlwaysAdopts, CountsTheWholePath, NeverGrows,
]


def cache_suite(kind: Callable[[int], RadixCache]) -> CacheConformance:
    class Suite(CacheConformance):
        def make(self, page_size: int) -> RadixCache:
            return kind(page_size)

    return Suite()


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_the_cache_suite_catches(fault: type[RadixCache]) -> None:
    assert failures(cache_suite(fault)), f"{fault.__name__} passed"


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_the_cache_machine_catches(fault: type[RadixCache]) -> None:
    with pytest.raises((AssertionError, Exception)) as caught:
        run_state_machine_as_test(cache_machine(fault, ORDERS["lru"]), settings=HUNT)
    assert "deadline" not in str(caught.value).lower()


def test_honest_caches_pass() -> None:
    assert failures(cache_suite(RadixCache)) == failures(cache_suite(QuietCache)) == {}
    run_state_machine_as_test(cache_machine(QuietCache, ORDERS["lru"]), settings=SHORT)


def test_the_machine_tells_policies_apart() -> None:
    """With an order stated, a cache that follows another one fails; without one it passes."""
    with pytest.raises(AssertionError, match="were due"):
        run_state_machine_as_test(cache_machine(lambda size: RadixCache(size, "lfu"), ORDERS["lru"]), settings=HUNT)
    run_state_machine_as_test(cache_machine(lambda size: RadixCache(size, "lfu")), settings=SHORT)


class Hoarder(NullCache):
    """Takes pages that it will never give back."""

    def extend(self, handle: Any, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        return pages


def test_the_null_suite_catches_a_cache_that_takes_pages() -> None:
    class Suite(NullCacheConformance):
        kind: type[NullCache] = NullCache

        def make(self, page_size: int) -> NullCache:
            return self.kind(page_size)

    assert failures(Suite()) == {}
    Suite.kind = Hoarder
    assert set(failures(Suite())) == {"test_extend_is_refused_and_takes_nothing"}
