"""What a host may not do, as calls that must each be a typed error and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvsched import Scheduler
from kvsched.errors import InvalidResult, KvschedError, OutOfOrder, TooManyInFlight, UnknownRequest
from kvsched.plan import Plan, StepResult

KINDS = ("schedule", "unknown plan", "commit order", "rollback order", "twice", "short", "accepted", "failed", "id", "limit", "key",
         "mode", "hold")


def wrong_call(scheduler: Scheduler, kind: str, plans: Sequence[Plan], last: Plan | None) -> tuple[type[Exception], Callable[[], object]] | None:
    """The error that a misuse must raise and the call that does it; None where it is not possible now.

    plans: those in flight, oldest first. last: one that was committed.
    """
    most = scheduler.config.max_in_flight
    nothing = StepResult(np.zeros(0, np.int64))
    wrong: dict[str, tuple[bool, type[Exception], Callable[[], object]]] = {
        "schedule": (len(plans) == most, TooManyInFlight, scheduler.schedule),
        "unknown plan": (bool(plans), OutOfOrder, lambda: scheduler.commit(attrs.evolve(plans[0]), nothing)),
        "commit order": (len(plans) > 1, OutOfOrder, lambda: scheduler.commit(plans[1], _zeros(scheduler, plans[1]))),
        "rollback order": (len(plans) > 1, OutOfOrder, lambda: scheduler.rollback(plans[0])),
        "twice": (last is not None, OutOfOrder, lambda: scheduler.commit(last, nothing)),  # type: ignore[arg-type]
        "short": (bool(plans and plans[0]), InvalidResult, lambda: scheduler.commit(plans[0], nothing)),
        "accepted": (bool(plans and plans[0]), InvalidResult, lambda: scheduler.commit(
            plans[0], attrs.evolve(_zeros(scheduler, plans[0]), accepted=np.full(len(plans[0]), 9)))),
        "failed": (bool(plans), InvalidResult, lambda: scheduler.commit(
            plans[0], attrs.evolve(_zeros(scheduler, plans[0]), failed=[len(plans[0])]))),
        "id": (True, UnknownRequest, lambda: scheduler.generated("nobody")),
        "limit": (True, KvschedError, lambda: scheduler.set_limits(max_running=0)),
        "key": (True, KvschedError, lambda: scheduler.set_limits(page_size=2)),
        "mode": (True, KvschedError, lambda: scheduler.pause("later")),
        "hold": (True, KvschedError, lambda: scheduler.hold_pages("h9", -1)),
    }
    possible, error, call = wrong[kind]
    return (error, call) if possible else None


def _zeros(scheduler: Scheduler, plan: Plan) -> StepResult:
    width = max([1 + scheduler.config.lookahead_tokens, *plan.counts[: plan.decodes].tolist()])
    return StepResult(np.zeros((len(plan), width) if width > 1 else len(plan), np.int64))
