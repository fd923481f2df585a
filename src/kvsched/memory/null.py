"""The cache that keeps nothing, so that "no prefix caching" needs no special case where one matches, locks or evicts.

What does not live here: any state but the count of what is handed out.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvsched.errors import AccountingError, HostError, InvalidHandle
from kvsched.memory.arguments import configured, count
from kvsched.protocols import Handle
from kvsched.units import Pages, Tokens


class NullHandle:
    """A handle over nothing."""

    __slots__ = ("cache",)

    length = 0

    def __init__(self, cache: NullCache) -> None:
        self.cache: NullCache | None = cache

    @property
    def pages(self) -> Pages:
        """No pages."""
        return np.empty(0, dtype=np.int32)


class NullCache:
    """A `kvsched.protocols.TreeCache` in which nothing is ever found, because `extend` is refused: see `caches`.

    page_size: tokens per page.
    """

    caches = False
    evictable = 0
    locked = 0
    grown = 0

    def __init__(self, page_size: int) -> None:
        self._page_size = configured("page_size", page_size, 1)
        self._handles = 0

    def __repr__(self) -> str:
        return f"<NullCache of pages of {self._page_size} tokens>"

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    def match(self, namespace: Hashable, tokens: Tokens) -> int:  # noqa: ARG002
        """0."""
        return 0

    def path(self, namespace: Hashable, tokens: Tokens) -> tuple[int, ...]:  # noqa: ARG002
        """No nodes."""
        return ()

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> NullHandle:  # noqa: ARG002
        """A handle of length 0."""
        self._handles += 1
        return NullHandle(self)

    def extend(self, handle: Handle, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:  # noqa: ARG002
        """Raise `HostError`: this cache cannot take over a page, so the caller asks `caches` before and keeps its pages."""
        raise HostError("this cache keeps nothing (caches is False); the caller keeps its pages")

    def unlock(self, handle: Handle, used: bool = True) -> None:  # noqa: ARG002
        """Give a handle back. Raises `InvalidHandle`, changing nothing, the second time."""
        self._live(handle).cache = None
        self._handles -= 1

    def exclusive(self, handle: Handle) -> int:
        """0."""
        self._live(handle)
        return 0

    def evict(self, n: int) -> Pages:
        """No pages: that is min(n, evictable)."""
        count(n)
        return np.empty(0, dtype=np.int32)

    def clear(self) -> Pages:
        """No pages."""
        return np.empty(0, dtype=np.int32)

    def retain(self, namespace: Hashable, tokens: Tokens, owner: Hashable) -> int:  # noqa: ARG002
        """0: there is nothing to pin."""
        return 0

    def unretain(self, owner: Hashable) -> None:
        """Nothing happens."""

    def check(self) -> None:
        """Raise `AccountingError` unless no more handles were given back than handed out."""
        if self._handles < 0:
            raise AccountingError(f"{self!r}: {-self._handles} handles more were given back than handed out")

    def _live(self, handle: Handle) -> NullHandle:
        if not isinstance(handle, NullHandle) or handle.cache is not self:
            raise InvalidHandle(f"{handle!r} is not a handle of this cache, or was given back before")
        return handle
