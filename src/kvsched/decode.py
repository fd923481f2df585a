"""The decode phase: one more token (and its speculative slots) for every request past its prefill.

The hot path. Every line works on whole arrays; Python runs per page crossed, never per request running.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import memory_reason, over_promised
from kvsched.core import Core
from kvsched.retraction import make_room
from kvsched.step import Step, ones
from kvsched.units import Ints, pages_for_each
from kvsched.verdict import WaitReason


def plan_decodes(step: Step) -> None:
    """Put the decodes into the step: budget, pages (with retraction where an estimate was too low), positions.

    A block-diffusion row computes all slots of its block in every pass; it moves on when a result marks the block final,
    so it waits for that result before its next pass.
    """
    tried: set[int] = set()
    rows = step.core.residents.active_rows()
    while len(rows) and not _plan_rows(step, rows, tried):
        # those whose turn it was were retracted or are parked: the budget goes to the next
        left = step.core.residents.active_rows()
        rows = left if not tried else np.array([row for row in left.tolist() if row not in tried], dtype=np.int64)


def _plan_rows(step: Step, rows: Ints, tried: set[int]) -> bool:
    """Plan as many of the rows as the budget serves. False when it served some and none of them could run."""
    core = step.core
    residents = core.residents
    wide = 1 + core.config.lookahead_tokens
    widths = None
    turns = False
    if wide > 1 or residents.blocks:
        widths = _widths(step, rows, wide)
        if int(widths.sum()) > step.budget:
            turns = True
            keep = _take_turns(step, rows, widths)
            rows, widths = rows[keep], widths[keep]
    elif len(rows) > step.budget:
        turns = True
        rows = rows[_take_turns(step, rows, ones(len(rows)))]
    if not len(rows):
        return True
    where = residents.index(rows)
    starts = residents.ctx[where].copy()
    ends = starts + 1 if widths is None else starts + widths
    crossing = (ends > residents.room[where]).nonzero()[0]
    if len(crossing):
        if turns:
            tried.update(rows.tolist())
        rows, starts, ends, widths = _cross_pages(step, rows, starts, ends, widths, crossing)
        if not len(rows):
            return not turns
        where = residents.index(rows)
    step.decode_rows, step.decode_starts, step.decode_widths = rows, starts, widths
    if step.turns:
        step.undo.served.append((rows, residents.served[rows]))
        residents.served[rows] = step.number
    step.budget -= len(rows) if widths is None else int(widths.sum())
    if residents.blocks:
        blocks = residents.block[where] > 0
        step.decode_blocks = blocks
        residents.deactivate(rows[blocks])
        ends = np.where(blocks, starts, ends)
    residents.ctx[where] = ends
    if residents.calm:
        residents.calm -= 1
        return True
    left = residents.total[where] - ends
    if widths is None and rows is residents.active_rows():
        # nobody ends before the least of these is used up, at one token a step; a new row or a draft starts anew
        residents.calm = max(int(left.min()) - 1, 0)
    step.ending = (left == 0).nonzero()[0]
    if len(step.ending):
        residents.deactivate(rows[step.ending])
    return True


def prefill_first(step: Step) -> bool:
    """Whether prefill goes before the decodes of this step, as far as `decode_every` says (law C4)."""
    every = step.core.config.decode_every
    return every > 1 and step.number - step.core.last_decode_step < every


def pages_due(core: Core) -> int:
    """Pages that the decodes of this step would take if all of them ran. O(rows)."""
    residents = core.residents
    rows = residents.active_rows()
    if not len(rows):
        return 0
    most = np.where(residents.block[rows] > 0, residents.block[rows], 1 + core.config.lookahead_tokens)
    ends = np.minimum(residents.ctx[rows] + most, residents.total[rows])
    return int(np.maximum(pages_for_each(ends, core.config.page_size) - residents.held[rows], 0).sum())


def _widths(step: Step, rows: Ints, wide: int) -> Ints:
    """Slots that each row computes: its block, or one and the speculative ones, none beyond its last (law A2)."""
    residents = step.core.residents
    most = np.where(residents.block[rows] > 0, residents.block[rows], wide)
    return np.asarray(np.minimum(most, residents.total[rows] - residents.ctx[rows]), dtype=np.int64)


def _take_turns(step: Step, rows: Ints, widths: Ints) -> Ints:
    """Positions of the rows that the budget serves: least recently served first, then by admission (law C4)."""
    residents = step.core.residents
    turn = np.lexsort((residents.entered[rows], residents.served[rows]))
    keep = np.sort(turn[: int(np.searchsorted(np.cumsum(widths[turn]), step.budget, side="right"))])
    step.turns = True
    skip(step, np.delete(rows, keep), WaitReason.STEP_TOKENS)
    return keep


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
    each = None if widths is None else pages_for_each(ends[crossing], size) - residents.held[over]
    total = len(over) if each is None else int(each.sum())
    scarce = (core.floor is not None or core.pool.free < total) and core.available() < total
    if scarce or (core.known_promises and core.config.admission == "guaranteed" and over_promised(core)):
        demand = dict(zip(over.tolist(), [1] * len(over) if each is None else each.tolist(), strict=True))
        served = make_room(core, step, demand)
        lost = np.array([row not in served for row in over.tolist()], dtype=bool)
        if lost.any() or step.retracted:
            out = set(over[lost].tolist())
            keep = np.array([bool(residents.taken[row]) and row not in out for row in rows.tolist()], dtype=bool)
            parked = np.array([row for row in over[lost].tolist() if residents.taken[row]], dtype=np.int64)
            skip(step, parked, WaitReason.PAGES)
            left = core.available() - sum(demand[row] for row in served)
            for row in parked.tolist():
                if (live := residents.live[row]) is not None:
                    core.blame(live, *memory_reason(core, demand[row], left, left))
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
    return pages_for_each(ends[rows.searchsorted(over)], size)
