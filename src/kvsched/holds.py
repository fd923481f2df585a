"""Pages that the host sets aside: leases for transfers to and from a peer (case C53).

A held page is quarantined: not free, not evictable, never handed out, until it is released or its steps are over.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import needs
from kvsched.core import Core
from kvsched.errors import HoldRefused
from kvsched.inflight import Hold
from kvsched.live import Live
from kvsched.units import Pages


def hold(core: Core, name: str, pages: int, until: int | None) -> Pages:
    """Set `pages` aside under `name`: that request's own if it holds any, else free ones, then evictable ones.

    Returns their ids. Raises `HoldRefused`, changing nothing, for a name in use or when there are not enough that nobody was promised.
    """
    if name in core.holds:
        raise HoldRefused(f"{name!r} already holds {_size(core.holds[name])} pages")
    live = core.lives.get(name)
    if live is not None and live.row >= 0:
        row = live.row
        core.holds[name] = held = _own(core, live, pages, until)
        return np.concatenate((core.residents.table[row, : held.cached], held.pages))
    promised = int(needs(core, core.residents.taken_rows()).sum())
    room = core.available() - promised
    if pages > room:
        raise HoldRefused(f"hold of {pages} pages, but {room} are free or evictable and not promised")
    taken = core.take(pages)
    core.private -= pages
    core.quarantined += pages
    core.holds[name] = Hold(taken, until)
    return taken.copy()


def _own(core: Core, live: Live, pages: int, until: int | None) -> Hold:
    """Set pages of a resident aside: private ones first, then those it shares with the cache."""
    core.sharing += 1
    row, size = live.row, core.config.page_size
    shared = live.handle.length // size if live.handle is not None else 0
    private = int(core.residents.held[row]) - shared
    if pages > shared + private:
        raise HoldRefused(f"hold of {pages} pages, but {live.id!r} has {shared + private}")
    mine: Pages = core.residents.table[row, shared : shared + min(pages, private)].copy()
    cached = pages - len(mine)
    handle = None
    if cached and core.cache is not None and live.handle is not None:
        handle = core.cache.lock(live.space, live.part(0, live.handle.length))
    core.private -= len(mine)
    core.quarantined += pages
    core.held_cached += cached
    held = Hold(mine, until, row if len(mine) else -1, cached, handle)
    if len(mine):
        core.hold_rows[row] = held
    return held


def release(core: Core, name: str) -> bool:
    """Give a hold's pages back: to their request while it runs, else to the pool. False where there is none."""
    held = core.holds.pop(name, None)
    if held is None:
        return False
    core.sharing += 1
    core.held_cached -= held.cached
    core.quarantined -= held.cached
    if held.handle is not None and core.cache is not None:
        core.cache.unlock(held.handle)
    if not len(held.pages):
        return True
    if held.row >= 0:
        del core.hold_rows[held.row]
        if core.residents.taken[held.row]:
            core.quarantined -= len(held.pages)
            core.private += len(held.pages)
        # a row that has left and waits for its plan stays quarantined, now with these pages among its own
    else:
        core.quarantined -= len(held.pages)
        core.pool.release(held.pages)
    return True


def expire(core: Core, step: int) -> None:
    """Release every hold whose steps are over."""
    for name in [name for name, held in core.holds.items() if held.until is not None and held.until <= step]:
        release(core, name)


def _size(held: Hold) -> int:
    return len(held.pages) + held.cached


