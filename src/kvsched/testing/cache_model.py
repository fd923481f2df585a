"""A plain model of a tree cache: a dict from prefix to page, and sets of the handles that hold each.

What lives here: what is right, written so that it can be seen to be right, at any cost. What does not: a tree. The model
shares no code with `kvsched.memory`; `kvsched.testing.cache_machine` runs both side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import attrs

Prefix = tuple[Hashable, tuple[int, ...]]
"""A namespace and all tokens from the start to the end of one page."""


@attrs.define
class Cell:
    """One cached page: who holds it, and its usage. Times are counts of locks and unlocks."""

    page: int
    born: int
    holders: set[int] = attrs.field(factory=set)
    last: int = 0
    uses: int = 0
    priority: int = 1 << 62
    pins: dict[int, Hashable] = attrs.field(factory=dict)


@attrs.define(eq=False)
class PlainHandle:
    """What the model remembers of one handle."""

    number: int
    namespace: Hashable
    tokens: tuple[int, ...]
    priority: int


Order = Callable[[Cell], Any]
"""Ranks cells; among the evictable pages without a cached page after them, the lowest goes first."""

ORDERS: dict[str, Order] = {
    "lru": lambda cell: cell.last,
    "lfu": lambda cell: (cell.uses, cell.last),
    "slru": lambda cell: (cell.uses > 1, cell.last),
    "fifo": lambda cell: cell.born,
    "priority": lambda cell: (-cell.priority, cell.last),
}
"""What the eviction policies of `kvsched.memory` mean, page by page. A use counts when its handle is given back; content is
born when the handle that brought it was locked; its priority is the best of the handles that used it."""


@attrs.define
class PlainCache:
    """The model. It does not choose whom to evict: it is told, and says whether that was allowed."""

    page_size: int
    cells: dict[Prefix, Cell] = attrs.field(factory=dict)
    handles: list[PlainHandle] = attrs.field(factory=list)
    time: int = 0

    @property
    def evictable(self) -> int:
        """Pages without a holder."""
        return sum(not cell.holders for cell in self.cells.values())

    @property
    def locked(self) -> int:
        """Pages with at least one."""
        return sum(bool(cell.holders) for cell in self.cells.values())

    def prefixes(self, namespace: Hashable, tokens: Sequence[int]) -> list[Prefix]:
        """The prefixes of `tokens` that end with a page, shortest first."""
        size = self.page_size
        return [(namespace, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def path(self, namespace: Hashable, tokens: Sequence[int]) -> list[Cell]:
        """The cells of the longest cached prefix, in order."""
        cells = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.cells:
                break
            cells.append(self.cells[prefix])
        return cells

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        return len(self.path(namespace, tokens)) * self.page_size

    def lock(self, namespace: Hashable, tokens: Sequence[int], priority: int = 0) -> PlainHandle:
        """Match, and hold what matched."""
        self.time += 1
        path = self.path(namespace, tokens)
        handle = PlainHandle(self.time, namespace, tuple(tokens[: len(path) * self.page_size]), priority)
        for cell in path:
            cell.holders.add(handle.number)
        self.handles.append(handle)
        return handle

    def pages(self, handle: PlainHandle) -> list[int]:
        """The pages a handle protects."""
        return [cell.page for cell in self.path(handle.namespace, handle.tokens)]

    def extend(self, handle: PlainHandle, tokens: Sequence[int], pages: Sequence[int], adopt: bool) -> list[int] | None:
        """The pages the cache must answer with, or None for a refusal to exchange; and do it."""
        whole = (*handle.tokens, *tokens)
        new = self.prefixes(handle.namespace, whole)[len(handle.tokens) // self.page_size :]
        if new and not adopt and new[0] in self.cells:
            return None
        answer = []
        for prefix, page in zip(new, pages, strict=True):
            cell = self.cells.setdefault(prefix, Cell(page, born=handle.number))
            cell.holders.add(handle.number)
            answer.append(cell.page)
        handle.tokens = whole
        return answer

    def unlock(self, handle: PlainHandle, used: bool = True) -> None:
        """Let go of exactly what the handle holds."""
        self.handles.remove(handle)
        self.time += used
        for cell in self.cells.values():
            if handle.number in cell.holders:
                cell.holders.remove(handle.number)
                if used:
                    cell.last, cell.uses, cell.priority = self.time, cell.uses + 1, min(cell.priority, handle.priority)

    def exclusive(self, handle: PlainHandle) -> int:
        """Pages that nobody else holds."""
        return sum(cell.holders == {handle.number} for cell in self.cells.values())

    def leaves(self) -> list[Prefix]:
        """Prefixes of evictable pages that no cached page follows."""
        followed = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.cells}
        return [prefix for prefix, cell in self.cells.items() if not cell.holders and prefix not in followed]

    def victims(self, n: int, order: Order, evicted: Collection[int] = ()) -> set[int]:
        """The pages that evict(n) must return under `order`; nothing changes. Of equals, those in `evicted` are meant."""
        copy = attrs.evolve(self, cells=dict(self.cells))
        pages = set()
        for _ in range(min(n, self.evictable)):
            victim = min(copy.leaves(), key=lambda prefix: (order(copy.cells[prefix]), copy.cells[prefix].page not in evicted))
            pages.add(copy.cells.pop(victim).page)
        return pages

    def forget(self, pages: Iterable[int]) -> None:
        """Take note of what was evicted. Raises `AssertionError` for a page that is held, unknown, or followed by one that stays."""
        left = set(pages)
        while left:
            gone = {prefix for prefix in self.leaves() if self.cells[prefix].page in left}
            assert gone, f"pages {sorted(left)} are held, not cached, or followed by pages that stay: {self.cells}"
            left -= {self.cells.pop(prefix).page for prefix in gone}
