"""The one chokepoint for what can be funded, in pages (laws B3 and B4).

`reach` is the need function of law B3; candidates and residents go through the same arithmetic. `Funds` answers what can
be promised to an asker now; every admission site reads it. What does not live here: taking pages.
"""

from __future__ import annotations

import math

import numpy as np

from kvsched.core import Core
from kvsched.live import Live
from kvsched.units import NO_PAGES, Ints, Pages, pages_for, pages_for_each
from kvsched.verdict import WaitReason


def reach(total: int, base: int, *, guaranteed: bool, ratio: float, clip: int) -> int:
    """Slots to reserve for: all of `total`, or what is expected beyond `base` (law B3). Tokens. O(1).

    base: the larger of tokens computed and tokens to prefill.

    >>> reach(200_099, 100, guaranteed=False, ratio=0.098, clip=1024)
    1124
    >>> reach(200_099, 100, guaranteed=True, ratio=0.098, clip=1024)
    200099
    """
    if guaranteed:
        return total
    return min(total, base + min(math.ceil(ratio * (total - base)), clip))


def reach_of(core: Core, live: Live) -> int:
    """`reach` of a request that waits, at the present ratio."""
    config = core.config
    certain = config.admission == "guaranteed" or live.request.ignore_eos
    return reach(live.total, live.target, guaranteed=certain, ratio=core.ratio.value, clip=config.clip_new_tokens)


def pages_wanted(core: Core, live: Live) -> int:
    """Pages that admission promises to a request that waits, its cache hit not yet taken off.

    A retracted request comes back only when a page of growth fits beside its need, as far as it can grow (law C2).
    """
    pages = pages_for(reach_of(core, live), core.config.page_size)
    return min(pages + 1, live.total_pages) if live.retractions else pages


def needs(core: Core, rows: Ints) -> Ints:
    """Pages promised to each resident row and not yet held. O(rows)."""
    residents, config = core.residents, core.config
    held = residents.held[rows]
    if config.admission == "guaranteed":
        wanted = residents.total_pages[rows]
    else:
        wanted = pages_for_each(reaches(core, rows), config.page_size)
    if not core.ledger.enforced:  # simulator only: what is promised and not yet computed is in nobody's account
        base = np.maximum(residents.ctx[rows], residents.target[rows])
        held = np.maximum(held, pages_for_each(base, config.page_size))
    missing: Ints = np.maximum(wanted - held, 0)
    return missing


def reaches(core: Core, rows: Ints) -> Ints:
    """`reach` of each resident row. O(rows)."""
    residents, config = core.residents, core.config
    total = residents.total[rows]
    if config.admission == "guaranteed":
        return total
    base = np.maximum(residents.ctx[rows], residents.target[rows])
    rest = total - base
    expected = np.minimum(np.ceil(core.ratio.value * rest).astype(np.int64), config.clip_new_tokens)
    ends: Ints = base + np.where(residents.known[rows], rest, np.minimum(expected, rest))
    return ends


class Funds:
    """What can be funded during one pass. `promised`: pages promised to residents and not yet held, kept up to date."""

    __slots__ = ("core", "promised")

    def __init__(self, core: Core) -> None:
        self.core = core
        self.promised = int(needs(core, core.residents.taken_rows()).sum())

    def fundable(self) -> int:
        """Pages that can be promised to a newcomer, its match locked: free + recoverable evictable - promises."""
        return self.core.available() - self.promised

    def peak_fits(self, live: Live, match: Pages) -> bool:
        """The check for a request whose length is known (law B4): does the peak over time fit?

        Residents grow together, one token a step, and are released in order of remaining tokens. At each release the
        growth of all who are still there must fit into what is available and what was released before. match: pages
        of the candidate's hit, locked already. O(pages held + residents^2).
        """
        core, size = self.core, self.core.config.page_size
        residents = core.residents
        rows = residents.taken_rows()
        base = np.append(np.maximum(residents.ctx[rows], residents.target[rows]), live.target)
        left = np.append(reaches(core, rows), live.total) - base
        held = np.minimum(np.append(residents.held[rows], len(match)), pages_for_each(base, size))
        turn = np.argsort(left, kind="stable")
        place = int(np.flatnonzero(turn == len(rows))[0])
        back = released_in_turn(core, rows[np.delete(turn, place)], match, place)
        base, left, held = base[turn], left[turn], held[turn]
        gone = np.concatenate(([0], np.cumsum(back)))
        room = core.available()
        for now in np.unique(left).tolist():
            first = int(np.searchsorted(left, now))
            growth = pages_for_each(base[first:] + now, size) - held[first:]
            if int(growth.sum()) > room + int(gone[first]):
                return False
        return True


def released_in_turn(core: Core, rows: Ints, match: Pages = NO_PAGES, place: int = -1) -> Ints:
    """Pages that come back as residents leave in the given order: a shared page comes with the last who holds it.

    match, place: pages of one more holder, who leaves at that position (and counts in the answer); -1: it never leaves
    and is not counted. Pages that pins and the host hold do not come back. O(rows) while nobody came, left or shared
    anew; else O(shared pages).
    """
    residents = core.residents
    key = (core.sharing, rows.tobytes(), match.tobytes(), place)
    if core.turn is None or core.turn[0] != key:
        core.turn = (key, _shared_in_turn(core, rows, match, place))
    own = residents.held[rows] - residents.shared[rows]
    for row, hold in core.hold_rows.items():
        own[rows == row] -= len(hold.pages)
    if place >= 0:
        own = np.insert(own, place, 0)
    back: Ints = own + core.turn[1]
    return back


def _shared_in_turn(core: Core, rows: Ints, match: Pages, place: int) -> Ints:
    """The part of `released_in_turn` that lies in the cache."""
    table, shared = core.residents.table, core.residents.shared
    holdings = [table[row, : shared[row]] for row in rows.tolist()]
    holdings.insert(place if place >= 0 else len(holdings), match)
    ranks = np.repeat(np.arange(len(holdings)), [len(pages) for pages in holdings])
    pages = np.concatenate(holdings)
    last = np.full(int(pages.max(initial=0)) + 1, -1, dtype=np.int64)
    last[pages] = ranks  # of several writes to one page the last stands
    stay = [page for page in core.pinned_pages() if page < len(last)]
    for hold in core.holds.values():
        if hold.handle is not None:
            stay += [page for page in hold.handle.pages.tolist() if page < len(last)]
    last[stay] = -1
    back = np.bincount(last[last >= 0], minlength=len(holdings))
    return back if place >= 0 else back[:-1]


def over_promised(core: Core) -> bool:
    """Whether more is promised than available: only after a `peak_fits` admission, or an estimate that was too low."""
    return int(needs(core, core.residents.taken_rows()).sum()) > core.available()


def safe(core: Core, extra: dict[int, int]) -> bool:
    """Whether every resident could still run to its end, one after the other, after a grant (the banker's check).

    extra: pages that would be granted per row. Used where more is promised than available and nothing may be
    retracted: a grant that is not safe waits. Taking the least needy first finds an order if there is one, since who
    ends gives pages back and takes none away. O(pages held + residents log residents).
    """
    residents = core.residents
    rows = residents.taken_rows()
    grant = np.array([extra.get(row, 0) for row in rows.tolist()], dtype=np.int64)
    need = np.maximum(needs(core, rows) - grant, 0)
    turn = np.argsort(need, kind="stable")
    back = released_in_turn(core, rows[turn]) + grant[turn]
    room = core.available() - int(grant.sum()) + np.cumsum(back) - back
    return bool((need[turn] <= room).all())


def first_fit(core: Core, need: int, funds: Funds, match: Pages) -> int | None:
    """Pages left beside a deferred head at its start, the first release after which it fits (law B10, backfill).

    Residents are taken in order of remaining tokens; match: pages of the head's hit, locked, which nobody gives back.
    None when the head cannot start by releases alone. O(pages held + residents log residents).
    """
    residents = core.residents
    rows = residents.taken_rows()
    rows = rows[np.argsort(residents.total[rows] - residents.ctx[rows], kind="stable")]
    back = released_in_turn(core, rows, match)
    room = np.concatenate(([0], np.cumsum(needs(core, rows) + back))) + funds.fundable()
    fits = (room >= need).nonzero()[0]
    return int(room[fits[0]]) - need if len(fits) else None


def memory_reason(core: Core, need: int, fundable: int, available: int) -> tuple[WaitReason, int]:
    """Which memory is short for `need` pages: held by the host, not there, or promised to others.

    The number is the same for all three: how many more pages would have to be fundable (law B8). fundable, available: with
    the match of the request locked.
    """
    held = sum(len(hold.pages) + hold.cached for hold in core.holds.values())
    short = max(need - fundable, 0)
    if held and fundable < need <= fundable + held:
        return WaitReason.PINNED_PAGES, short
    return (WaitReason.PAGES if need > available else WaitReason.COMMITMENT), short
