"""The admission pass: resuming and new requests, tried in their order (laws B4 and B10).

What may be promised is asked of `kvsched.admission.budget`; what the pass left, for those who want to know why they wait,
is noted in `kvsched.inflight.Pass`.
"""

from __future__ import annotations

import numpy as np

from kvsched.admission.budget import Funds, first_fit, memory_reason, pages_wanted, reach_of
from kvsched.admission.chunking import chunk_length
from kvsched.arrange import arranger
from kvsched.chunks import alone, emit_chunk, partials
from kvsched.core import Core
from kvsched.inflight import Pass
from kvsched.live import Live
from kvsched.protocols import Handle
from kvsched.request import Cause
from kvsched.step import Step
from kvsched.units import NO_PAGES, aligned, pages_for, reusable
from kvsched.verdict import HEAD_REASONS, Verdict, WaitReason, decide

MOST_COMMONS = 64
"""Requests with which one that waits remembers its common prefix: more than ever prefill at once in practice."""


class Admission:
    """One pass over those who wait: who starts in this step, and why the others do not."""

    __slots__ = ("adapters", "beside", "closed", "core", "funds", "head", "head_handle", "places", "room", "step", "barrier", "turn")

    def __init__(self, step: Step) -> None:
        core = step.core
        self.core = core
        self.step = step
        self.funds = Funds(core)
        self.head: Live | None = None
        self.head_handle: Handle | None = None
        self.turn = (0, 0, 0)  # pass, fundable and available pages, as whoever is tried now finds them
        self.beside: int | None = None  # backfill: pages left beside the head at its start
        self.room = 0  # behind a head: pages that one request can have at most
        self.closed = False
        self.barrier = False  # somebody who was overtaken for the adapter limit before is still waiting
        limit = core.config.max_partial_prefills
        self.places = limit - len(partials(core)) if limit else None
        limited = core.config.max_adapters is not None
        self.adapters = {live.request.adapter for live in core.running.values()} - {None} if limited else set()

    def run(self, most: int | None = None) -> None:
        """Try everybody in order, until `most` are admitted."""
        core, step = self.core, self.step
        for live in core.queue.candidates(arranger(core)):
            if live in step.admitted:
                continue
            if most is not None and len(step.admitted) >= most:
                break
            if step.prefill_budget <= 0 or (self.head is not None and core.residents.count >= core.config.max_running):
                break
            if self.head is not None and self._behind_head_closed():
                self.closed = True
                break
            waits_for_adapter = live.overtaken
            if self.head is not None and self._hopeless(live):
                self.barrier = self.barrier or waits_for_adapter
                live.turn = self.turn
                continue  # explain() works its reason out when asked
            reason = self._try(live)
            self.barrier = self.barrier or (waits_for_adapter and reason is not None)
            if reason is None:
                self._passed(live)
            elif reason in HEAD_REASONS and self.head is None:
                self.head = live
                live.turn = core.passes, self.funds.fundable(), core.available()
                if core.config.head == "strict":
                    self.closed = True
                    break
                self._measure_room()
            elif reason is WaitReason.STEP_TOKENS:
                break  # it goes before those behind it as soon as the step has room for it
        if self.head_handle is not None and core.cache is not None:
            core.cache.unlock(self.head_handle, used=False)

    def _behind_head_closed(self) -> bool:
        """Whether nobody behind the deferred head may be tried (law B10)."""
        core, head = self.core, self.head
        if head is None:
            return False
        if core.config.head == "skip":
            return head.bypassed >= core.config.max_bypass
        if core.config.head == "backfill":
            return self.beside is None or self.room <= 0
        return True

    def _hopeless(self, live: Live) -> bool:
        """Whether a request behind a deferred head needs more than there is, at the least. O(1) for a known match."""
        if live.late or live.request.ignore_eos or 0 < live.least <= self.room:
            return False
        if self.core.config.max_adapters is not None and live.request.adapter is not None:
            return False  # the adapter limit is looked at first, and remembered
        self.core.match(live)
        return live.least > self.room

    def _measure_room(self) -> None:
        """Pages that somebody behind the head can have at most."""
        fundable = self.funds.fundable()
        self.room = fundable if self.beside is None else min(fundable, self.beside)
        self.turn = self.core.passes, fundable, self.core.available()

    def _passed(self, live: Live) -> None:
        """`live` was admitted: count it against those it overtook."""
        core, undo = self.core, self.step.undo
        if self.head is not None:
            self._measure_room()
            undo.set(self.head, "bypassed", self.head.bypassed + 1)
        if core.config.order == "sjf":
            for other in core.queue.fresh.values():
                if other.arrival >= live.arrival:
                    break
                if other not in self.step.admitted:
                    undo.set(other, "skips", other.skips + 1)

    def _try(self, live: Live) -> WaitReason | None:
        """Admit the request, or say why not, the first reason in the order of `WaitReason`."""
        core, step = self.core, self.step
        config = core.config
        if not live.ready or live.late:
            return self._no(live, WaitReason.HOST)
        if step.admit_left is not None and step.admit_left <= 0:
            return self._no(live, WaitReason.RANK_AGREEMENT, 1)
        if core.residents.count >= config.max_running:
            return self._no(live, WaitReason.RUNNING_LIMIT, 1)
        adapter = live.request.adapter
        if adapter is not None and self._takes_the_heads_adapter_place(adapter):
            return self._no(live, WaitReason.HEAD_OF_LINE)
        full = config.max_adapters is not None and adapter is not None and (
            self.barrier or (adapter not in self.adapters and len(self.adapters) >= config.max_adapters))
        if full or self.places is not None or config.hold_shared_prefill or live.family is not None:
            matched = core.match(live, exact=True)
            reason = self._stepped_over(live, matched, full=full)
            if reason is not None:
                return self._no(live, reason)
        if step.retracted_for_memory or live.id in step.retracted:
            return self._no(live, WaitReason.COMMITMENT)  # room was made by retraction: nobody new, and not the victim (law C2)
        wanted = pages_wanted(core, live)
        size = config.page_size
        if not live.request.ignore_eos and (self.head is not None or config.head != "backfill"):
            least = wanted - core.match(live) // size  # the hit can only have shrunk since
            if least > self.funds.fundable():
                return self._no(live, WaitReason.COMMITMENT if self._beside_head(least) else WaitReason.HEAD_OF_LINE)
        handle, matched = lock(core, live)
        need = wanted - matched // size
        verdict = decide(need, self.funds.fundable(), core.pool.usable)
        by_peak = False
        if verdict is not Verdict.ADMIT and live.request.ignore_eos and self._beside_head(need):
            by_peak = self.funds.peak_fits(live, handle.pages if handle is not None else NO_PAGES)
        beside = self._beside_head(need)
        if (verdict is not Verdict.ADMIT and not by_peak) or not beside:
            reason = self._short(live, need) if beside else self._no(live, WaitReason.HEAD_OF_LINE)
            self._let_go(handle, need)
            return reason
        length = chunk_length(live.target - matched, step.prefill_budget, config.chunk_tokens, config.long_prefill_tokens,
                              alone=alone(core, live, step))
        cut = length < live.target - matched
        partial = cut and self.places is not None and self.places <= 0  # the hit shrank
        if length <= 0 or partial or (cut and config.max_partial_prefills == 0):
            if handle is not None and core.cache is not None:
                core.cache.unlock(handle, used=False)
            return self._no(live, WaitReason.PARTIAL_PREFILL_LIMIT if partial else WaitReason.STEP_TOKENS)
        self._admit(live, handle, matched, length, need, by_peak=by_peak)
        return None

    def _stepped_over(self, live: Live, matched: int, *, full: bool) -> WaitReason | None:
        core, step, config = self.core, self.step, self.core.config
        if self.places is not None and self.places <= 0:
            rest = live.target - matched
            length = chunk_length(rest, step.prefill_budget, config.chunk_tokens, config.long_prefill_tokens,
                                  alone=alone(core, live, step))
            if length < rest:
                return WaitReason.PARTIAL_PREFILL_LIMIT
        if full:
            step.undo.set(live, "overtaken", True)
            return WaitReason.ADAPTER_LIMIT
        if (config.hold_shared_prefill or live.family is not None) and awaits_prefill(core, live, matched):
            return WaitReason.SHARED_PREFILL
        return None

    def _takes_the_heads_adapter_place(self, adapter: str) -> bool:
        """Whether a bypasser's adapter would take the place that a backfill head needs for its own at its start."""
        head, limit = self.head, self.core.config.max_adapters
        if head is None or limit is None or self.core.config.head != "backfill" or adapter in self.adapters:
            return False
        wanted = head.request.adapter
        return wanted not in (None, adapter) and wanted not in self.adapters and len(self.adapters) + 1 >= limit

    def _beside_head(self, need: int) -> bool:
        return self.head is None or self.core.config.head != "backfill" or (self.beside is not None and need <= self.beside)

    def _no(self, live: Live, reason: WaitReason, short_by: int | None = None) -> WaitReason:
        self.core.blame(live, reason, short_by)
        return reason

    def _short(self, live: Live, need: int) -> WaitReason:
        """The word for a shortage of memory, its match locked, and by how many pages.

        Where a bound said no without a lock, COMMITMENT without a number is noted, and explain() works out the rest.
        """
        fundable = self.funds.fundable()
        return self._no(live, *memory_reason(self.core, need, fundable, self.core.available()))

    def _let_go(self, handle: Handle | None, need: int) -> None:
        """A candidate that is not admitted leaves no lock behind; a backfill head keeps its own until the pass ends."""
        core = self.core
        if self.head is None and core.config.head == "backfill":
            self.beside = first_fit(core, need, self.funds, handle.pages if handle is not None else NO_PAGES)
            self.head_handle = handle
        elif handle is not None and core.cache is not None:
            core.cache.unlock(handle, used=False)

    def _admit(self, live: Live, handle: Handle | None, matched: int, length: int, need: int, *, by_peak: bool) -> None:
        core, step = self.core, self.step
        size = core.config.page_size
        pages = handle.pages if handle is not None else NO_PAGES
        row = core.residents.enter(live, matched, pages)
        core.sharing += 1
        core.log.widen(core.residents.rows)
        live.handle = handle
        live.since = core.log.tick
        live.move(Cause.ADMIT)
        core.admissions += 1
        live.admitted = core.admissions
        core.residents.entered[row] = core.admissions
        step.undo.set(live, "cached", matched)
        if live.first_cached < 0:
            step.undo.set(live, "first_cached", matched)
        core.residents.served[row] = step.number
        core.running[live.id] = live
        core.prefilling[live.id] = live
        for stop in live.stops:
            core.stops[stop] = core.stops.get(stop, 0) + 1
        core.ledger.commit(live.id, live.target - matched)
        core.totals["cached_tokens"] += matched
        step.undo.cached += matched
        step.undo.set(live, "waited", live.waited + core.passes - 1 - live.submitted_pass)
        if live.uncomputed:
            counted = live.prompt - min(matched, live.prompt)
            if counted < live.uncomputed:
                core.inflight_tokens -= live.uncomputed - counted
                step.undo.set(live, "uncomputed", counted)
        if len(pages):
            step.note(row, 0, pages)
        now = pages_for(matched + length, size) - len(pages)
        step.grow(row, now)
        # from now on it counts as a resident, by its reach; the page of growth was asked for at the door only
        self.funds.promised += max(pages_for(reach_of(core, live), size) - len(pages) - now, 0)
        if self.beside is not None:
            self.beside -= need
        core.known_promises = core.known_promises or by_peak
        if self.places is not None and matched + length < live.target:
            self.places -= 1
        if live.request.adapter is not None:
            self.adapters.add(live.request.adapter)
        if step.admit_left is not None:
            step.admit_left -= 1
        emit_chunk(step, live, matched, length, admitted=True)
        step.admitted.append(live)
        core.tell("admitted", live)


def lock(core: Core, live: Live) -> tuple[Handle | None, int]:
    """Match and lock; the handle, and how many tokens it serves."""
    cache = core.cache
    if cache is None:
        return None, 0
    usable = reusable(live.target, core.config.page_size) if live.request.cache_read else 0
    handle = cache.lock(live.space, live.sequence()[:usable], live.priority)
    core.matched(live, handle.length, usable)
    return handle, handle.length


def awaits_prefill(core: Core, live: Live, matched: int) -> bool:
    """Whether a resident is about to put the very next page that this request lacks into the cache."""
    if matched + core.config.page_size > reusable(live.target, core.config.page_size):
        return False
    return any(shares(core, live, other, matched) for other in core.prefilling.values())


def shares(core: Core, live: Live, other: Live, matched: int) -> bool:
    """Whether `live` would wait for `other`'s prefill to put the page after `matched` tokens into the cache.

    Siblings (n > 1) always wait for each other's prompt; others only under `hold_shared_prefill`. How much two prompts
    share is worked out once for each pair. O(1), the first time O(tokens).
    """
    family = live.family is not None and other.family is live.family
    if core.cache is None or not (family or core.config.hold_shared_prefill) or other is live:
        return False
    until = matched + core.config.page_size
    if not live.request.cache_read or not other.request.cache_write or other.space != live.space or \
            until > reusable(live.target, core.config.page_size) or until > aligned(other.target, core.config.page_size):
        return False
    if until > live.prompt or until > other.prompt:  # beyond a prompt, what was generated counts too
        return np.array_equal(other.part(0, until), live.part(0, until))
    return family or until <= _common(live, other)


def _common(live: Live, other: Live) -> int:
    """Tokens with which both prompts begin; remembered for a few others."""
    found = live.commons.get(other.arrival)
    if found is None:
        size = min(live.prompt, other.prompt)
        differs = (live.tokens[:size] != other.tokens[:size]).nonzero()[0]
        found = int(differs[0]) if len(differs) else size
        if len(live.commons) >= MOST_COMMONS:
            live.commons.clear()
        live.commons[other.arrival] = found
    return found


def record_pass(admission: Admission) -> None:
    """Keep what explain() needs to know of the pass."""
    core, step, config = admission.core, admission.step, admission.core.config
    leaders = tuple(core.prefilling.values()) if config.hold_shared_prefill or core.parents else ()
    step.undo.set(core, "last_pass", Pass(
        core.passes, False, admission.head, admission.closed, step.prefill_budget, admission.funds.fundable(), core.available(),
        admission.beside, admission.places, frozenset(name for name in admission.adapters if name is not None),
        core.residents.count >= config.max_running, step.retracted_for_memory, step.admit_left, leaders,
    ))
