"""Displacement: a strictly better priority may take the place of running requests (case C35).

Runs before the decodes of a step, so that a victim has no row in the plan that displaces it. Nobody is displaced for a
request that could not start in this step all the same.
"""

from __future__ import annotations

from kvsched.admission.budget import Funds, needs, pages_wanted
from kvsched.arrange import arranger
from kvsched.core import Core
from kvsched.live import Live
from kvsched.newcomers import lock
from kvsched.retraction import ending, lost_tokens, retract
from kvsched.step import Step
from kvsched.units import NO_PAGES


def displace(step: Step) -> None:
    """Retract worse residents for the first waiting requests that fit no other way. O(residents log residents)."""
    core = step.core
    best = core.queue.best_priority()
    if best is None or not core.running or best >= max(live.priority for live in core.running.values()):
        return
    places = core.config.max_running - core.residents.count
    funds = Funds(core)
    room = funds.fundable()
    coming = core.on_their_way()
    for live in core.queue.candidates(arranger(core)):
        if not live.ready or live.late or _adapter_blocked(core, live):
            continue
        need = pages_wanted(core, live) - core.match(live) // core.config.page_size
        if places > 0 and need <= room:
            places -= 1
            room -= need
            continue
        if places > 0 and live.request.ignore_eos and _fits_by_peak(core, live, funds):
            return  # it starts without displacing anybody
        if coming and places > 0 and need <= room + coming:
            return  # pages are on their way to it: nobody is displaced twice for one page
        chosen = _victims_for(core, live, need, room + coming, places)
        if not chosen:
            return
        if _budget_left(core, len(chosen)) < 1:
            return
        for victim in chosen:
            retract(core, victim)
            step.retracted.append(victim.id)
        step.displaced = True
        places = core.config.max_running - core.residents.count - 1
        room = Funds(core).fundable() - need
        coming = core.on_their_way()
        if places < 0 or room < 0:
            return


def _fits_by_peak(core: Core, live: Live, funds: Funds) -> bool:
    handle, _ = lock(core, live)
    fits = funds.peak_fits(live, handle.pages if handle is not None else NO_PAGES)
    if handle is not None and core.cache is not None:
        core.cache.unlock(handle, used=False)
    return fits


def _victims_for(core: Core, live: Live, need: int, room: int, places: int) -> list[Live]:
    """The fewest of the worse residents, worst first, then least lost, then latest arrival, that make room; or none."""
    worse = [other for other in core.running.values() if other.priority > live.priority and not ending(core, other)]
    worse.sort(key=lambda other: (-other.priority, lost_tokens(core, other), -other.arrival))
    funds_per = _promised(core)
    chosen: list[Live] = []
    for victim in worse:
        chosen.append(victim)
        places += 1
        room += funds_per[victim.row] + core.releasable(victim)
        if places > 0 and need <= room:
            return chosen
    return []


def _promised(core: Core) -> dict[int, int]:
    rows = core.residents.taken_rows()
    return dict(zip(rows.tolist(), needs(core, rows).tolist(), strict=True))


def _adapter_blocked(core: Core, live: Live) -> bool:
    limit, adapter = core.config.max_adapters, live.request.adapter
    if limit is None or adapter is None:
        return False
    present = {other.request.adapter for other in core.running.values()} - {None}
    return adapter not in present and len(present) >= limit


def _budget_left(core: Core, victims: int) -> int:
    """Tokens that the decodes of this step leave when `victims` of them are gone."""
    decodes = len(core.residents.active_rows()) - victims
    return core.config.max_step_tokens - max(decodes, 0) * (1 + core.config.lookahead_tokens)
