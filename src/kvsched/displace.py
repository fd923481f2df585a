"""Displacement: a strictly better priority may take the place of running requests (case C35).

Runs before the decodes of a step, so that a victim has no row in the plan that displaces it. Nobody is displaced for a
request that could not start in this step all the same.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import Funds, needs, pages_wanted
from kvsched.admission.chunking import chunk_length
from kvsched.arrange import arranger
from kvsched.chunks import partials, remaining
from kvsched.core import Core
from kvsched.live import Live
from kvsched.newcomers import awaits_prefill, lock
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
    admit_left = step.admit_left
    for live in core.queue.candidates(arranger(core)):
        if not live.ready or live.late or _adapter_blocked(core, live):
            continue
        if admit_left is not None:
            if admit_left <= 0:
                return  # the ranks agreed on no more newcomers
            admit_left -= 1
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
        if _budget_left(core, chosen) < 1 or _steps_aside(core, live, chosen):
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


def _budget_left(core: Core, victims: list[Live]) -> int:
    """Tokens that decodes and chunks of residents leave to newcomers in this step when the victims are gone."""
    residents, config = core.residents, core.config
    out = {live.row for live in victims}
    rows = np.array([row for row in residents.active_rows().tolist() if row not in out], dtype=np.int64)
    most = np.where(residents.block[rows] > 0, residents.block[rows], 1 + config.lookahead_tokens)
    left = config.max_step_tokens - int(np.minimum(most, residents.total[rows] - residents.ctx[rows]).sum())
    for live in partials(core):
        if live.row not in out:
            left -= chunk_length(remaining(core, live), max(left, 0), config.chunk_tokens, config.long_prefill_tokens, alone=False)
    return left


def _steps_aside(core: Core, live: Live, victims: list[Live]) -> bool:
    """Whether the request would be stepped over in this step all the same: adapter, partial place, shared prefill."""
    config = core.config
    matched = core.match(live)
    if awaits_prefill(core, live, matched) or _adapter_blocked(core, live):
        return True
    if config.max_partial_prefills is None:
        return False
    places = config.max_partial_prefills - sum(other not in victims for other in partials(core))
    rest = live.target - matched
    return places <= 0 and chunk_length(rest, _budget_left(core, victims), config.chunk_tokens, config.long_prefill_tokens,
                                        alone=False) < rest
