"""A host in a few lines, for tests that work a law out by hand.

What lives here: how such a test builds a scheduler, states a request and takes a step. What does not: expectations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsched import Outcome, PagePool, Plan, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
from kvsched.admission.ledger import CommitmentLedger

TERMS = ("free", "cached", "locked", "private", "quarantined")
"""The left side of the accounting equation (law A1)."""
STOP = 1
"""A token that nobody samples unless a test says so."""

_first = itertools.count(2**30)


def make(pages: int, page_size: int = 1, *, cache: bool = False, reserved: int = 0, ledger: CommitmentLedger | None = None,
         sink: Any = None, **config: Any) -> Scheduler:
    """A scheduler over `pages` configured pages. Without a cache unless asked for, so that figures are plain sums."""
    config.setdefault("max_step_tokens", 1_000_000)
    tree = RadixCache(page_size) if cache else None
    return Scheduler(SchedulerConfig(page_size=page_size, **config), PagePool(pages, page_size, reserved), tree, sink=sink, ledger=ledger)


def ask(key: str, prompt: int, new: int | None, *, first: int | None = None, **fields: Any) -> Request:
    """A request of `prompt` tokens that no other request shares, or those from `first` on."""
    tokens = np.arange(prompt) + (first or 0)
    if first is None:
        tokens[:1] = next(_first)
    return Request(key, prompt=tokens, max_new_tokens=new, **fields)


def submit(sched: Scheduler, *requests: Request) -> None:
    """Submit requests that must be accepted."""
    for request in requests:
        answer = sched.submit(request)
        assert answer, answer


def tokens_for(plan: Plan, token: int, stop: tuple[str, ...]) -> list[int]:
    """One token per row: `STOP` for those in `stop`."""
    return [STOP if key in stop else token for key in plan.ids]


def advance(sched: Scheduler, token: int = 7, stop: tuple[str, ...] = ()) -> tuple[Plan, Outcome]:
    """One step: what was planned, and what its commit answered. The equation is checked on both sides."""
    plan = sched.schedule()
    sched.check()
    outcome = sched.commit(plan, StepResult(tokens=tokens_for(plan, token, stop)))
    sched.check()
    return plan, outcome


def step(sched: Scheduler, times: int = 1, *, stop: tuple[str, ...] = ()) -> Plan:
    """`times` steps; the last plan."""
    plan, _ = advance(sched, stop=stop)
    for _ in range(times - 1):
        plan, _ = advance(sched, stop=stop)
    return plan


def drain(sched: Scheduler, most: int) -> int:
    """Step until nothing is left, at most `most` times. Returns how many steps it took."""
    for count in range(most):
        if not sched.has_work():
            return count
        step(sched)
    assert not sched.has_work(), f"still at work after {most} steps: {sched.snapshot()}"
    return most


def until(sched: Scheduler, done: Callable[[Plan], bool], most: int = 1000) -> Plan:
    """Step until `done(plan)`."""
    for _ in range(most):
        plan = step(sched)
        if done(plan):
            return plan
    pytest.fail(f"it did not come about in {most} steps: {sched.snapshot()}")


def chunks(plan: Plan) -> list[tuple[str, int, int]]:
    """(id, start, length) of every prefill row."""
    return [(chunk.id, chunk.start, chunk.length) for chunk in plan.prefill]


def pages(sched: Scheduler) -> tuple[int, ...]:
    """Free, cached, locked, private, quarantined."""
    state = sched.snapshot()
    return tuple(state[term] for term in TERMS)


def why(sched: Scheduler, key: str) -> tuple[str | None, int | None]:
    """Why a live request gets nothing, and by how much."""
    state = sched.request_state(key)
    return state["wait_reason"], state["short_by"]


def running(sched: Scheduler) -> list[str]:
    """Residents by admission."""
    found: list[str] = sched.snapshot()["running"]
    return found


def waiting(sched: Scheduler) -> list[str]:
    """Those who wait, in the order in which the next pass tries them."""
    found: list[str] = sched.snapshot()["waiting"]
    return found


def totals(sched: Scheduler, key: str) -> int:
    """One of the totals."""
    return int(sched.snapshot()["totals"][key])
