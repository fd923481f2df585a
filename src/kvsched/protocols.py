"""What kvsched asks of the parts a host may bring: page pool, tree cache, executor, event sink.

Only protocols live here. The decision core imports this file and never an implementation. `kvsched.memory` ships
implementations of the first two; `kvsched.testing` has a conformance suite for each of these, so that a host can run it on
a class of its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvsched.units import Pages, Tokens

if TYPE_CHECKING:
    from kvsched.plan import Event, Plan, StepResult


@runtime_checkable
class Pool(Protocol):
    """Hands out page ids. It knows nothing of requests, tokens or caches; a page is free or it is handed out."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def usable(self) -> int:
        """Pages that can ever be handed out: those configured less those reserved."""

    @property
    def free(self) -> int:
        """Pages that `alloc` can hand out now."""

    def alloc(self, n: int) -> Pages:
        """Hand out `n` pages. Raises `PoolExhausted` and changes nothing when fewer than `n` are free."""

    def release(self, pages: Pages) -> None:
        """Take pages back. Raises `DoubleFree` and changes nothing unless each is handed out and named once."""

    def check(self) -> None:
        """Raise `AccountingError`, with the whole state in the message, unless every invariant holds."""


@runtime_checkable
class Handle(Protocol):
    """A locked path of a tree cache, from the root to `length` tokens. Given back with `TreeCache.unlock`."""

    @property
    def length(self) -> int:
        """Tokens the handle protects; a multiple of the page size."""

    @property
    def pages(self) -> Pages:
        """The pages that hold those tokens, in order."""


@runtime_checkable
class TreeCache(Protocol):
    """Remembers which page holds which page-aligned prefix, per namespace.

    The cache owns the pages in it: cached pages are handed out from the pool's point of view. Whoever evicts gives
    the pages it gets back to the pool. A cached page is locked (some handle protects it) or evictable, never both.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def caches(self) -> bool:
        """False where nothing is ever kept: every match is 0, and `extend` must not be called (it raises `HostError`)."""

    @property
    def evictable(self) -> int:
        """Cached pages that no handle protects. `evict(n)` delivers min(n, evictable): it is a promise (law B5)."""

    @property
    def locked(self) -> int:
        """Cached pages that at least one handle protects."""

    @property
    def grown(self) -> int:
        """Counts up whenever content is added, so that an old `match` is an upper bound while it stands still."""

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        """Tokens of the longest cached page-aligned prefix. Reads only: no split, no touch, no lock (law D1)."""

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> Handle:
        """Match and lock in one operation. The caller caps `tokens` beforehand (see `units.reusable`).

        priority: of the request (lower is better), for an eviction policy that goes by it.
        """

    def extend(self, handle: Handle, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        """Insert below the handle's end and move the handle there, locked.

        `tokens` continue at `handle.length` and are whole pages; `pages[i]` holds the i-th page of them. Returns the
        pages that the cache has for this range, same shape. Where they differ from `pages`, the cache already had the
        content and the caller still owns `pages[i]`. With `adopt=False` the caller cannot exchange its pages: if the
        cache already has the first page of the range, None is returned and nothing changes.
        Cost: O(pages given), not O(handle.length).
        """

    def unlock(self, handle: Handle, used: bool = True) -> None:
        """Give a handle back. Uses what the handle recorded. Raises `InvalidHandle`, changing nothing, the second time.

        used: False for a look that came to nothing, which should not count as a use of the content.
        """

    def exclusive(self, handle: Handle) -> int:
        """Pages that only this handle protects: what `evictable` would grow by if it were unlocked now."""

    def evict(self, n: int) -> Pages:
        """Forget exactly min(n, evictable) pages and return them. A leaf longer than what is asked gives up its tail."""

    def clear(self) -> Pages:
        """Forget everything that is evictable and return its pages."""

    def check(self) -> None:
        """Raise `AccountingError`, with the whole state in the message, unless every invariant holds."""


@runtime_checkable
class Executor(Protocol):
    """The host's forward pass."""

    def run(self, plan: Plan) -> StepResult:
        """Compute what the plan says, and return the sampled tokens in the plan's row order."""


@runtime_checkable
class EventSink(Protocol):
    """Hears of changes in a request's life, after the scheduler's state is complete."""

    def event(self, event: Event) -> None:
        """Take one event. It must not call the scheduler (`ReentrantCall`)."""
