"""The state that the phases of a step share, and the few moves on it that more than one phase needs.

`Core` is the scheduler without its front door: `kvsched.scheduler` wires it, the phases (`decode`, `prefill`,
`retraction`, `commit`) act on it. Moves here: taking pages, giving them back, donating them to the cache.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvsched.admission.ledger import CommitmentLedger
from kvsched.admission.ratio import TokenRatio
from kvsched.config import SchedulerConfig
from kvsched.errors import InternalError
from kvsched.inflight import Hold, InFlight, Pass, Release, Undo
from kvsched.live import Live
from kvsched.order import Order, Rank, Ranked, Shares
from kvsched.plan import Event
from kvsched.protocols import EventSink, Handle, Pool, TreeCache
from kvsched.queue import WaitingQueue
from kvsched.residents import Residents
from kvsched.tokenlog import TokenLog
from kvsched.units import Ints, Pages, aligned, pages_for, reusable, sealed
from kvsched.verdict import WaitReason

MOST_GROWTHS = 8192
"""Additions to the cache that are remembered one by one; then every match is made anew once."""

TOTALS = ("finished", "aborted", "retractions", "prefill_tokens", "recomputed_tokens", "cached_tokens", "emitted",
          "evicted_pages", "steps")


class Core:
    """Everything a step reads and writes."""

    __slots__ = (
        "ahead", "arranged", "arrivals", "attempts", "attempts_committed", "cache", "cache_seen", "chunks", "completions", "config", "decode_steps", "evicted", "events", "exchanged", "explained",
        "floor", "floor_from", "growth", "growth_floor", "growths", "held_cached", "hold_rows", "holds", "in_flight", "known_promises", "last_decode_step", "last_pass", "ledger",
        "lives", "log", "order", "parents", "skips", "paused", "pins", "pool", "postponed", "prefilling", "private", "progress_step",
        "quarantined", "queue", "ratio", "reserve", "residents", "running", "sink", "step", "stops", "undo", "totals", "passes",
        "inflight_tokens", "admissions", "shares", "sharing", "shrunk", "tenants", "turn",
    )

    def __init__(self, config: SchedulerConfig, pool: Pool, cache: TreeCache | None, sink: EventSink | None,
                 ledger: CommitmentLedger) -> None:
        self.config = config
        self.pool = pool
        self.cache = cache
        self.sink = sink
        self.ledger = ledger
        self.ratio = TokenRatio(config.conservativeness, config.ratio_start)
        self.residents = Residents(config.page_size)
        self.log = TokenLog(self.residents.rows)
        self.queue = WaitingQueue()
        self.order: Order
        self.arranged: tuple[Ranked, tuple[int, ...], list[tuple[Rank, int, Live]]] | None = None  # the last ranks, and what they rest on
        self.lives: dict[str, Live] = {}
        self.parents: dict[str, list[Live]] = {}
        self.running: dict[str, Live] = {}  # residents by admission
        self.prefilling: dict[str, Live] = {}  # residents whose prompt is not all committed, by admission
        self.in_flight: list[InFlight] = []
        self.holds: dict[str, Hold] = {}
        self.hold_rows: dict[int, Hold] = {}
        self.held_cached = 0  # pages in the cache that count as quarantined because the host holds them
        self.pins: dict[str, Handle] = {}
        self.events: list[Event] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self.stops: dict[int, int] = {}  # stop token id -> residents that stop on it
        self.shares = Shares(config.fair_weights)
        self.tenants: Counter[str] = Counter()  # live requests per tenant
        self.growth: dict[tuple[int, bytes], int] = {}  # additions to the cache: (position, tokens of the page) -> count
        self.growths = 0
        self.growth_floor = 0
        self.cache_seen = cache.grown if cache is not None else 0
        self.shrunk = 0  # times that something was taken out of the cache
        self.sharing = 0  # counts up whenever it changes which resident shares which cached page
        self.turn: tuple[tuple[int, bytes, bytes, int], Ints] | None = None  # the last answer of `released_in_turn`
        self.ahead = 0  # pages that the decodes of this step will need, while prefill goes first
        self.private = 0
        self.quarantined = 0
        self.reserve = 0  # pages that pins keep for good
        self.arrivals = self.admissions = self.passes = self.step = 0
        self.attempts = self.attempts_committed = self.chunks = self.completions = self.decode_steps = 0
        self.progress_step = 0
        self.last_decode_step = 0
        self.postponed = False  # the last step put a due decode behind a grant
        self.paused: str | None = None
        self.last_pass: Pass | None = None
        self.undo: Undo | None = None  # of the plan in the making
        self.explained: tuple[tuple[Any, ...], dict[str, tuple[WaitReason | None, int | None]]] | None = None
        self.known_promises = False  # somebody was admitted by the peak over time (law B4) and residents remain
        self.skips: list[tuple[Ints, WaitReason]] = []  # decode rows that got nothing in the last step, and why
        self.exchanged: list[tuple[int, int, Pages]] = []  # (row, column, pages) that the host has not been told of
        self.floor: int | None = None
        self.floor_from = 0  # pages available here when the floor was published
        self.evicted = 0
        self.inflight_tokens = 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def available(self) -> int:
        """Pages that can be written now: free and evictable, or what is left of the agreed floor (law E1).

        What a step takes out of here (allocations and locks) or gives back is the same on every rank, so it is charged
        to the floor as it is to our own pages.
        """
        pages = self.pool.free - self.ahead + (self.cache.evictable if self.cache is not None else 0)
        return pages if self.floor is None else min(pages, self.floor + pages - self.floor_from)

    def ceiling(self) -> int:
        """Pages that an otherwise empty pool can give to one request: usable less permanent reserves (law B2)."""
        return self.pool.usable - self.reserve

    def take(self, n: int) -> Pages:
        """`n` pages from the pool, evicting exactly the shortfall (law D5). The caller has checked `available`."""
        short = n - self.pool.free
        if short > 0 and self.cache is not None:
            pages = self.cache.evict(short)
            self.pool.release(pages)
            self.evicted += len(pages)
            self.totals["evicted_pages"] += len(pages)
            self.shrunk += 1
        self.private += n
        return np.array(self.pool.alloc(n), dtype=np.int32)  # a plan keeps them, whatever array the host's pool hands out

    def store_prefix(self, live: Live, upto: int, *, adopt: bool) -> None:
        """Put the row's pages up to `upto` valid tokens into the cache and keep them locked (law D8).

        The region of a row: [0, handle.length) is the cache's; the rest is private. Pages that the cache already had
        in another copy are exchanged in the table, which only happens while no plan names the row (`adopt`).
        """
        cache, handle = self.cache, live.handle
        if cache is None or handle is None or not live.request.cache_write or live.row in self.hold_rows:
            return
        size = self.config.page_size
        start, stop = handle.length, aligned(upto, size)
        if stop <= start:
            return
        mine = self.residents.table[live.row, start // size : stop // size].copy()
        kept = cache.extend(handle, live.part(start, stop), mine, adopt=adopt)
        if kept is None:
            return
        self.grew(live, start, kept, mine)
        twice = mine[kept != mine]
        if len(twice):
            self.residents.table[live.row, start // size : stop // size] = kept
            self.exchanged.append((live.row, start // size, kept))
            self.pool.release(twice)
        self.private -= len(mine)
        self.residents.shared[live.row] = stop // size
        self.sharing += 1

    def grew(self, live: Live, start: int, kept: Pages, mine: Pages) -> None:
        """Note what was added to the cache, so that only those whose match it can lengthen are matched again.

        A match of m tokens can grow only by a page that continues it at m; the first new page of an insertion is the
        only one that continues something that was there before.
        """
        if self.cache is None:
            return
        self.cache_seen = self.cache.grown
        new = (kept == mine).nonzero()[0]
        if not len(new):
            return
        size = self.config.page_size
        at = start + int(new[0]) * size
        self.growths += 1
        if len(self.growth) >= MOST_GROWTHS:
            self.growth.clear()
            self.growth_floor = self.growths
        self.growth[at, live.part(at, at + size).tobytes()] = self.growths

    def match(self, live: Live, *, exact: bool = False) -> int:
        """Tokens that the cache would serve to a request that waits, read only. O(1) while nothing relevant changed.

        exact=False: an upper bound, which evictions since the last match may have made too high.
        """
        cache = self.cache
        if cache is None or not live.request.cache_read:
            if live.hint_seen < 0:
                self.matched(live, 0, 0)
            return 0
        if cache.grown != self.cache_seen:  # somebody else added to the cache
            self.cache_seen = cache.grown
            self.growths += 1
            self.growth_floor = self.growths
        seen = live.hint_seen
        # what was evicted may come back together with more, under another page than the one that is waited for
        stale = live.hint and live.hint_shrunk != self.shrunk and (exact or seen != self.growths)
        if not stale and seen >= self.growth_floor and (live.hint_next is None or self.growth.get(live.hint_next, -1) <= seen):
            return live.hint
        usable = reusable(live.target, self.config.page_size)
        self.matched(live, cache.match(live.space, live.sequence()[:usable]), usable)
        return live.hint

    def matched(self, live: Live, length: int, usable: int) -> None:
        """Note a fresh match of `length` of at most `usable` tokens."""
        size = self.config.page_size
        live.hint = length
        live.hint_next = (length, live.part(length, length + size).tobytes()) if length < usable else None
        live.hint_seen = self.growths
        live.hint_shrunk = self.shrunk
        live.least = pages_for(live.target, size) - length // size

    # -- leaving --------------------------------------------------------------------------------------------------

    def naming(self, row: int) -> list[InFlight]:
        """Plans in flight that name the row, oldest first."""
        return [record for record in self.in_flight if record.position(row) >= 0]

    def committed(self, live: Live) -> int:
        """Slots of a resident whose step has been committed. O(plans in flight)."""
        if live.row < 0:
            return 0
        return int(self.residents.ctx[live.row]) - sum(record.width(live.row) for record in self.in_flight)

    def collect(self, live: Live) -> None:
        """Move the tokens of a resident from the log into its record."""
        tail = self.log.read(live.row, live.since)
        if len(tail):
            live.generated = sealed(np.concatenate((live.generated, tail)))
        live.since = self.log.tick

    def emitted(self, live: Live) -> int:
        """Tokens delivered so far."""
        count = len(live.generated)
        return count if live.row < 0 else count + len(self.log.read(live.row, live.since))

    def leave(self, live: Live, *, donate: bool, valid: int, used: bool = True) -> None:
        """A resident stops being one: its pages go back now, or when the last plan that names its row ends.

        valid: slots whose KV is good, for donation. The caller has collected its tokens.
        """
        residents, row = self.residents, live.row
        if residents.lag[row]:
            live.last_token_step = int(residents.last_emit[row])
        live.max_gap = max(live.max_gap, int(residents.gap[row]))
        residents.leave(row)
        self.sharing += 1
        self.running.pop(live.id, None)
        self.prefilling.pop(live.id, None)
        self.ledger.release(live.id)
        for stop in live.stops:
            self.stops[stop] -= 1
            if not self.stops[stop]:
                del self.stops[stop]
        release = Release(live, row, live.handle, donate, valid, used)
        live.handle = None
        live.row = -1
        naming = self.naming(row)
        if naming:
            private = self.private_pages(release)
            self.private -= private
            self.quarantined += private
            naming[-1].releases.append(release)
        else:
            self.settle(release, quarantined=False)

    def private_pages(self, release: Release) -> int:
        """Pages of a leaving row that are in no cache, less those that the host holds."""
        shared = release.handle.length // self.config.page_size if release.handle is not None else 0
        return int(self.residents.held[release.row]) - shared - self._set_aside(release.row)

    def _set_aside(self, row: int) -> int:
        hold = self.hold_rows.get(row)
        return len(hold.pages) if hold is not None else 0

    def settle(self, release: Release, *, quarantined: bool) -> None:
        """No plan names the row any more: donate what is valid, give the rest back, unlock, free the row."""
        live, row, handle, size = release.live, release.row, release.handle, self.config.page_size
        private = self.private_pages(release)
        if quarantined:
            self.quarantined -= private
        else:
            self.private -= private
        pages = self.residents.pages(row).copy()
        shared = 0
        hold = self.hold_rows.pop(row, None)
        if handle is not None and self.cache is not None:
            shared = handle.length // size
            stop = aligned(min(release.valid, len(live.tokens) + len(live.generated)), size)
            if release.donate and live.request.cache_write and stop > handle.length and hold is None:
                mine = pages[shared : stop // size]
                kept = self.cache.extend(handle, live.part(handle.length, stop), mine)
                if kept is None:
                    raise InternalError("a cache refused to adopt pages")
                self.grew(live, shared * size, kept, mine)
                self.pool.release(mine[kept != mine])
                shared = stop // size
            self.cache.unlock(handle, used=release.used)
            if release.donate and live.request.pin and self.lives.get(live.id) is not live:
                self.pin(live)
        rest = pages[shared:]
        if hold is not None:
            hold.row = -1
            rest = rest[~np.isin(rest, hold.pages)]
        if len(rest):
            self.pool.release(rest)
        self.residents.vacate(row)

    def pin(self, live: Live) -> None:
        """Keep leading prompt pages for good, as far as the limit and every accepted request allow (law D7).

        Pages that another owner pinned already cost nothing more. Nothing is pinned while somebody runs on the promise
        that these pages come back (the peak check of law B4). A pin that would leave too little for an accepted
        request is cut short; the event says how many of how many pages it got.
        """
        cache, size, limit = self.cache, self.config.page_size, self.config.pin_limit_pages
        wanted = min(live.request.pin, live.prompt // size)
        granted = 0
        if limit is not None and cache is not None and wanted and not self.known_promises:
            largest = max((other.total_pages for other in self.lives.values()), default=0)
            room = min(limit - self.reserve, self.ceiling() - largest)
            pinned = self.pinned_pages()
            handle = cache.lock(live.space, live.tokens[: wanted * size])
            for page in handle.pages.tolist():
                room -= page not in pinned
                if room < 0:
                    break
                granted += 1
            if granted * size < handle.length:
                shorter = cache.lock(live.space, live.tokens[: granted * size])
                cache.unlock(handle)
                handle = shorter
            self.unpin(live.id)
            self.pins[live.id] = handle
            self.reserve = len(self.pinned_pages())
            self.sharing += 1
        self.tell("pinned", live, f"{granted} of {live.request.pin} pages")

    def unpin(self, owner: str) -> bool:
        """Let go of an owner's pin; pages that another owner pinned stay. False when it has none."""
        handle = self.pins.pop(owner, None)
        if handle is None or self.cache is None:
            return False
        self.cache.unlock(handle)
        self.reserve = len(self.pinned_pages())
        self.sharing += 1
        return True

    def pinned_pages(self) -> set[int]:
        """Pages that at least one pin keeps. O(pinned pages)."""
        return {page for handle in self.pins.values() for page in handle.pages.tolist()}

    def on_their_way(self) -> int:
        """Pages that the plans in flight will give back: quarantined rows, and what only they keep in the cache."""
        pages = 0
        for record in self.in_flight:
            for release in record.releases:
                pages += self.private_pages(release)
                if release.handle is not None and self.cache is not None:
                    pages += self.cache.exclusive(release.handle)
        return pages

    def releasable(self, live: Live) -> int:
        """Pages that would become free or evictable if the resident left now."""
        size = self.config.page_size
        held = int(self.residents.held[live.row]) - self._set_aside(live.row)
        if live.handle is None or self.cache is None:
            return held
        return held - live.handle.length // size + self.cache.exclusive(live.handle)

    # -- words ----------------------------------------------------------------------------------------------------

    def tell(self, kind: str, live: Live, detail: str = "") -> None:
        """Note an event for the sink; delivered when the call's state is complete."""
        if self.sink is not None:
            self.events.append(Event(kind, live.id, self.step, detail))

    def blame(self, live: Live, reason: WaitReason, short_by: int | None = None) -> None:
        """Note why a request got nothing in this pass."""
        if self.undo is not None:
            self.undo.attributes += [(live, name, getattr(live, name)) for name in ("reason", "short_by", "reason_pass")]
        live.reason = reason
        live.short_by = short_by
        live.reason_pass = self.passes
