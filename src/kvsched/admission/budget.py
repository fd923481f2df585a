"""The one chokepoint for what can be funded, in pages (laws B3 and B4).

`reach` is the need function of law B3; candidates and residents go through the same arithmetic. `Funds` answers what can
be promised to an asker now; every admission site reads it. What does not live here: taking pages.
"""

from __future__ import annotations

import math

import numpy as np

from kvsched.core import Core
from kvsched.live import Live
from kvsched.units import Ints, pages_for, pages_for_each


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

    def peak_fits(self, live: Live, matched: int) -> bool:
        """The check for a request whose length is known (law B4): does the peak over time fit?

        Residents grow together, one token a step, and are released in order of remaining tokens. At each release the
        growth of all who are still there must fit into what is available and what was released before. matched: pages
        of the candidate's hit, locked already. O(residents^2) in blocks.
        """
        core, size = self.core, self.core.config.page_size
        residents = core.residents
        rows = residents.taken_rows()
        base = np.append(np.maximum(residents.ctx[rows], residents.target[rows]), live.target)
        ends = np.append(reaches(core, rows), live.total)
        held = np.minimum(np.append(residents.held[rows], matched), pages_for_each(base, size))
        back = np.array([core.releasable(other) for other in residents] + [0], dtype=np.int64)
        left = ends - base
        room = core.available()
        for now in np.unique(left).tolist():
            alive = left >= now
            growth = pages_for_each(base[alive] + now, size) - held[alive]
            if int(growth.sum()) > room + int(back[~alive].sum()):
                return False
        return True


def over_promised(core: Core) -> bool:
    """Whether more is promised than available: only after a `peak_fits` admission, or an estimate that was too low."""
    return int(needs(core, core.residents.taken_rows()).sum()) > core.available()


def safe(core: Core, extra: dict[int, int]) -> bool:
    """Whether every resident could still run to its end, one after the other by remaining tokens, after a grant.

    extra: pages that would be granted per row. Used where more is promised than available and nothing may be
    retracted: a grant that is not safe waits. O(residents log residents).
    """
    residents = core.residents
    rows = residents.taken_rows()
    need = needs(core, rows)
    left = reaches(core, rows) - np.maximum(residents.ctx[rows], residents.target[rows])
    back = np.array([core.releasable(live) for live in residents], dtype=np.int64)
    grant = np.array([extra.get(row, 0) for row in rows.tolist()], dtype=np.int64)
    need, back = np.maximum(need - grant, 0), back + grant
    by_end = np.argsort(left, kind="stable")
    before = np.cumsum(back[by_end]) - back[by_end]
    room = core.available() - int(grant.sum()) + before
    return bool(room.size == 0 or (need[by_end] <= room).all())


def first_fit(core: Core, need: int, funds: Funds) -> int | None:
    """Pages left beside a deferred head at its start, the first release after which it fits (law B10, backfill).

    Residents are taken in order of remaining tokens. None when the head cannot start by releases alone.
    O(residents log residents).
    """
    residents = core.residents
    rows = residents.taken_rows()
    left = (residents.total[rows] - residents.ctx[rows]).tolist()
    promised: list[int] = needs(core, rows).tolist()
    room = funds.fundable()
    if room >= need:
        return room - need
    for index in sorted(range(len(left)), key=lambda i: (left[i], i)):
        live = residents.live[int(rows[index])]
        if live is None:
            continue
        room += promised[index] + core.releasable(live)
        if room >= need:
            return room - need
    return None
