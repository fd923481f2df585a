"""schedule(): the phases of a step in their order, and the plan made of what they decided (law C4)."""

from __future__ import annotations

import numpy as np

from kvsched.chunks import continue_all, continue_chunk, partials
from kvsched.core import Core
from kvsched.decode import pages_due, plan_decodes, prefill_first, skip
from kvsched.displace import displace
from kvsched.explain import status_of
from kvsched.inflight import InFlight, Pass, Undo
from kvsched.newcomers import Admission, record_pass
from kvsched.plan import Agreed, Deltas, Plan, RowIds
from kvsched.step import Step, ones
from kvsched.units import NO_INTS, NO_PAGES, Ints
from kvsched.verdict import WaitReason

NO_DELTAS = Deltas(NO_INTS, NO_INTS, NO_PAGES)


def make_plan(core: Core, agreed: Agreed | None) -> Plan:
    """One step: decide, record what is needed to undo it, and return the plan."""
    undo = Undo(core.ratio.value, core.step, core.last_decode_step, core.skips, postponed=core.postponed)
    step = Step(core, core.step + 1, core.config.max_step_tokens, undo)
    core.passes += 1
    core.attempts += 1
    if agreed is not None:
        step.admit_left, step.prefill_left = agreed.admit, agreed.prefill_tokens
        if agreed.free_pages is not None:
            core.floor_from = core.available()
            core.floor = agreed.free_pages
    core.undo = undo
    undo.explained = core.explained
    core.evicted = 0
    core.skips = []
    if core.exchanged:
        undo.exchanged, core.exchanged = core.exchanged, []
        for row, column, pages in undo.exchanged:
            step.note(row, column, pages)
    if core.paused is None:
        _phases(step)
    else:
        undo.set(core, "last_pass", Pass(core.passes, paused=True))
        skip(step, core.residents.active_rows(), WaitReason.PAUSED)
        for live in core.prefilling.values():
            core.blame(live, WaitReason.PAUSED)
    core.floor = core.undo = None
    core.step = step.number
    for live in step.admitted:
        core.queue.remove(live)
    _activate(step)
    plan, record = _build(step)
    core.in_flight.append(record)
    return plan


def _phases(step: Step) -> None:
    core, config = step.core, step.core.config
    waiting = len(core.queue)
    if waiting and config.preempt_priority:
        displace(step)
    decoding = len(core.residents.active_rows())
    granted = first = False
    if (core.prefilling or waiting) and (config.prefill_grant is not None or config.decode_every > 1):
        ahead = pages_due(core) if config.admission == "expected" else 0
        if ahead <= core.available():  # else the decodes have to retract, and then nobody is admitted (law C2)
            core.ahead = ahead
            granted = bool(decoding) and _grant(step)
            first = prefill_first(step)
    if first:
        _prefill(step)
        core.ahead = 0
        plan_decodes(step)
    else:
        core.ahead = 0
        plan_decodes(step)
        _prefill(step)
    if not core.skips:
        core.last_decode_step = step.number
    core.postponed = granted and bool(core.skips)
    if decoding and not step.retracted:
        core.ratio.decay()


def _prefill(step: Step) -> None:
    core = step.core
    if core.prefilling:
        continue_all(step)
    if len(core.queue) > len(step.admitted):
        admission = Admission(step)
        admission.run()
        record_pass(admission)


def _grant(step: Step) -> bool:
    """A prefill whose grant is due gets its chunk before the decodes of this step (law C4).

    One prefill per step, the one that is due for longest. After a step in which a grant put decodes off, they go first.
    """
    core, every = step.core, step.core.config.prefill_grant
    if every is None or core.postponed:
        return False
    due = [live for live in partials(core) if step.number - live.last_grant >= every]
    resident = min(due, key=lambda live: (live.last_grant, live.arrival), default=None)
    since = min((live.submitted_step for live in core.queue if live.ready and not live.late), default=step.number)
    if step.number - since >= every and (resident is None or since < resident.last_grant):
        Admission(step).run(most=1)
        if step.admitted:
            return True
    return resident is not None and continue_chunk(step, resident)


def _activate(step: Step) -> None:
    """Residents whose prefill ends in this step can decode from the next one on."""
    residents = step.core.residents
    for row in step.fresh:
        live = residents.live[row]
        if live is None or residents.ctx[row] >= residents.total[row]:
            continue
        residents.set_active(row, value=True)


def _build(step: Step) -> tuple[Plan, InFlight]:
    core = step.core
    rows, starts, widths = step.decode_rows, step.decode_starts, step.decode_widths
    decodes = len(rows)
    counts: Ints = ones(decodes) if widths is None else widths
    decode_rows = rows
    if step.prefill:
        chunks = tuple(entry.chunk for entry in step.prefill)
        rows = np.concatenate((rows, np.array([chunk.row for chunk in chunks], dtype=np.int64)))
        starts = np.concatenate((starts, np.array([chunk.start for chunk in chunks], dtype=np.int64)))
        counts = np.concatenate((counts, np.array([chunk.length for chunk in chunks], dtype=np.int64)))
    else:
        chunks = ()
    for array in (rows, starts, counts):
        array.flags.writeable = False
    plan = Plan(
        step=step.number,
        status=status_of(core, rows=len(rows)),
        rows=rows,
        starts=starts,
        counts=counts,
        decodes=decodes,
        prefill=chunks,
        deltas=_deltas(step),
        retracted=tuple(step.retracted),
        evicted=core.evicted,
        copies=(),
        admitted=tuple(live.id for live in step.admitted),
        decode_ids=RowIds(core.residents.names(), decode_rows),
    )
    return plan, InFlight(plan, step.undo, decode_rows, widths, step.ending, step.decode_blocks, step.prefill)


def _deltas(step: Step) -> Deltas:
    parts = len(step.delta_rows)
    if parts == 0:
        return NO_DELTAS
    if parts == 1:
        arrays = (step.delta_rows[0], step.delta_columns[0], step.delta_pages[0])
    else:
        arrays = (np.concatenate(step.delta_rows), np.concatenate(step.delta_columns), np.concatenate(step.delta_pages))
    for array in arrays:
        array.flags.writeable = False
    return Deltas(*arrays)
