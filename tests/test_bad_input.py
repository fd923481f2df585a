"""Whatever a host gets wrong is a typed error that changes nothing, and the scheduler goes on as if it had not happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from kvsched import NullCache, PagePool, RadixCache, Scheduler, SchedulerConfig
from kvsched.errors import (
    ConfigError,
    DuplicateRequest,
    HoldRefused,
    HostError,
    InvalidRequest,
    InvalidResult,
    KvschedError,
    OutOfOrder,
    ReentrantCall,
    TooManyInFlight,
    UnknownRequest,
)
from kvsched.plan import Agreed, Event, Plan, StepResult
from kvsched.request import Namespace, Request
from kvsched.verdict import Accepted

PAGE = 4


def build(**settings: Any) -> Scheduler:
    """Two residents that decode, one in the middle of its prefill, two that wait (one of them not ready), one hold."""
    settings = {"page_size": PAGE, "max_running": 3, "chunk_tokens": 8, "max_in_flight": 2} | settings
    scheduler = Scheduler(SchedulerConfig(**settings), PagePool(32, PAGE), RadixCache(PAGE))
    for name, prompt in (("a", 5), ("b", 6), ("c", 60)):
        assert scheduler.submit(Request(name, list(range(prompt)), 20))
    assert scheduler.submit(Request("d", [9] * 7, 20))
    assert scheduler.submit(Request("e", [8] * 7, 20, ready=False))
    scheduler.hold_pages("held", 2)
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.commit(plan, ones(plan, scheduler))
    return scheduler


def ones(plan: Plan, scheduler: Scheduler) -> StepResult:
    width = 1 + scheduler.config.lookahead_tokens
    return StepResult(np.ones((len(plan), width), np.int64) if width > 1 else np.ones(len(plan), np.int64))


def untouched(scheduler: Scheduler, error: type[Exception], call: Callable[[], object], match: str | None = None) -> None:
    """The call raises exactly this kind of error, everything that can be asked is as before, and check() holds."""
    before, plans, table = scheduler.snapshot(), scheduler.in_flight, scheduler.block_table.copy()
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, KvschedError)
    assert scheduler.snapshot() == before
    assert scheduler.in_flight == plans
    assert np.array_equal(scheduler.block_table, table)
    scheduler.check()


# -- requests ------------------------------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, Any]] = [
    ("id", ""), ("id", 7), ("id", None),
    ("prompt", []), ("prompt", [1.5]), ("prompt", [[1]]), ("prompt", [-1]), ("prompt", [2**31]), ("prompt", "abc"), ("prompt", [[1], [1, 2]]), ("prompt", [True]),
    ("prompt", None), ("prompt", 5), ("prompt", np.zeros((0,))),
    ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("max_new_tokens", True), ("max_new_tokens", "8"), ("max_new_tokens", float("nan")),
    ("min_new_tokens", -1), ("min_new_tokens", 0.5), ("min_new_tokens", True), ("min_new_tokens", None),
    ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("stop_token_ids", [1.0]), ("stop_token_ids", [True]),
    ("priority", 0.5), ("priority", True), ("priority", None),
    ("ignore_eos", 1), ("ignore_eos", None), ("ready", 0), ("cache_read", "yes"), ("cache_write", None),
    ("tenant", None), ("tenant", 3), ("adapter", 3), ("namespace", "x"), ("namespace", None),
    ("n", 0), ("n", -1), ("n", 1.0), ("n", True), ("n", None),
    ("block_tokens", 0), ("block_tokens", 2.5), ("block_tokens", True),
    ("pin", -1), ("pin", 1.5), ("pin", True),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:20])
def test_a_malformed_request_is_named_when_it_is_made(field: str, value: Any) -> None:
    good: dict[str, Any] = {"id": "x", "prompt": [1, 2, 3], "max_new_tokens": 4}
    with pytest.raises(InvalidRequest, match="prompt" if field == "prompt" else field):
        Request(**good | {field: value})


def test_what_is_legal_at_the_edge() -> None:
    scheduler = build()
    assert scheduler.submit(Request("zero", [1], 0)).max_new_tokens == 0  # type: ignore[union-attr]
    assert scheduler.submit(Request("numpy", np.array([1, 2], np.uint16), np.int64(3)))
    assert scheduler.submit(Request("open", (1, 2)))
    scheduler.check()


def test_a_namespace_that_contradicts_the_adapter() -> None:
    with pytest.raises(InvalidRequest, match="adapter"):
        Request("x", [1], 1, adapter="one", namespace=Namespace(adapter="two"))


@pytest.mark.parametrize("thing", [None, "a", {"id": "x"}, 5])
def test_submit_takes_requests_only(thing: Any) -> None:
    scheduler = build()
    untouched(scheduler, HostError, lambda: scheduler.submit(thing))


def test_a_live_id_is_a_duplicate_whatever_its_state() -> None:
    scheduler = build()
    plan = scheduler.schedule()
    for name in ("a", "c", "d", "e"):
        untouched(scheduler, DuplicateRequest, lambda name=name: scheduler.submit(Request(name, [1], 1)), name)  # type: ignore[misc]
    scheduler.commit(plan, ones(plan, scheduler))
    assert scheduler.abort("a")
    assert scheduler.submit(Request("a", [1], 1))


def test_children_and_parents_are_ids_too() -> None:
    scheduler = build(max_running=9)
    answer = scheduler.submit(Request("p", [1, 2], 3, n=3))
    assert isinstance(answer, Accepted)
    assert answer.ids == ("p/0", "p/1", "p/2")
    untouched(scheduler, DuplicateRequest, lambda: scheduler.submit(Request("p", [1], 1)))
    untouched(scheduler, DuplicateRequest, lambda: scheduler.submit(Request("p/1", [1], 1)))
    scheduler.submit(Request("q/1", [1], 1))
    untouched(scheduler, DuplicateRequest, lambda: scheduler.submit(Request("q", [1], 1, n=2)))


def test_a_block_wider_than_a_step() -> None:
    scheduler = build(max_step_tokens=16)
    untouched(scheduler, InvalidRequest, lambda: scheduler.submit(Request("x", [1], 40, block_tokens=17)), "block_tokens")


# -- results -------------------------------------------------------------------------------------------------------------


def rows(n: int, **fields: Any) -> StepResult:
    return StepResult(np.ones(n, np.int64), **fields)


BAD_RESULTS: dict[str, Callable[[int], Any]] = {
    "none": lambda _: None,
    "a bare list": lambda n: [1] * n,
    "too few rows": lambda n: rows(n - 1),
    "too many rows": lambda n: rows(n + 1),
    "too many dimensions": lambda n: StepResult(np.ones((n, 1, 1), np.int64)),
    "fractions": lambda n: StepResult(np.full(n, 1.5)),
    "booleans": lambda n: StepResult(np.ones(n, np.bool_)),
    "words": lambda n: StepResult(["x"] * n),
    "no token": lambda n: StepResult(np.full(n, -1)),
    "tokens beyond int32": lambda n: StepResult(np.full(n, 2**40)),
    "ragged": lambda n: StepResult([[1], [1, 2], *[[1]] * (n - 2)]),
    "accepted without drafts": lambda n: rows(n, accepted=np.ones(n, np.int64)),
    "accepted too short": lambda n: rows(n, accepted=np.zeros(n - 1, np.int64)),
    "accepted negative": lambda n: rows(n, accepted=np.full(n, -1)),
    "accepted fractional": lambda n: rows(n, accepted=np.zeros(n)),
    "failed past the end": lambda n: rows(n, failed=[n]),
    "failed negative": lambda n: rows(n, failed=[-1]),
    "failed an id": lambda n: rows(n, failed=["a"]),
    "failed a mask": lambda n: rows(n, failed=[True] * n),
    "failed a number": lambda n: rows(n, failed=0),
    "finished past the end": lambda n: rows(n, finished=[0, n]),
    "finished an id": lambda n: rows(n, finished=["nobody"]),
    "finished fractional": lambda n: rows(n, finished=[0.5]),
    "final of a row that is no block": lambda n: rows(n, final=[0]),
    "final past the end": lambda n: rows(n, final=[n]),
}


@pytest.mark.parametrize("kind", BAD_RESULTS)
def test_a_result_that_does_not_match_its_plan(kind: str) -> None:
    scheduler = build()
    plan = scheduler.schedule()
    assert plan.decodes == 2
    assert len(plan) == 3
    untouched(scheduler, InvalidResult, lambda: scheduler.commit(plan, BAD_RESULTS[kind](len(plan))))
    outcome = scheduler.commit(plan, ones(plan, scheduler))
    assert outcome.tokens.tolist() == [1, 1, -1]


def test_accepted_counts_beyond_the_drafts_of_the_row() -> None:
    scheduler = build(lookahead_tokens=2)
    plan = scheduler.schedule()
    accepted = np.zeros(len(plan), np.int64)
    for bad in ([3, 0, 0], [0, -1, 0], [0, 0, 1]):
        accepted[:] = bad
        result = attrs.evolve(ones(plan, scheduler), accepted=accepted.copy())
        untouched(scheduler, InvalidResult, lambda result=result: scheduler.commit(plan, result), "accepted")  # type: ignore[misc]
    narrow = StepResult(np.ones((len(plan), 2), np.int64), accepted=np.array([2, 0, 0]))
    untouched(scheduler, InvalidResult, lambda: scheduler.commit(plan, narrow))
    accepted[:] = [2, 1, 0]
    outcome = scheduler.commit(plan, attrs.evolve(ones(plan, scheduler), accepted=accepted))
    assert [[t for t in row if t >= 0] for row in outcome.tokens.tolist()] == [[1, 1, 1], [1, 1], []]


# -- order of plans ------------------------------------------------------------------------------------------------------


def test_a_result_twice() -> None:
    scheduler = build()
    plan = scheduler.schedule()
    scheduler.commit(plan, ones(plan, scheduler))
    untouched(scheduler, OutOfOrder, lambda: scheduler.commit(plan, ones(plan, scheduler)))
    untouched(scheduler, OutOfOrder, lambda: scheduler.rollback(plan))


def test_rolled_back_plans_are_over() -> None:
    scheduler = build()
    plan = scheduler.schedule()
    scheduler.rollback(plan)
    untouched(scheduler, OutOfOrder, lambda: scheduler.rollback(plan))
    untouched(scheduler, OutOfOrder, lambda: scheduler.commit(plan, ones(plan, scheduler)))


def test_commit_goes_oldest_first_and_rollback_newest_first() -> None:
    scheduler = build()
    one, two = scheduler.schedule(), scheduler.schedule()
    untouched(scheduler, OutOfOrder, lambda: scheduler.commit(two, ones(two, scheduler)))
    untouched(scheduler, OutOfOrder, lambda: scheduler.rollback(one))
    untouched(scheduler, TooManyInFlight, scheduler.schedule)
    scheduler.rollback(two)
    scheduler.commit(one, ones(one, scheduler))


def test_a_plan_of_another_scheduler() -> None:
    scheduler, other = build(), build()
    mine, theirs = scheduler.schedule(), other.schedule()
    assert mine.digest == theirs.digest
    untouched(scheduler, OutOfOrder, lambda: scheduler.commit(theirs, ones(theirs, scheduler)))
    untouched(scheduler, OutOfOrder, lambda: scheduler.rollback(theirs))
    untouched(scheduler, HostError, lambda: scheduler.commit(None, ones(mine, scheduler)))  # type: ignore[arg-type]
    untouched(scheduler, HostError, lambda: scheduler.rollback("plan"))  # type: ignore[arg-type]


def test_nothing_in_flight() -> None:
    scheduler = build()
    plan = scheduler.schedule()
    scheduler.commit(plan, ones(plan, scheduler))
    untouched(scheduler, OutOfOrder, lambda: scheduler.rollback(plan))


# -- the other calls -----------------------------------------------------------------------------------------------------

WRONG_CALLS: dict[str, tuple[type[Exception], Callable[[Scheduler], object]]] = {
    "generated of nobody": (UnknownRequest, lambda s: s.generated("nobody")),
    "explain nobody": (UnknownRequest, lambda s: s.explain("nobody")),
    "request_state of nobody": (UnknownRequest, lambda s: s.request_state("nobody")),
    "pause in no mode": (HostError, lambda s: s.pause("later")),
    "hold nothing": (HostError, lambda s: s.hold_pages("x", 0)),
    "hold less than nothing": (HostError, lambda s: s.hold_pages("x", -1)),
    "hold a fraction": (HostError, lambda s: s.hold_pages("x", 1.5)),  # type: ignore[arg-type]
    "hold True": (HostError, lambda s: s.hold_pages("x", True)),
    "hold too many": (HoldRefused, lambda s: s.hold_pages("x", 1000)),
    "hold twice": (HoldRefused, lambda s: s.hold_pages("held", 1)),
    "hold for no steps": (HostError, lambda s: s.hold_pages("x", 1, 0)),
    "hold for True steps": (HostError, lambda s: s.hold_pages("x", 1, True)),
    "hold without a name": (HostError, lambda s: s.hold_pages("", 1)),
    "limit of nothing": (ConfigError, lambda s: s.set_limits(max_running=0)),
    "limit of a fraction": (ConfigError, lambda s: s.set_limits(max_step_tokens=1.5)),
    "limit of True": (ConfigError, lambda s: s.set_limits(chunk_tokens=True)),
    "limit without a name": (KvschedError, lambda s: s.set_limits(page_size=8)),
    "limit nobody knows": (KvschedError, lambda s: s.set_limits(speed=8)),
    "one good and one bad limit": (ConfigError, lambda s: s.set_limits(max_running=2, head="polite")),
    "an order nobody knows": (ConfigError, lambda s: s.set_limits(order="lottery")),
    "agreed in words": (HostError, lambda s: s.schedule("agreed")),  # type: ignore[arg-type]
    "agreed to admit less than none": (HostError, lambda s: s.schedule(Agreed(admit=-1))),
    "agreed on less than no prefill": (HostError, lambda s: s.schedule(Agreed(prefill_tokens=-1))),
    "agreed on less than no pages": (HostError, lambda s: s.schedule(Agreed(free_pages=-1))),
}


@pytest.mark.parametrize("kind", WRONG_CALLS)
def test_a_wrong_call(kind: str) -> None:
    scheduler = build()
    error, call = WRONG_CALLS[kind]
    untouched(scheduler, error, lambda: call(scheduler))


def test_calls_that_only_say_no() -> None:
    scheduler = build()
    before = scheduler.snapshot()
    assert scheduler.abort("nobody") is False
    assert scheduler.mark_ready("nobody") is False
    assert scheduler.mark_ready("a") is False
    assert not scheduler.flush()
    assert scheduler.flush().reason
    assert scheduler.snapshot() == before


class Halfway:
    """A host's pool that is not finished."""

    page_size = 8
    usable = free = 8


@pytest.mark.parametrize(("pool", "parts", "named"), [
    (None, {}, "pool must have what kvsched.protocols.Pool asks for; NoneType lacks alloc, check, free, page_size, release, usable"),
    (Halfway(), {}, "pool must have what kvsched.protocols.Pool asks for; Halfway lacks alloc, check, release"),
    (PagePool, {}, "pool must be an object, not the class PagePool"),
    (RadixCache(8), {}, "pool must have .*; RadixCache lacks alloc, free, release, usable"),
    (PagePool(8, 8), {"cache": PagePool(8, 8)}, "cache must have .*TreeCache .*; PagePool lacks caches, clear"),
    (PagePool(8, 8), {"cache": RadixCache}, "cache must be an object, not the class RadixCache"),
    (PagePool(8, 8), {"sink": print}, "sink must have .*EventSink .* lacks event"),
    (PagePool(8, 8), {"ledger": {}}, "ledger must be a CommitmentLedger or None, not dict"),
])
def test_parts_that_are_none(pool: Any, parts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Scheduler(SchedulerConfig(page_size=8), pool, **parts)


def test_parts_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        Scheduler(SchedulerConfig(page_size=8), PagePool(8, 4))
    with pytest.raises(ConfigError, match="page_size"):
        Scheduler(SchedulerConfig(page_size=8), PagePool(8, 8), RadixCache(4))
    with pytest.raises(ConfigError, match="lookahead"):
        SchedulerConfig(page_size=1, max_step_tokens=2, lookahead_tokens=2)
    with pytest.raises(ConfigError, match="max_in_flight"):
        SchedulerConfig(page_size=1, max_in_flight=3)


# -- calls from inside a callback ------------------------------------------------------------------------------------------

MEDDLING: dict[str, Callable[[Scheduler, Plan | None], object]] = {
    "submit": lambda s, _: s.submit(Request("x", [1], 1)),
    "abort": lambda s, _: s.abort("a"),
    "abort_all": lambda s, _: s.abort_all(),
    "finish": lambda s, _: s.finish("a"),
    "schedule": lambda s, _: s.schedule(),
    "commit": lambda s, p: s.commit(p, rows(len(p) if p is not None else 0)),  # type: ignore[arg-type]
    "rollback": lambda s, p: s.rollback(p),  # type: ignore[arg-type]
    "mark_ready": lambda s, _: s.mark_ready("e"),
    "pause": lambda s, _: s.pause("hold"),
    "resume": lambda s, _: s.resume(),
    "flush": lambda s, _: s.flush(),
    "set_limits": lambda s, _: s.set_limits(max_running=1),
    "hold_pages": lambda s, _: s.hold_pages("x", 1),
    "release_pages": lambda s, _: s.release_pages("held"),
    "unpin": lambda s, _: s.unpin("a"),
}
MUTATORS = [
    name for name, member in vars(Scheduler).items()
    if not name.startswith("_") and callable(member) and name not in ("check", "snapshot", "explain", "request_state", "generated", "has_work", "health")
]


def test_every_call_that_changes_something_is_tried_from_inside() -> None:
    assert sorted(MUTATORS) == sorted(MEDDLING)


class Meddler:
    """A sink that calls the scheduler, as no sink may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scheduler: Scheduler | None = None
        self.plan: Plan | None = None
        self.kinds: dict[str, int] = {}

    def event(self, event: Event) -> None:
        if self.scheduler is None:
            return
        before = self.scheduler.snapshot()
        with pytest.raises(ReentrantCall):
            MEDDLING[self.name](self.scheduler, self.plan)
        assert self.scheduler.snapshot() == before
        self.kinds[event.kind] = self.kinds.get(event.kind, 0) + 1


def story(scheduler: Scheduler, meddler: Meddler | None) -> list[str]:
    """A run with every kind of event; the digests of its plans."""
    digests = []

    def step(**marks: Any) -> None:
        plan = scheduler.schedule()
        digests.append(plan.digest)
        if meddler:
            meddler.plan = plan
        scheduler.commit(plan, attrs.evolve(rows(len(plan)), **marks))

    for name in "abcde":
        scheduler.submit(Request(name, [ord(name)] * 6, 9, ready=name != "e"))
    step()
    step()
    scheduler.abort("b")
    scheduler.pause("hold")
    scheduler.resume()
    scheduler.pause("retract")
    scheduler.resume()
    scheduler.mark_ready("e")
    step()
    step(failed=[0])
    step(finished=[0])
    while scheduler.has_work():
        step()
    scheduler.check()
    return digests


@pytest.mark.parametrize("name", MEDDLING)
def test_a_call_from_inside_a_callback_raises_and_changes_nothing(name: str) -> None:
    config = SchedulerConfig(page_size=PAGE, max_running=3)
    meddler = Meddler(name)
    meddled = Scheduler(config, PagePool(32, PAGE), NullCache(PAGE), sink=meddler)
    meddler.scheduler = meddled
    quiet = Scheduler(config, PagePool(32, PAGE), NullCache(PAGE))
    assert story(meddled, meddler) == story(quiet, None)
    assert {"queued", "admitted", "retracted", "paused", "resumed", "finished", "aborted"} <= set(meddler.kinds)
