"""rollback(): the newest plan in flight did not happen. What it evicted and whom it retracted stays."""

from __future__ import annotations

import numpy as np

from kvsched.core import Core
from kvsched.ending import settle
from kvsched.inflight import InFlight
from kvsched.live import Live
from kvsched.request import Cause


def rollback(core: Core, record: InFlight) -> None:
    """Undo schedule(): the newest plan in flight did not happen. What it evicted and whom it retracted stays."""
    core.in_flight.pop()
    residents, undo = core.residents, record.undo
    rows = record.decode_rows
    if len(rows):
        keep = np.array([row not in record.dropped for row in rows.tolist()], dtype=bool)
        back = np.ones(len(rows), dtype=np.int64) if record.decode_widths is None else record.decode_widths.copy()
        if record.blocks is not None:
            back[record.blocks] = 0
        residents.ctx[rows[keep]] -= back[keep]
        for row in rows[keep & ~residents.active[rows]].tolist():
            residents.set_active(row, value=True)
    returned: list[Live] = []
    for entry in reversed(record.prefill):
        live, chunk = entry.live, entry.chunk
        if live.row != chunk.row or chunk.row in record.dropped:
            continue
        residents.ctx[chunk.row] = chunk.start
        residents.set_active(chunk.row, value=False)
        core.ledger.unspend(live.id, chunk.length)
        if entry.admitted:
            returned.append(live)
    for granted, counts in reversed(undo.grants):
        for row, count in reversed(list(zip(granted.tolist(), counts.tolist(), strict=True))):  # as they lay in the pool
            if row in record.dropped or not residents.taken[row]:
                continue
            if _set_aside(core, row, count):
                held = int(residents.held[row])
                core.exchanged.append((row, held - count, residents.pages(row)[held - count :].copy()))
            else:
                core.pool.release(residents.truncate(row, count))
                core.private -= count
    for live in returned:
        core.leave(live, donate=False, valid=0, used=False)
        live.move(Cause.UNDO_ADMIT)
        live.cached = 0
    for row in record.late:
        record.late[row].late -= 1
    settle(core, record)
    core.exchanged = record.undo.exchanged + core.exchanged
    _restore(core, record, returned)


def _set_aside(core: Core, row: int, pages: int) -> bool:
    """Whether the host holds one of the last pages of the row: then they stay as they are, like all that came after."""
    hold = core.hold_rows.get(row)
    return hold is not None and bool(np.isin(core.residents.pages(row)[-pages:], hold.pages).any())


def _restore(core: Core, record: InFlight, back: list[Live]) -> None:
    """Counters, marks and the queue as they were before the plan."""
    undo, residents = record.undo, core.residents
    core.ratio.value = undo.ratio
    core.step = undo.step
    core.last_decode_step = undo.last_decode_step
    core.skips = undo.skips
    core.postponed = undo.postponed
    core.progress_step = min(core.progress_step, core.step)
    core.passes -= 1
    for target, name, value in reversed(undo.attributes):
        if name == "uncomputed":
            live = core.lives.get(target.id)
            if live is not None and live is target:  # else its id is another request's by now
                core.inflight_tokens += value - live.uncomputed
                live.uncomputed = value
        else:
            setattr(target, name, value)
    for lagged in undo.lagged:
        still = lagged[residents.lag[lagged] & residents.taken[lagged]]
        residents.lag[still] = False
        residents.lagging -= len(still)
    for rows, served in undo.served:
        residents.served[rows] = served
    for tenant, tokens in undo.charged:
        core.shares.take_back(tenant, tokens)
    core.totals["cached_tokens"] -= undo.cached
    for live in core.queue:
        live.submitted_pass = min(live.submitted_pass, core.passes)
    for live in back:
        if live.retractions:
            core.queue.add_resuming(live)
        else:
            core.queue.add(live)
    asked = undo.explained
    same = asked is not None and asked[0][0] == core.passes  # the reasons of the pass before stand again, as they were told
    core.explained = ((core.passes, core.queue.version, core.paused), asked[1]) if asked is not None and same else None
