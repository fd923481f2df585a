"""Chunks of prefill: those of residents, and the move that puts any chunk into a step (law C4).

Bounds here are compute. What may be promised is asked of `kvsched.admission.budget`.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import memory_reason, over_promised, safe
from kvsched.admission.chunking import chunk_length
from kvsched.core import Core
from kvsched.inflight import PrefillRow
from kvsched.live import Live
from kvsched.plan import Chunk
from kvsched.step import Step
from kvsched.units import pages_for
from kvsched.verdict import WaitReason


def remaining(core: Core, live: Live) -> int:
    """Tokens of a resident's prefill that no plan computes yet."""
    return live.target - int(core.residents.ctx[live.row])


def partials(core: Core) -> list[Live]:
    """Residents with prefill left to schedule, by admission."""
    return [live for live in core.prefilling.values() if remaining(core, live) > 0]


def alone(core: Core, live: Live, step: Step) -> bool:
    """Whether no other request wants prefill in this step; asked only where `long_prefill_tokens` makes a difference."""
    if core.config.long_prefill_tokens is None:
        return True
    if any(entry.live is not live for entry in step.prefill):
        return False
    waiting = len(core.queue) - core.queue.unready - len(step.admitted) - (live.row < 0)
    return waiting <= 0 and not any(other is not live and remaining(core, other) > 0 for other in core.prefilling.values())


def continue_chunk(step: Step, live: Live) -> bool:
    """Give a resident its next chunk, as long as budget and pages allow. False when it got nothing."""
    core = step.core
    config, residents, row = core.config, core.residents, live.row
    if row in step.planned:
        return True
    start = int(residents.ctx[row])
    length = chunk_length(live.target - start, step.prefill_budget, config.chunk_tokens,
                          config.long_prefill_tokens, alone=alone(core, live, step))
    if length <= 0:
        core.blame(live, WaitReason.STEP_TOKENS)
        return False
    held = int(residents.held[row])
    pages = pages_for(start + length, config.page_size) - held
    room = core.available()
    if pages > room:  # an estimate was too low for somebody: take what is there, or park (case C41)
        length = min(length, (held + room) * config.page_size - start)
        pages = room
    if length > 0 and pages > 0 and core.known_promises and config.admission == "guaranteed" and over_promised(core) \
            and not safe(core, {row: pages}):
        length = 0
    if length <= 0:
        core.blame(live, *memory_reason(core, 1, room, room))
        return False
    step.grow(row, max(pages, 0))
    emit_chunk(step, live, start, length, admitted=False)
    return True


def continue_all(step: Step) -> None:
    """Every resident between two chunks, by admission."""
    for live in partials(step.core):
        continue_chunk(step, live)


def emit_chunk(step: Step, live: Live, start: int, length: int, *, admitted: bool) -> None:
    """Put `length` tokens of a resident's prefill from `start` on into the step, and spend them in the ledger."""
    core, row = step.core, live.row
    end = start + length
    last = end == live.target
    chunk = Chunk(live.id, row, start, live.part(start, end), last)
    step.prefill.append(PrefillRow(live, chunk, admitted))
    step.planned.add(row)
    step.budget -= length
    if step.prefill_left is not None:
        step.prefill_left -= length
    core.residents.ctx[row] = end
    core.ledger.spend(live.id, length)
    step.undo.set(live, "last_grant", step.number)
    step.undo.set(live, "reason", None)
    if core.config.order == "fair":
        charge(step, live.tenant, length)
    if last:
        step.fresh.append(row)
        where = np.array([row])
        step.undo.served.append((where, core.residents.served[where]))
        core.residents.served[row] = step.number  # its first token comes in this step: others' turns come before


def charge(step: Step, tenant: str, tokens: int) -> None:
    """Count tokens served against a tenant's share."""
    step.core.shares.charge(tenant, tokens)
    step.undo.charged.append((tenant, tokens))
