"""Why a request gets nothing, worked out when somebody asks (laws B8 and F1). No decision changes by asking.

A pass notes a reason only for those it tried. For the others the pass is gone through once more, on the figures that it
left, without touching anything.
"""

from __future__ import annotations

from kvsched.admission.budget import memory_reason, pages_wanted
from kvsched.admission.chunking import chunk_length
from kvsched.arrange import arranger
from kvsched.core import Core
from kvsched.ending import waited_steps
from kvsched.inflight import Pass
from kvsched.live import Live
from kvsched.newcomers import lock, shares
from kvsched.plan import Status
from kvsched.verdict import HEAD_REASONS, Explanation, WaitReason

Reason = tuple[WaitReason | None, int | None]


def explain(core: Core, live: Live) -> Explanation:
    """The first reason that stops the request, as of the last pass; None when nothing does or no pass saw it yet."""
    reason, short_by = _reason_of_resident(core, live) if live.row >= 0 else reasons(core).get(live.id, (None, None))
    words = "" if reason is None else reason.value if short_by is None else f"{reason.value}, short by {short_by}"
    since = live.submitted_step + 1 if live.row < 0 and core.passes > live.submitted_pass else None
    return Explanation(live.id, live.state.value, reason, short_by, waited_steps(core, live), since, words)


def reasons(core: Core) -> dict[str, Reason]:
    """Why each request that waits does, as of the last pass. O(waiting) the first time after a pass, then O(1)."""
    key = (core.passes, core.queue.version, core.paused)
    if core.explained is None or core.explained[0] != key:
        core.explained = (key, _work_out(core))
    return core.explained[1]


def _work_out(core: Core) -> dict[str, Reason]:
    last = core.last_pass
    found: dict[str, Reason] = {}
    head: Live | None = None
    stopped = False  # by one for whose whole prefill the step had too few tokens left
    for live in core.queue.candidates(arranger(core)):
        if last is None or last.number != core.passes or live.submitted_pass >= core.passes:
            found[live.id] = (None, None)
        elif last.paused:
            found[live.id] = (WaitReason.PAUSED, None)
        elif not live.ready or live.late:
            found[live.id] = (WaitReason.HOST, None)
        elif live.reason is not None and live.reason_pass == core.passes:
            vague = live.reason is WaitReason.COMMITMENT and live.short_by is None
            found[live.id] = _memory(core, last, live) if vague else (live.reason, live.short_by)
            head = head or (live if live.reason in HEAD_REASONS else None)
            stopped = stopped or live.reason is WaitReason.STEP_TOKENS
        elif stopped:
            found[live.id] = (WaitReason.HEAD_OF_LINE, None)
        else:
            found[live.id] = reason = _untried(core, last, live, head)
            head = head or (live if reason[0] in HEAD_REASONS else None)
    return found


def _untried(core: Core, last: Pass, live: Live, head: Live | None) -> Reason:
    """The reason of a request that the pass did not come to, or passed over in haste behind the head."""
    config = core.config
    matched = core.match(live)
    need = pages_wanted(core, live) - matched // config.page_size
    if head is not None and (last.closed or not _may_pass(core, last, head, need)):
        return WaitReason.HEAD_OF_LINE, None
    if last.admit_left is not None and last.admit_left <= 0:
        return WaitReason.RANK_AGREEMENT, 1
    if last.full:
        return WaitReason.RUNNING_LIMIT, 1
    rest = live.target - matched
    if last.partial_places is not None and last.partial_places <= 0 and \
            chunk_length(rest, last.budget, config.chunk_tokens, config.long_prefill_tokens, alone=False) < rest:
        return WaitReason.PARTIAL_PREFILL_LIMIT, None
    adapter = live.request.adapter
    if config.max_adapters is not None and adapter is not None and adapter not in last.adapters and \
            len(last.adapters) >= config.max_adapters:
        return WaitReason.ADAPTER_LIMIT, None
    if any(shares(core, live, leader, matched) for leader in last.leaders):
        return WaitReason.SHARED_PREFILL, None
    reason, short_by = _memory(core, last, live)
    return (reason, short_by) if short_by or last.retracted else (WaitReason.STEP_TOKENS, None)


def _may_pass(core: Core, last: Pass, head: Live, need: int) -> bool:
    """Whether the head policy lets a request that needs so many pages pass the head."""
    if core.config.head == "skip":
        return head.bypassed < core.config.max_bypass
    return core.config.head == "backfill" and last.beside is not None and need <= last.beside


def _memory(core: Core, last: Pass, live: Live) -> Reason:
    """The shortage of memory as the pass would have found it with the request's match locked."""
    before = core.cache.evictable if core.cache is not None else 0
    handle, matched = lock(core, live)
    own = 0
    if handle is not None and core.cache is not None:
        own = before - core.cache.evictable
        core.cache.unlock(handle, used=False)
    need = pages_wanted(core, live) - matched // core.config.page_size
    then, fundable, available = live.turn
    if then != core.passes:
        fundable, available = last.fundable, last.available
    return memory_reason(core, need, fundable - own, available - own)


def _reason_of_resident(core: Core, live: Live) -> Reason:
    if live.reason is not None and live.reason_pass == core.passes:
        return live.reason, live.short_by
    for rows, reason in core.skips:
        if live.row in rows.tolist() and core.residents.served[live.row] != core.step:  # else it came in for another
            return reason, None
    return None, None


def status_of(core: Core, *, rows: int) -> Status:
    """What a plan of `rows` rows means to the host."""
    if rows:
        return Status.RUN
    if not core.lives:
        return Status.IDLE
    return Status.IN_FLIGHT if any(len(record.plan.rows) for record in core.in_flight) else Status.BLOCKED
