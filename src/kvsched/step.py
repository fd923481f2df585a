"""What one schedule() call gathers on its way to a plan."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvsched.core import Core
from kvsched.inflight import PrefillRow, Undo
from kvsched.live import Live
from kvsched.units import NO_INTS, Ints, Pages


@attrs.define(eq=False)
class Step:
    """A plan in the making.

    budget: tokens left in this step. admit_left: newcomers that the ranks still agreed on, None for any number. delta_*: block-table entries written, in order. fresh: residents that finish
    their prefill in this step; they decode from the next one on.
    """

    core: Core
    number: int
    budget: int
    undo: Undo
    admit_left: int | None = None
    decode_rows: Ints = NO_INTS
    decode_starts: Ints = NO_INTS
    decode_widths: Ints | None = None
    ending: Ints = NO_INTS
    decode_blocks: npt.NDArray[np.bool_] | None = None
    prefill: list[PrefillRow] = attrs.field(factory=list)
    planned: set[int] = attrs.field(factory=set)  # rows of `prefill`
    retracted: list[str] = attrs.field(factory=list)
    displaced: bool = False
    evicted_before: int = 0
    delta_rows: list[Ints] = attrs.field(factory=list)
    delta_columns: list[Ints] = attrs.field(factory=list)
    delta_pages: list[Pages] = attrs.field(factory=list)
    fresh: list[int] = attrs.field(factory=list)
    admitted: list[Live] = attrs.field(factory=list)

    def grow_each(self, rows: Ints) -> None:
        """One more page for each of `rows`; the caller has checked that they are available. O(rows)."""
        count = len(rows)
        pages = self.core.take(count)
        self.delta_rows.append(rows)
        self.delta_columns.append(self.core.residents.append(rows, pages))
        self.delta_pages.append(pages)
        self.undo.grants.append((rows, _ones(count)))

    def grow(self, row: int, count: int) -> None:
        """`count` more pages for one row."""
        if count <= 0:
            return
        residents = self.core.residents
        held = int(residents.held[row])
        pages = self.core.take(count)
        residents.append_many(row, pages)
        self.note(row, held, pages)
        self.undo.grants.append((np.array([row]), np.array([count])))

    def note(self, row: int, column: int, pages: Pages) -> None:
        """Tell the host of pages that stand in a row from `column` on."""
        count = len(pages)
        self.delta_rows.append(np.full(count, row, dtype=np.int64))
        self.delta_columns.append(np.arange(column, column + count, dtype=np.int64))
        self.delta_pages.append(pages)

    @property
    def retracted_for_memory(self) -> bool:
        """Whether room had to be made by retraction: then nobody new is admitted (law C2)."""
        return bool(self.retracted) and not self.displaced


def _ones(count: int) -> Ints:
    global _ONES  # noqa: PLW0603  # one constant array, grown when needed and never written to
    if len(_ONES) < count:
        _ONES = np.ones(2 * count, dtype=np.int64)
        _ONES.flags.writeable = False
    return _ONES[:count]


_ONES: Ints = np.ones(1024, dtype=np.int64)
_ONES.flags.writeable = False
ones = _ones
