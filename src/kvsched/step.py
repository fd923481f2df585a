"""What one schedule() call gathers on its way to a plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvsched.core import Core
from kvsched.inflight import PrefillRow, Undo
from kvsched.live import Live
from kvsched.units import NO_INTS, Ints, Pages


class Step:
    """A plan in the making.

    number: of the step. budget: tokens left in it. prefill_left, admit_left: tokens of prefill and newcomers that the ranks
    still agreed on, None for any number. decode_*, ending: the decode rows, where they start, how wide they are (None: one slot each), which are
    blocks, and which reach their last slot. prefill, planned: prefill rows, and their table rows. retracted, displaced:
    ids whose pages were taken, and whether for a better priority. turns: whether decodes take turns. delta_*: block-table entries written, in order.
    fresh: residents whose prefill ends here; they decode from the next step on. admitted: who came in.

    A plain class: one is made in every step, and attrs' factories would take 1 us more.
    """

    __slots__ = (
        "admit_left", "admitted", "budget", "core", "decode_blocks", "decode_rows", "decode_starts", "decode_widths",
        "delta_columns", "delta_pages", "delta_rows", "displaced", "ending", "fresh", "number", "planned", "prefill",
        "prefill_left", "retracted", "turns", "undo",
    )

    def __init__(self, core: Core, number: int, budget: int, undo: Undo) -> None:
        self.core = core
        self.number = number
        self.budget = budget
        self.undo = undo
        self.admit_left: int | None = None
        self.prefill_left: int | None = None
        self.decode_rows = self.decode_starts = self.ending = NO_INTS
        self.decode_widths: Ints | None = None
        self.decode_blocks: npt.NDArray[np.bool_] | None = None
        self.prefill: list[PrefillRow] = []
        self.planned: set[int] = set()
        self.retracted: list[str] = []
        self.displaced = False
        self.turns = False  # decodes exceed the budget and take turns
        self.delta_rows: list[Ints] = []
        self.delta_columns: list[Ints] = []
        self.delta_pages: list[Pages] = []
        self.fresh: list[int] = []
        self.admitted: list[Live] = []

    @property
    def prefill_budget(self) -> int:
        """Tokens left for prefill."""
        return self.budget if self.prefill_left is None else min(self.budget, self.prefill_left)

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
