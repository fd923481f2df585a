"""Why a request gets nothing, worked out when somebody asks (laws B8 and F1). Reads only."""

from __future__ import annotations

from kvsched.admission.budget import pages_wanted
from kvsched.commit import waited_steps
from kvsched.core import Core
from kvsched.live import Live
from kvsched.plan import Status
from kvsched.prefill import memory_reason
from kvsched.request import State
from kvsched.verdict import Explanation, WaitReason


def explain(core: Core, live: Live) -> Explanation:
    """The first reason that stops the request, as of the last pass; None when nothing does or no pass saw it yet."""
    reason, short_by = _reason(core, live)
    return Explanation(live.id, live.state.value, reason, short_by, waited_steps(core, live), _words(reason, short_by))


def _reason(core: Core, live: Live) -> tuple[WaitReason | None, int | None]:
    if live.row >= 0:
        return _reason_of_resident(core, live)
    last = core.last_pass
    if last is None or live.submitted_pass >= core.passes:
        return None, None
    if core.paused is not None:
        return WaitReason.PAUSED, None
    if not live.ready or live.late:
        return WaitReason.HOST, None
    if live.reason is not None and live.reason_pass == core.passes:
        return live.reason, live.short_by
    if last.closed:
        return WaitReason.HEAD_OF_LINE, None
    if last.full:
        return WaitReason.RUNNING_LIMIT, 1
    if last.partial_places is not None and last.partial_places <= 0:
        return WaitReason.PARTIAL_PREFILL_LIMIT, None
    need = pages_wanted(core, live) - core.match(live) // core.config.page_size
    if last.beside is not None and need > last.beside:
        return WaitReason.HEAD_OF_LINE, None
    if need > last.fundable:
        return memory_reason(core, need, last.fundable)
    return WaitReason.STEP_TOKENS, None


def _reason_of_resident(core: Core, live: Live) -> tuple[WaitReason | None, int | None]:
    if live.state is State.PAUSED:
        return WaitReason.PAUSED, None
    if live.reason is not None and live.reason_pass == core.passes:
        return live.reason, live.short_by
    for rows, reason in core.skips:
        if live.row in rows.tolist():
            return reason, None
    return None, None


def _words(reason: WaitReason | None, short_by: int | None) -> str:
    if reason is None:
        return ""
    return reason.value if short_by is None else f"{reason.value}, short by {short_by}"


def status_of(core: Core, *, rows: int) -> Status:
    """What a plan of `rows` rows means to the host."""
    if rows:
        return Status.RUN
    if not core.lives:
        return Status.IDLE
    return Status.IN_FLIGHT if any(len(record.plan.rows) for record in core.in_flight) else Status.BLOCKED
