"""Requests that hold pages, as arrays: lengths, limits and page counts per row, and the block table.

A row belongs to one request from its admission until the last plan that names it has ended. What does not live here:
who enters or leaves, and which pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvsched.live import Live
from kvsched.units import Ints, Pages

Flags = npt.NDArray[np.bool_]
"""One flag per row."""
COUNTS = ("block", "ctx", "entered", "gap", "held", "last_emit", "room", "served", "shared", "target", "total", "total_pages")
FLAGS = ("active", "known", "lag", "taken")


class Residents:
    """Structure of arrays over rows. All int64, in tokens unless said otherwise.

    ctx: slots computed or scheduled to be. held: pages in the row. room: held * page_size. shared: leading pages of the
    row that lie in the cache. total, total_pages: what it can ever write. target: where its prefill ends. known: it
    ignores end-of-sequence, so its length is known. block: width of its blocks under block diffusion, else 0. active: it
    can decode now. taken: a resident owns the row. entered: number of its admission. served: step in which it last had
    its turn. lag, last_emit, gap: whether it missed a step, the step of its last token before, its longest gap.
    table: int32 [rows, columns], page of each column.
    """

    __slots__ = (
        "_active_rows", "_free", "_names", "_names_shared", "_taken_rows", "active", "block", "blocks", "calm", "count", "ctx",
        "entered", "gap", "held", "known", "lag", "lagging", "last_emit", "live", "page_size", "room", "served", "shared",
        "table", "taken", "target", "total", "total_pages",
    )

    def __init__(self, page_size: int, rows: int = 64, columns: int = 64) -> None:
        self.page_size = page_size
        for name in COUNTS:
            setattr(self, name, np.zeros(rows, dtype=np.int64))
        for name in FLAGS:
            setattr(self, name, np.zeros(rows, dtype=bool))
        self.ctx: Ints
        self.held: Ints
        self.room: Ints
        self.total: Ints
        self.total_pages: Ints
        self.target: Ints
        self.served: Ints
        self.last_emit: Ints
        self.gap: Ints
        self.block: Ints
        self.shared: Ints
        self.entered: Ints
        self.active: Flags
        self.known: Flags
        self.taken: Flags
        self.lag: Flags
        self.table = np.zeros((rows, columns), dtype=np.int32)
        self.live: list[Live | None] = [None] * rows
        self._names: list[str] = [""] * rows
        self._names_shared = False
        self._free = list(range(rows))
        self._active_rows: Ints | None = None
        self._taken_rows: Ints | None = None
        self.count = 0
        self.lagging = 0
        self.calm = 0  # decode steps in which no active row can reach its last slot
        self.blocks = 0  # residents that decode by blocks

    @property
    def rows(self) -> int:
        """Rows there are, in use or not."""
        return len(self.live)

    def active_rows(self) -> Ints:
        """Rows that can decode, ascending. O(rows) after a change, O(1) otherwise; read-only."""
        rows = self._active_rows
        if rows is None:
            rows = self._active_rows = self.active.nonzero()[0]
            rows.flags.writeable = False
        return rows

    def index(self, rows: Ints) -> Ints | slice:
        """`rows` for subscripts: a slice where they are exactly 0 to n - 1, which numpy copies without an index.

        Measured with 4,096 rows: a store through an index array takes 6.6 us, through a slice 1 us.
        """
        count = len(rows)
        return slice(0, count) if count and rows[-1] == count - 1 else rows

    def taken_rows(self) -> Ints:
        """Rows of residents, ascending. O(rows) after a change, O(1) otherwise."""
        rows = self._taken_rows
        if rows is None:
            rows = self._taken_rows = self.taken.nonzero()[0]
        return rows

    def __iter__(self) -> Iterator[Live]:
        """Residents by row."""
        for row in self.taken_rows().tolist():
            live = self.live[row]
            if live is not None:
                yield live

    def names(self) -> list[str]:
        """Ids by row, as they are now: later changes go to another list."""
        self._names_shared = True
        return self._names

    def enter(self, live: Live, cached: int, pages: Pages) -> int:
        """Give `live` a row that starts with `pages`, of which `cached` tokens hold valid KV. Returns the row."""
        if not self._free:
            self._grow_rows()
        row = heapq.heappop(self._free)
        held = len(pages)
        self.ctx[row] = cached
        self.held[row] = self.shared[row] = held
        self.room[row] = held * self.page_size
        self.total[row] = live.total
        self.total_pages[row] = live.total_pages
        self.target[row] = live.target
        self.known[row] = live.request.ignore_eos
        self.block[row] = live.request.block_tokens or 0
        self.blocks += live.request.block_tokens is not None
        self.active[row] = False
        self.taken[row] = True
        self.gap[row] = live.max_gap
        self.lag[row] = live.last_token_step >= 0
        self.last_emit[row] = live.last_token_step
        self.lagging += int(self.lag[row])
        self.widen(held)
        self.table[row, :held] = pages
        self.live[row] = live
        if self._names_shared:
            self._names = list(self._names)
            self._names_shared = False
        self._names[row] = live.id
        self._taken_rows = None
        self.count += 1
        live.row = row
        return row

    def set_active(self, row: int, value: bool) -> None:
        """Say whether the row can decode."""
        if self.active[row] != value:
            self.active[row] = value
            self._active_rows = None
            if value:
                self.calm = 0

    def watch(self, row: int, step: int) -> None:
        """The row had its last token in `step` and gets none in the next: its gap is watched."""
        self.lagging += not self.lag[row]
        self.lag[row] = True
        self.last_emit[row] = step

    def deactivate(self, rows: Ints) -> None:
        """The rows cannot decode any more."""
        self.active[rows] = False
        self._active_rows = None

    def leave(self, row: int) -> None:
        """The row's request is not resident any more; row and pages stay until `vacate`."""
        self.set_active(row, False)
        self.taken[row] = False
        self._taken_rows = None
        self.lagging -= int(self.lag[row])
        self.lag[row] = False
        self.blocks -= bool(self.block[row])
        self.live[row] = None
        self.count -= 1

    def vacate(self, row: int) -> None:
        """The row can be given to another request: no plan names it."""
        self.held[row] = 0
        heapq.heappush(self._free, row)

    def append(self, rows: Ints, pages: Pages) -> Ints:
        """Append `pages[i]` to `rows[i]`, every row at most once. Returns the columns. O(rows)."""
        columns = self.held[rows]
        try:
            self.table[rows, columns] = pages
        except IndexError:  # cheaper than looking at the columns in every step
            self.widen(int(columns.max()) + 1)
            self.table[rows, columns] = pages
        self.held[rows] = columns + 1
        self.room[rows] += self.page_size
        return columns

    def append_many(self, row: int, pages: Pages) -> None:
        """Append several pages to one row."""
        held = int(self.held[row])
        count = held + len(pages)
        self.widen(count)
        self.table[row, held:count] = pages
        self.held[row] = count
        self.room[row] = count * self.page_size

    def truncate(self, row: int, pages: int) -> Pages:
        """Take the last `pages` pages off a row and return them."""
        held = int(self.held[row])
        taken = self.table[row, held - pages : held].copy()
        self.held[row] = held - pages
        self.room[row] = (held - pages) * self.page_size
        return taken

    def pages(self, row: int) -> Pages:
        """The pages of a row, in order: a view."""
        return self.table[row, : self.held[row]]

    def widen(self, columns: int) -> None:
        """Make the table at least `columns` wide, by doubling."""
        width = self.table.shape[1]
        if columns > width:
            while width < columns:
                width *= 2
            table = np.zeros((self.rows, width), dtype=np.int32)
            table[:, : self.table.shape[1]] = self.table
            self.table = table

    def _grow_rows(self) -> None:
        rows = self.rows
        for name in COUNTS + FLAGS:
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros(rows, dtype=old.dtype))))
        self.table = np.concatenate((self.table, np.zeros_like(self.table)))
        self.live += [None] * rows
        self._names = self._names + [""] * rows
        self._names_shared = False
        self._free = list(range(rows, 2 * rows))
        self._active_rows = self._taken_rows = None
