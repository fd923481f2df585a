"""The decode phase: one more token (and its speculative slots) for every request past its prefill.

The hot path. Every line works on whole arrays; Python runs per page crossed, never per request running.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import over_promised
from kvsched.retraction import make_room
from kvsched.step import Step
from kvsched.units import Ints, pages_for
from kvsched.verdict import WaitReason


def plan_decodes(step: Step) -> None:
    """Put the decodes into the step: budget, pages (with retraction where an estimate was too low), positions."""
    core = step.core
    residents = core.residents
    if core.blocks:
        _plan_blocks(step)
    rows = residents.active_rows()
    if not len(rows):
        return
    wide = 1 + core.config.lookahead_tokens
    if len(rows) * wide > step.budget:
        rows = _take_turns(step, rows, wide)
        if not len(rows):
            return
    where = residents.index(rows)
    starts = residents.ctx[where].copy()
    if wide == 1:
        widths = None
        ends = starts + 1
    else:
        widths = np.minimum(wide, residents.total[rows] - starts)
        ends = starts + widths
    crossing = (ends > residents.room[where]).nonzero()[0]
    if len(crossing):
        rows, starts, ends, widths = _cross_pages(step, rows, starts, ends, widths, crossing)
        if not len(rows):
            return
        where = residents.index(rows)
    ending = (ends == residents.total[where]).nonzero()[0]
    residents.ctx[where] = ends
    if len(ending):
        residents.deactivate(rows[ending])
    step.decode_rows, step.decode_starts, step.decode_widths, step.ending = rows, starts, widths, ending
    step.budget -= len(rows) if widths is None else int(widths.sum())


def _take_turns(step: Step, rows: Ints, wide: int) -> Ints:
    """The rows that the budget serves: least recently served first, then by admission (law C4)."""
    residents = step.core.residents
    admitted = np.array([live.admitted if (live := residents.live[row]) is not None else 0 for row in rows.tolist()])
    turn = np.lexsort((admitted, residents.served[rows]))
    widths = np.minimum(wide, residents.total[rows[turn]] - residents.ctx[rows[turn]])
    chosen = np.sort(rows[turn[: int(np.searchsorted(np.cumsum(widths), step.budget, side="right"))]])
    step.undo.served.append((chosen, residents.served[chosen]))
    residents.served[chosen] = step.number
    skip(step, np.setdiff1d(rows, chosen, assume_unique=True), WaitReason.STEP_TOKENS)
    return chosen


def skip(step: Step, rows: Ints, reason: WaitReason) -> None:
    """Rows that could decode and get nothing in this step: from here on their gap is watched. O(rows)."""
    residents = step.core.residents
    step.core.skips.append((rows, reason))
    new = rows[~residents.lag[rows]]
    if len(new):
        residents.lag[new] = True
        residents.last_emit[new] = step.number - 1
        residents.lagging += len(new)
        step.undo.lagged.append(new)


def _cross_pages(step: Step, rows: Ints, starts: Ints, ends: Ints, widths: Ints | None,
                 crossing: Ints) -> tuple[Ints, Ints, Ints, Ints | None]:
    """Give a page (with speculation sometimes more) to each row that runs over its last one."""
    core, residents = step.core, step.core.residents
    size = core.config.page_size
    over = rows[crossing]
    each = None if widths is None else -(-ends[crossing] // size) - residents.held[over]
    total = len(over) if each is None else int(each.sum())
    scarce = core.available() < total
    if scarce or (core.known_promises and core.config.admission == "guaranteed" and over_promised(core)):
        demand = dict(zip(over.tolist(), [1] * len(over) if each is None else each.tolist(), strict=True))
        served = make_room(core, step, demand)
        lost = np.array([row not in served for row in over.tolist()], dtype=bool)
        if lost.any() or step.retracted:
            out = set(over[lost].tolist())
            keep = np.array([bool(residents.taken[row]) and row not in out for row in rows.tolist()], dtype=bool)
            parked = np.array([row for row in over[lost].tolist() if residents.taken[row]], dtype=np.int64)
            skip(step, parked, WaitReason.PAGES)
            rows, starts, ends = rows[keep], starts[keep], ends[keep]
            widths = None if widths is None else widths[keep]
            over = np.array([row for row in over.tolist() if row in served], dtype=np.int64)
            each = None if each is None else pages_each(ends, rows, over, size) - residents.held[over]
        if not len(over):
            return rows, starts, ends, widths
    if each is None or (each == 1).all():
        step.grow_each(over)
    else:
        for row, count in zip(over.tolist(), each.tolist(), strict=True):
            step.grow(row, count)
    return rows, starts, ends, widths


def pages_each(ends: Ints, rows: Ints, over: Ints, size: int) -> Ints:
    """Pages that the rows `over`, found among the ascending `rows`, need for their ends."""
    return np.asarray(-(-ends[rows.searchsorted(over)] // size), dtype=np.int64)


def _plan_blocks(step: Step) -> None:
    """Open blocks of block-diffusion requests: slots are charged when a block opens, computed in every pass (law B4)."""
    core, residents = step.core, step.core.residents
    for row, live in list(core.blocks.items()):
        if live.row != row or any(record.position(row) >= 0 for record in core.in_flight):
            continue
        width = min(live.request.block_tokens or 1, live.total - int(residents.ctx[row]))
        if width > step.budget:
            skip(step, np.array([row]), WaitReason.STEP_TOKENS)
            continue
        short = pages_for(int(residents.ctx[row]) + width, core.config.page_size) - int(residents.held[row])
        if short > 0 and (short > core.available() or (core.known_promises and over_promised(core))):
            served = make_room(core, step, {row: short})
            if row not in served:
                if live.row == row:
                    skip(step, np.array([row]), WaitReason.PAGES)
                continue
        step.grow(row, short)
        step.blocks.append(live)
        step.planned.add(row)
        step.budget -= width
