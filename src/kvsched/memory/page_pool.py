"""The page pool: which page ids are free and which are handed out.

What does not live here: who holds a page, and what stands on it. Those are the scheduler's and the tree cache's business.
"""

from __future__ import annotations

import numpy as np

from kvsched.errors import AccountingError, ConfigError, DoubleFree, PoolExhausted
from kvsched.memory.arguments import LARGEST, configured, count, int32
from kvsched.units import Pages

NOT_OUT = -1
"""Mark of a page that is free or reserved. A page that is handed out has a mark of 0 or more."""
FEW = 64
"""Pages up to which release is faster one by one than with arrays; with timeit 1.5 against 8 microseconds for a single page."""


class PagePool:
    """Hands out the page ids from `reserved_pages` to `pages - 1`, in an order that depends on the calls alone.

    pages: pages configured. page_size: tokens per page. reserved_pages: the ids from 0 on that are never handed out, for a
    host that needs a null page. Raises `ConfigError` for sizes that leave no page to hand out.

    The lowest ids go first, and pages given back go first again, in the order in which they had been handed out; so giving
    back what was just taken restores the pool exactly. Eight bytes per page.

    >>> pool = PagePool(pages=4, page_size=16, reserved_pages=1)
    >>> pool.alloc(2), pool.free
    (array([1, 2], dtype=int32), 1)
    """

    def __init__(self, pages: int, page_size: int, reserved_pages: int = 0) -> None:
        pages = configured("pages", pages, 1)
        self._page_size = configured("page_size", page_size, 1)
        self._reserved = configured("reserved_pages", reserved_pages, 0)
        if self._reserved >= pages:
            raise ConfigError(f"reserved_pages must be less than pages = {pages}, not {self._reserved}")
        if pages > LARGEST:
            raise ConfigError(f"pages must be at most {LARGEST}, because page ids are int32, not {pages}")
        self._usable = pages - self._reserved
        # A stack of free ids, the next one to hand out on top, and one mark per page.
        self._stack = np.arange(pages - 1, self._reserved - 1, -1, dtype=np.int32)
        self._top = self._usable
        self._mark = np.full(pages, NOT_OUT, dtype=np.int32)
        self._marks = self._mark.data  # the same marks, one at a time

    def __repr__(self) -> str:
        return f"<PagePool of {self._usable} pages of {self._page_size} tokens, {self._top} free>"

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def pages(self) -> int:
        """Pages configured, those reserved included: ids are below this."""
        return len(self._mark)

    @property
    def usable(self) -> int:
        """Pages that can ever be handed out."""
        return self._usable

    @property
    def free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return self._top

    def alloc(self, n: int) -> Pages:
        """Hand out `n` pages, as int32. Raises `PoolExhausted` and changes nothing when fewer are free. O(n)."""
        n = count(n)
        top = self._top
        if n > top:
            raise PoolExhausted(f"{n} pages were asked for and {top} of {self._usable} are free")
        pages = self._stack[top - n : top][::-1].copy()
        self._mark[pages] = 0
        self._top = top - n
        return pages

    def release(self, pages: Pages) -> None:
        """Take pages back. Raises `DoubleFree` and changes nothing unless each is handed out and named once. O(len(pages))."""
        pages = int32(pages, "pages")
        n = len(pages)
        if not (self._taken_back_one_by_one(pages.tolist()) if n <= FEW else self._taken_back_at_once(pages)):
            raise DoubleFree(self._complaint(pages))
        self._stack[self._top : self._top + n] = pages[::-1]
        self._top += n

    def handed_out(self) -> Pages:
        """The ids that are handed out now, ascending. O(pages)."""
        return np.flatnonzero(self._mark >= 0).astype(np.int32)

    def check(self) -> None:
        """Raise `AccountingError` unless every invariant holds. O(pages)."""
        free = self._stack[: self._top]
        out = self._mark >= 0
        broken = []
        # The stack holds no more than can be handed out.
        if not 0 <= self._top <= self._usable:
            broken.append("the stack is higher than the pool")
        # Free and handed out add up to the usable pages: nothing is lost and nothing invented.
        if self._top + int(out.sum()) != self._usable:
            broken.append("free + handed out is not usable")
        # No page is free twice.
        if len(np.unique(free)) != len(free):
            broken.append("a page is free twice")
        # No free page is marked as handed out, and none is outside the pool.
        if len(free) and (int(free.min()) < self._reserved or int(free.max()) >= len(self._mark) or bool(out[free].any())):
            broken.append("a free page is reserved, out of range or handed out")
        # Reserved pages are never handed out.
        if bool(out[: self._reserved].any()):
            broken.append("a reserved page is handed out")
        if broken:
            raise AccountingError(
                f"page pool: {'; '.join(broken)}. usable={self._usable} reserved={self._reserved} top={self._top} "
                f"free={free.tolist()} handed_out={np.flatnonzero(out).tolist()}"
            )

    def _taken_back_one_by_one(self, pages: list[int]) -> bool:
        """Unmark pages, or answer False and change nothing when one of them must not come back."""
        marks = self._marks
        for at, page in enumerate(pages):
            if not 0 <= page < len(marks) or marks[page] < 0:  # a reserved page is never marked
                for earlier in pages[:at]:
                    marks[earlier] = 0
                return False
            marks[page] = NOT_OUT
        return True

    def _taken_back_at_once(self, pages: Pages) -> bool:
        """The same with whole arrays."""
        ids = pages.view(np.uint32)  # so a negative id is beyond every pool, and one bounds check serves both ends
        order = np.arange(len(pages), dtype=np.int32)
        try:
            if (self._mark[ids] < 0).any():
                return False
        except IndexError:
            return False
        # A page named twice keeps the later of its two positions; all marks stay at 0 or more meanwhile.
        self._mark[ids] = order
        if (self._mark[ids] != order).any():
            return False
        self._mark[ids] = NOT_OUT
        return True

    def _complaint(self, pages: Pages) -> str:
        seen: set[int] = set()
        for page in pages.tolist():
            if not 0 <= page < len(self._mark):
                return f"page {page} is out of range: ids go from {self._reserved} to {len(self._mark) - 1}"
            if page < self._reserved:
                return f"page {page} is reserved and was never handed out"
            if self._mark[page] < 0:
                return f"page {page} is already free"
            if page in seen:
                return f"page {page} is named twice in one call"
            seen.add(page)
        return "unknown"

