"""The whole state as plain data, and the invariants (law A1). Reads only; cost O(state)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsched.admission.budget import needs
from kvsched.arrange import arranger
from kvsched.core import Core
from kvsched.ending import waited_steps
from kvsched.errors import AccountingError
from kvsched.explain import explain
from kvsched.live import Live
from kvsched.liveness import stalled
from kvsched.plan import Plan
from kvsched.units import pages_for, servable_slots


def snapshot(core: Core, last: Plan | None) -> dict[str, Any]:
    """The state in the words of the scenario format, for live requests."""
    terms = accounting(core)
    return {
        "step": core.step,
        **terms,
        "outstanding": core.ledger.outstanding,
        "reserved": int(needs(core, core.residents.taken_rows()).sum()),
        "ratio": core.ratio.value,
        "running": list(core.running),
        "waiting": waiting_order(core),
        "stalled": stalled(core),
        "plan": plan_state(core, last),
        "requests": {live.id: request_state(core, live) for live in core.lives.values()},
        "max_gap": {live.id: max_gap(core, live) for live in core.lives.values()},
        "totals": dict(core.totals),
        "max_servable_tokens": max_servable(core),
    }


def max_servable(core: Core) -> int:
    """Largest P + N - 1 of one request, in slots."""
    return servable_slots(core.ceiling(), core.config.page_size, core.config.context_limit)


def waiting_order(core: Core) -> list[str]:
    """Ids of those who wait, in the order in which the next pass tries them."""
    if core.passes == 0:
        return [live.id for live in core.queue]
    core.passes += 1  # credit for waiting counts the present pass
    try:
        return [live.id for live in core.queue.candidates(arranger(core))]
    finally:
        core.passes -= 1


def plan_state(core: Core, plan: Plan | None) -> dict[str, Any]:
    """The last plan in the words of the scenario format; decodes as they stand in `running`."""
    if plan is None:
        return {"prefill": [], "decode": [], "retracted": [], "evicted": 0, "copies": []}
    turn = np.argsort(core.residents.entered[plan.rows[: plan.decodes]], kind="stable")
    return {
        "prefill": [[chunk.id, chunk.start, chunk.length] for chunk in plan.prefill],
        "decode": [plan.decode_ids[at] for at in turn.tolist()],
        "retracted": list(plan.retracted),
        "evicted": plan.evicted,
        "copies": [list(copy) for copy in plan.copies],
    }


def request_state(core: Core, live: Live) -> dict[str, Any]:
    """One live request."""
    why = explain(core, live)
    resident = live.row >= 0
    return {
        "status": live.state.value,
        "computed": core.committed(live) if resident else 0,
        "cached": live.cached,
        "generated": core.emitted(live),
        "pages": int(core.residents.held[live.row]) if resident else 0,
        "retractions": live.retractions,
        "wait_reason": None if why.reason is None else why.reason.value,
        "short_by": why.short_by,
        "waited_steps": waited_steps(core, live),
        "finish": None,
    }


def max_gap(core: Core, live: Live) -> int:
    """Longest number of steps between two of its tokens so far; 0 with fewer than two."""
    gap = max(live.max_gap, int(core.residents.gap[live.row]) if live.row >= 0 else 0)
    return max(gap, 1 if core.emitted(live) > 1 else 0)


def accounting(core: Core) -> dict[str, int]:
    """The terms of the accounting equation, in pages."""
    cache = core.cache
    return {
        "usable": core.pool.usable,
        "free": core.pool.free,
        "cached": cache.evictable if cache is not None else 0,
        "locked": (cache.locked - core.held_cached) if cache is not None else 0,
        "private": core.private,
        "quarantined": core.quarantined,
    }


def check(core: Core) -> None:
    """Raise `AccountingError`, every term printed, unless the laws of accounting hold."""
    terms = accounting(core)
    # free + cached unlocked + cached locked + private + quarantined = usable
    if sum(value for key, value in terms.items() if key != "usable") != terms["usable"] or min(terms.values()) < 0:
        raise AccountingError(f"free + cached + locked + private + quarantined is not usable: {terms}")
    core.pool.check()
    if core.cache is not None:
        core.cache.check()
    core.ledger.check()
    _check_rows(core, terms)
    _check_queue(core, terms)


def _check_rows(core: Core, terms: dict[str, int]) -> None:
    residents, size = core.residents, core.config.page_size
    owners: dict[int, str] = {}
    private = 0
    leaving = [(release.row, release.live.id, release.handle) for record in core.in_flight for release in record.releases]
    staying = [(live.row, live.id, live.handle) for live in core.running.values()]
    for row, key, handle in staying + leaving:
        shared = handle.length // size if handle is not None else 0
        pages = residents.pages(row)
        # the region [0, handle.length) of a row is the cache's, page for page
        if handle is not None and not np.array_equal(pages[:shared], handle.pages):
            raise AccountingError(f"{key}: row {row} starts {pages[:shared].tolist()}, its handle {handle.pages.tolist()}; {terms}")
        # every other page has one owner
        for page in pages[shared:].tolist():
            if page in owners:
                raise AccountingError(f"page {page} belongs to {owners[page]} and to {key}; {terms}")
            owners[page] = key
    for row, key, handle in staying:
        if residents.shared[row] * size != (handle.length if handle is not None else 0):
            raise AccountingError(f"{key}: {residents.shared[row]} pages noted as shared, its handle covers {handle}; {terms}")
        hold = core.hold_rows.get(row)
        private += int(residents.held[row]) - (handle.length // size if handle is not None else 0)
        private -= len(hold.pages) if hold is not None else 0
    if private != core.private:
        raise AccountingError(f"private pages by row are {private}, by count {core.private}; {terms}")
    for live in core.running.values():
        row = live.row
        # no row reaches past what it holds, nor past what it can ever write
        if not residents.ctx[row] <= residents.room[row] or residents.held[row] > live.total_pages:
            raise AccountingError(f"{live.id}: {residents.ctx[row]} slots in {residents.held[row]} pages of {live.total_pages}; {terms}")
        # what is owed in the ledger is the prefill that no plan computes yet
        if core.ledger.owed(live.id) != max(live.target - int(residents.ctx[row]), 0):
            raise AccountingError(f"{live.id}: ledger {core.ledger.owed(live.id)}, target {live.target}, computed {residents.ctx[row]}")
        if residents.held[row] < pages_for(int(residents.ctx[row]), size):
            raise AccountingError(f"{live.id}: {residents.ctx[row]} slots need more than {residents.held[row]} pages")


def _check_queue(core: Core, terms: dict[str, int]) -> None:
    waiting = {live.id for live in core.queue}
    # a live request is a resident or waits, never both
    if waiting & set(core.running) or waiting | set(core.running) != set(core.lives):
        raise AccountingError(f"queue {sorted(waiting)} and residents {sorted(core.running)} are not {sorted(core.lives)}; {terms}")
    if core.residents.count != len(core.running):
        raise AccountingError(f"{core.residents.count} rows taken by {len(core.running)} residents; {terms}")
    prompts = sum(live.prompt for live in core.queue.fresh.values())
    uncomputed = sum(live.uncomputed for live in core.lives.values())
    if prompts != core.queue.tokens or uncomputed != core.inflight_tokens:
        raise AccountingError(f"queued prompt tokens {prompts}/{core.queue.tokens}, in flight {uncomputed}/{core.inflight_tokens}")
