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
from kvsched.decode import prefill_first
from kvsched.live import Live
from kvsched.newcomers import awaits_prefill, lock
from kvsched.protocols import Handle
from kvsched.retraction import ending, lost_tokens, retract
from kvsched.step import Step
from kvsched.units import NO_PAGES


class _Starters:
    """Who starts before the one that is looked at, with and without displacement.

    count: places. pages: promised to them. rests: tokens that each has to compute. adapters: theirs.
    """

    __slots__ = ("adapters", "count", "pages", "rests")

    def __init__(self) -> None:
        self.count = self.pages = 0
        self.rests: list[int] = []
        self.adapters: set[str | None] = set()

    def add(self, live: Live, need: int, rest: int) -> None:
        """One more starts: `need` pages, `rest` tokens to compute."""
        self.count += 1
        self.pages += need
        self.rests.append(rest)
        self.adapters.add(live.request.adapter)


def displace(step: Step) -> None:
    """Retract worse residents for the first waiting requests that fit no other way. O(residents log residents)."""
    core = step.core
    best = core.queue.best_priority()
    if best is None or not core.running or best >= max(live.priority for live in core.running.values()):
        return
    locked: list[Handle] = []
    try:
        _displace(step, locked)
    finally:
        if core.cache is not None:
            for handle in locked:
                core.cache.unlock(handle, used=False)


def _displace(step: Step, locked: list[Handle]) -> None:
    """Go through those who wait, the match of each locked from there on: a hit is not room as well."""
    core = step.core
    starters = _Starters()
    funds = Funds(core)
    coming = core.on_their_way()
    for live in core.queue.candidates(arranger(core)):
        if not live.ready or live.late or _adapter_blocked(core, live, starters):
            continue
        if step.admit_left is not None and starters.count >= step.admit_left:
            return  # the ranks agreed on no more newcomers
        places = core.config.max_running - core.residents.count - starters.count
        room = funds.fundable() - starters.pages
        least = pages_wanted(core, live) - core.match(live) // core.config.page_size
        if (places <= 0 or least > room) and not _victims_for(core, live, least, room + coming, places):
            return  # not even if its hit took no room; known without a walk through the cache
        handle, matched = lock(core, live)
        if handle is not None:
            locked.append(handle)
        need = pages_wanted(core, live) - matched // core.config.page_size
        rest = live.target - matched
        room = funds.fundable() - starters.pages
        if places > 0 and need <= room:
            length = _starts_with(step, live, matched, [], starters)
            if length is None:
                continue
            if length == 0:
                return  # the step's tokens are used up
            starters.add(live, need, rest)
            continue
        if places > 0 and live.request.ignore_eos and funds.peak_fits(live, handle.pages if handle is not None else NO_PAGES):
            return  # it starts without displacing anybody
        if coming and places > 0 and need <= room + coming:
            return  # pages are on their way to it: nobody is displaced twice for one page
        chosen = _victims_for(core, live, need, room + coming, places)
        length = _starts_with(step, live, matched, chosen, starters) if chosen else None
        if not length:
            return
        for victim in chosen:
            retract(core, victim)
            step.retracted.append(victim.id)
        step.displaced = True
        starters.add(live, need, rest)
        funds = Funds(core)
        coming = core.on_their_way()
        if core.residents.count + starters.count > core.config.max_running or funds.fundable() < starters.pages:
            return


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


def _adapter_blocked(core: Core, live: Live, starters: _Starters) -> bool:
    limit, adapter = core.config.max_adapters, live.request.adapter
    if limit is None or adapter is None:
        return False
    present = ({other.request.adapter for other in core.running.values()} | starters.adapters) - {None}
    return adapter not in present and len(present) >= limit


def _starts_with(step: Step, live: Live, matched: int, victims: list[Live], starters: _Starters) -> int | None:
    """Tokens with which the request would start in this step when the victims are gone, 0 for a step without tokens left.

    None: it would be stepped over all the same, for a place among partial prefills or for a shared prefill.
    """
    core, config = step.core, step.core.config
    if awaits_prefill(core, live, matched):
        return None
    left, places = _budget_left(step, victims), None
    if config.max_partial_prefills is not None:
        places = config.max_partial_prefills - sum(other not in victims for other in partials(core))
    length = 0
    for rest in (*starters.rests, live.target - matched):  # who was cut short takes first what the victims leave
        length = chunk_length(rest, max(left, 0), config.chunk_tokens, config.long_prefill_tokens, alone=False)
        left -= length
        if places is not None and length < rest:
            if config.max_partial_prefills == 0:
                return 0
            if places <= 0:
                return None
            places -= 1
    return length


def _budget_left(step: Step, victims: list[Live]) -> int:
    """Tokens that decodes and chunks of residents leave to newcomers in this step when the victims are gone."""
    core, residents, config = step.core, step.core.residents, step.core.config
    out = {live.row for live in victims}
    rows = np.array([row for row in residents.active_rows().tolist() if row not in out], dtype=np.int64)
    most = np.where(residents.block[rows] > 0, residents.block[rows], 1 + config.lookahead_tokens)
    decodes = 0 if prefill_first(step) else int(np.minimum(most, residents.total[rows] - residents.ctx[rows]).sum())
    left = config.max_step_tokens - decodes
    if step.prefill_left is not None:
        left = min(left, step.prefill_left)
    for live in partials(core):
        if live.row not in out:
            left -= chunk_length(remaining(core, live), max(left, 0), config.chunk_tokens, config.long_prefill_tokens, alone=False)
    return left
