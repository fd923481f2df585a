"""Taking a running request's pages: whom, and what becomes of it (law C2).

A victim goes back to the queue with every token it emitted; what it computed stays in the cache where there is one.
"""

from __future__ import annotations

from kvsched.admission.budget import safe
from kvsched.core import Core
from kvsched.live import Live
from kvsched.request import Cause
from kvsched.step import Step
from kvsched.units import aligned


def lost_tokens(core: Core, live: Live) -> int:
    """Computed tokens that retracting the resident now would throw away: what neither is nor can enter the cache."""
    computed = core.committed(live)
    if core.cache is None or live.handle is None:
        return computed
    kept = aligned(computed, core.config.page_size) if live.request.cache_write else 0
    return computed - max(kept, live.handle.length if live.request.cache_read else 0)


def oldest_of_best(core: Core) -> Live | None:
    """The resident that is never retracted for memory: the earliest arrival of the best priority. O(residents)."""
    return min(core.running.values(), key=lambda live: (live.priority, live.arrival), default=None)


def ending(core: Core, live: Live) -> bool:
    """Whether the resident ends by length with a step in flight already: then it is as good as finished."""
    return bool(core.in_flight) and core.committed(live) < int(core.residents.ctx[live.row]) == live.total


def victims(core: Core, step: Step | None) -> list[Live]:
    """Residents that may be retracted for memory, the first to go first. O(residents log residents)."""
    spared = oldest_of_best(core)
    planned = step.planned if step is not None else frozenset()
    chosen = [live for live in core.running.values()
              if live is not spared and live.row not in planned and not ending(core, live)]
    chosen.sort(key=lambda live: (-live.priority, lost_tokens(core, live), -live.arrival))
    return chosen


def retract(core: Core, live: Live, *, in_pass: bool = True) -> None:
    """Send a resident back to the queue. Its pages come back now, or when its last plan in flight ends.

    in_pass: within schedule(), so that the present pass counts as waited.
    """
    row = live.row
    core.collect(live)
    valid = core.committed(live)
    naming = core.naming(row)
    for record in naming:
        if record.samples(row):
            record.late[row] = live
            live.late += 1
        record.dropped.add(row)
    if not core.residents.lag[row] and len(live.generated):  # it got a token in every step up to those in flight
        live.last_token_step = naming[0].plan.step - 1 if naming else core.step
    live.retractions += 1
    if valid > live.cached:  # what came from the cache it has not computed
        live.highwater = max(live.highwater, valid)
    core.totals["retractions"] += 1
    live.target = live.prompt + len(live.generated)
    live.submitted_pass, live.submitted_step = core.passes - in_pass, core.step
    core.leave(live, donate=True, valid=valid)
    live.move(Cause.RETRACT)
    live.hint_seen = -1
    live.reason = None
    core.queue.add_resuming(live)
    core.tell("retracted", live)


def make_room(core: Core, step: Step, demand: dict[int, int]) -> set[int]:
    """Retract until the rows in `demand` (pages each) can be served, and say which of them can be in this step.

    Demand is read anew after each victim, whose own demand disappears; pages on their way count against it, so that
    nobody is retracted twice for one page. Who is not served skips this step. In guaranteed mode nobody is retracted:
    a grant waits unless every resident can still finish after it.
    """
    guaranteed = core.config.admission == "guaranteed"
    if not guaranteed:
        on_their_way = core.on_their_way() + sum(core.releasable(live) for live in core.running.values() if ending(core, live))
        wanted = sum(demand.values())
        candidates: list[Live] | None = None
        while wanted > core.available() + on_their_way:
            if candidates is None:
                candidates = victims(core, step)
            if not candidates:
                break
            victim = candidates.pop(0)
            row = victim.row
            waits = bool(core.naming(row))
            coming = core.releasable(victim) if waits else 0
            retract(core, victim)
            step.retracted.append(victim.id)
            wanted -= demand.pop(row, 0)
            on_their_way += coming
        if step.retracted:
            survivors = core.running.values()
            core.ratio.retracted(sum(core.emitted(live) for live in survivors), len(survivors),
                                 sum(live.limit for live in survivors))
    served: set[int] = set()
    room = core.available()
    by_age = sorted(demand, key=lambda row: _rank(core.residents.live[row]))
    granted: dict[int, int] = {}
    for row in by_age:
        pages = demand[row]
        if pages > room:
            if not guaranteed:
                break
            continue
        if guaranteed and not safe(core, {**granted, row: pages}):
            continue
        granted[row] = pages
        room -= pages
        served.add(row)
    return served


def _rank(live: Live | None) -> tuple[int, int]:
    return (live.priority, live.arrival) if live is not None else (0, 0)
