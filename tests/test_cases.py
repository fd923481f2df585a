"""Cases from the field that do not fit a scenario file: calls of the API, callbacks, typed errors, the cache by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched import (
    Agreed,
    Event,
    NullCache,
    PagePool,
    Plan,
    RadixCache,
    RefusalReason,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    StepResult,
)
from kvsched.errors import (
    ConfigError,
    DuplicateRequest,
    HoldRefused,
    HostError,
    InvalidHandle,
    InvalidRequest,
    InvalidResult,
    OutOfOrder,
    ReentrantCall,
    TooManyInFlight,
    UnknownRequest,
)
from kvsched.verdict import decide

# a string, so that mypy does not see what is wrong on purpose
WRONG: Any = "wrong"


def make(pages: int = 40, page_size: int = 16, *, sink: Any = None, cache: bool = True, **config: Any) -> Scheduler:
    tree = RadixCache(page_size) if cache else None
    return Scheduler(SchedulerConfig(page_size=page_size, **config), PagePool(pages, page_size), tree, sink=sink)


def request(key: str, prompt: int, new: int | None = 5, first: int = 1000, **fields: Any) -> Request:
    return Request(key, prompt=np.arange(first, first + prompt), max_new_tokens=new, **fields)


def step(sched: Scheduler, token: int = 7) -> Plan:
    plan = sched.schedule()
    sched.commit(plan, StepResult(tokens=np.full(len(plan), token)))
    return plan


def state(sched: Scheduler) -> str:
    """Everything there is to see, as text."""
    return json.dumps(sched.snapshot(), sort_keys=True) + sched.block_table.tobytes().hex()


def drain(sched: Scheduler, steps: int = 2000) -> None:
    for _ in range(steps):
        if not sched.has_work():
            return
        step(sched)
    pytest.fail(f"still at work after {steps} steps: {sched.snapshot()}")


@attrs.define
class Ear:
    """A sink that keeps what it hears, and may call back."""

    heard: list[Event] = attrs.field(factory=list)
    then: Callable[[Event], object] | None = None

    def event(self, event: Event) -> None:
        self.heard.append(event)
        if self.then is not None:
            self.then(event)

    def count(self, kind: str) -> Counter[str]:
        return Counter(event.id for event in self.heard if event.kind == kind)


# --- admission --------------------------------------------------------------------------------------------------------------


def test_b1_the_verdict_has_no_chunk() -> None:
    with pytest.raises(TypeError):
        decide(640, 100, 100, chunk=1)  # type: ignore[call-arg]  # law B1: it is not to be had


@settings(max_examples=150, deadline=None)
@given(prompt=st.integers(1, 200), new=st.integers(0, 120), pages=st.integers(1, 14), page_size=st.sampled_from([1, 3, 16]),
       admission=st.sampled_from(["guaranteed", "expected"]), chunk=st.sampled_from([None, 1, 7, 64]),
       context=st.sampled_from([None, 100, 10_000]))
def test_c03_what_submit_accepts_an_empty_pool_admits(prompt: int, new: int, pages: int, page_size: int, admission: str,
                                                      chunk: int | None, context: int | None) -> None:
    sched = make(pages, page_size, admission=admission, chunk_tokens=chunk, context_limit=context)
    answer = sched.submit(request("R", prompt, new))
    slots = prompt + max(new, 1) - 1
    fits = -(-slots // page_size) <= pages and (context is None or prompt + new <= context)
    assert bool(answer) == fits
    if not isinstance(answer, Refused):
        plan = step(sched)
        assert plan.admitted == ("R",)
        drain(sched)
        assert sched.snapshot()["totals"]["emitted"] == new


def test_c12_a_refusal_changes_nothing() -> None:
    sched = make(max_queued_requests=1, max_queued_tokens=50, max_inflight_prompt_tokens=60, context_limit=500)
    assert sched.submit(request("A", 20, 20))
    step(sched)
    assert sched.submit(request("B", 10))
    before = state(sched)
    for asked, reason in (
        (request("C", 10), RefusalReason.QUEUE_REQUESTS), (request("C", 600, 300), RefusalReason.CONTEXT_LIMIT),
        (request("C", 20, n=3), RefusalReason.QUEUE_REQUESTS),
    ):
        answer = sched.submit(asked)
        assert isinstance(answer, Refused)
        assert answer.reason is reason
        assert state(sched) == before
    sched.check()


def test_b11_never_fits_comes_before_the_bounds() -> None:
    sched = make(10, max_queued_requests=0)
    answer = sched.submit(request("A", 161, 1))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.needed, answer.available, answer.retryable) == (RefusalReason.NEVER_FITS, 11, 10, False)


# --- the cache by itself ----------------------------------------------------------------------------------------------------


def tree(cache: RadixCache, tokens: list[int], first_page: int) -> Any:
    handle = cache.lock((), np.array(tokens, dtype=np.int32))
    rest = np.array(tokens[handle.length :], dtype=np.int32)
    cache.extend(handle, rest, np.arange(first_page, first_page + len(rest), dtype=np.int32))
    return handle


def test_c16_a_lock_protects_the_node_and_its_ancestors() -> None:
    cache = RadixCache(1)
    cache.unlock(tree(cache, [1, 2, 3, 4], 0))
    cache.unlock(tree(cache, [1, 2, 3, 4, 5, 6, 7, 8], 4))
    handle = cache.lock((), np.arange(1, 9, dtype=np.int32))
    assert (cache.locked, cache.evictable, len(cache.evict(100))) == (8, 0, 0)
    cache.unlock(handle)
    assert (cache.locked, cache.evictable) == (0, 8)
    with pytest.raises(InvalidHandle):
        cache.unlock(handle)
    assert (cache.locked, cache.evictable) == (0, 8)
    again = cache.lock((), np.arange(1, 9, dtype=np.int32))
    assert (again.length, cache.locked, cache.evictable) == (8, 8, 0)


def test_c17_unlock_goes_by_what_the_handle_recorded() -> None:
    """The state component of the case comes with hybrid caches; here a node changes shape between lock and unlock."""
    cache = RadixCache(1)
    cache.unlock(tree(cache, [1, 2, 3, 4, 5, 6], 0))
    whole = cache.lock((), np.arange(1, 7, dtype=np.int32))
    split = tree(cache, [1, 2, 3, 9], 20)  # splits the locked node in the middle
    part = cache.lock((), np.arange(1, 4, dtype=np.int32))
    assert (cache.locked, cache.evictable) == (7, 0)
    cache.unlock(whole)
    assert (cache.locked, cache.evictable) == (4, 3)
    cache.unlock(split)
    assert (cache.locked, cache.evictable) == (3, 4)
    cache.unlock(part)
    assert (cache.locked, cache.evictable) == (0, 7)
    cache.check()


def test_c84_a_page_with_two_pins_stays_until_both_are_gone() -> None:
    sched = make(20, pin_limit_pages=10)
    for key in ("A", "B"):
        assert sched.submit(request(key, 64, 1, pin=4))
        drain(sched)
    assert sched.max_servable_tokens == 16 * 16
    assert sched.unpin("A")
    assert not sched.unpin("A")
    assert sched.max_servable_tokens == 16 * 16
    assert sched.submit(request("all", 256, 1, first=9000))
    drain(sched)
    assert sched.submit(request("C", 65, 1))
    assert sched.schedule().prefill[0].start == 64
    sched.rollback(sched.in_flight[0])
    assert sched.unpin("B")
    assert sched.max_servable_tokens == 20 * 16
    sched.check()


# --- callbacks --------------------------------------------------------------------------------------------------------------


CALLS: tuple[Callable[[Scheduler], object], ...] = (
    lambda sched: sched.abort("A"), lambda sched: sched.abort_all(), lambda sched: sched.submit(request("X", 4)),
    lambda sched: sched.schedule(), lambda sched: sched.pause("retract"), lambda sched: sched.resume(), lambda sched: sched.flush(),
    lambda sched: sched.mark_ready("A"), lambda sched: sched.set_limits(max_running=1), lambda sched: sched.hold_pages("x", 1),
    lambda sched: sched.rollback(WRONG), lambda sched: sched.commit(WRONG, WRONG), lambda sched: sched.release_pages("x"),
)


@pytest.mark.parametrize("call", CALLS)
def test_c79_a_call_from_a_callback_raises_and_changes_nothing(call: Callable[[Scheduler], object]) -> None:
    refused: list[bool] = []
    during: list[str] = []

    def back(_: Event) -> None:
        before = state(sched)
        with pytest.raises(ReentrantCall):
            call(sched)
        refused.append(True)
        during.append(before)
        assert state(sched) == before

    ear = Ear(then=back)
    sched, quiet = make(sink=ear), make()
    for one in (sched, quiet):
        one.submit(request("A", 20))
        one.submit(request("B", 20, first=5000))
        drain(one)
    assert refused
    assert state(sched) == state(quiet)


def test_c79_an_abort_between_steps_ends_a_retracted_request_once() -> None:
    ear = Ear()
    sched = make(sink=ear)
    sched.submit(request("A", 20, 9))
    step(sched)
    step(sched)
    sched.pause("retract")
    assert sched.request_state("A")["generated"] == 2
    assert sched.abort("A")
    assert not sched.abort("A")
    sched.resume()
    drain(sched)
    assert ear.count("aborted") == {"A": 1}
    assert ear.count("finished") == {}
    sched.check()


def test_c78_one_terminal_event_per_request() -> None:
    ear = Ear()
    sched = make(30, sink=ear, chunk_tokens=32, max_running=3)
    for key, prompt in (("run", 16), ("mid", 300), ("back", 20), ("wait", 30), ("done", 10)):
        sched.submit(request(key, prompt, 9, first=len(ear.heard) * 1000))
    step(sched)
    step(sched)
    for key in ("run", "mid", "wait", "nobody"):
        assert sched.abort(key) == (key != "nobody")
        assert not sched.abort(key)
    sched.pause("retract")
    assert sched.abort("back")
    sched.resume()
    drain(sched)
    ends = ear.count("aborted") + ear.count("finished")
    assert ends == {"run": 1, "mid": 1, "back": 1, "wait": 1, "done": 1}
    assert sched.snapshot()["private"] == 0


def test_c32_one_event_per_pause() -> None:
    ear = Ear()
    sched = make(sink=ear)
    for key in "ABC":
        sched.submit(request(key, 20, 9, first=ord(key) * 1000))
    step(sched)
    for _ in range(50):
        sched.pause("retract")
        step(sched)
    assert ear.count("retracted") == {"A": 1, "B": 1, "C": 1}
    sched.resume()
    step(sched)
    for _ in range(50):
        sched.pause("hold")
        step(sched)
    assert ear.count("paused") == {"A": 1, "B": 1, "C": 1}
    sched.resume()
    sched.resume()
    assert ear.count("resumed") == {"A": 1, "B": 1, "C": 1}
    drain(sched)


@pytest.mark.parametrize(("admit", "running"), [(None, ["A", "H0", "H1"]), (2, ["A", "H0", "H1"]), (1, ["A", "B", "H0"]), (0, ["A", "B", "C"])])
def test_c35_nobody_is_displaced_for_whom_the_ranks_do_not_admit(admit: int | None, running: list[str]) -> None:
    """Three places, two better requests that wait: as many give way as newcomers were agreed on."""
    sched = make(max_running=3, preempt_priority=True)
    for key in "ABC":
        sched.submit(request(key, 20, 9, first=ord(key) * 100, priority=2))
    step(sched)
    for key in ("H0", "H1"):
        sched.submit(request(key, 20, 9, first=9_000))
    plan = sched.schedule(Agreed(admit=admit))
    assert sched.snapshot()["running"] == running
    assert len(plan.retracted) == len(plan.admitted) == running.count("H0") + running.count("H1")


def test_c39_one_end_and_no_token_when_abort_beats_the_last_chunk() -> None:
    ear = Ear()
    sched = make(sink=ear, cache=False)
    sched.submit(request("A", 20))
    plan = sched.schedule()
    assert sched.abort("A")
    outcome = sched.commit(plan, StepResult(tokens=[7]))
    assert outcome.tokens.tolist() == [-1]
    assert outcome.ended == ()
    assert ear.count("aborted") == {"A": 1}
    assert sched.snapshot()["free"] == 40


# --- the host's mistakes change nothing -------------------------------------------------------------------------------------


def busy() -> Scheduler:
    """Two running, one of them between chunks, one waiting, one plan in flight of two."""
    sched = make(max_in_flight=2, chunk_tokens=32, max_running=2)
    for key, prompt in (("A", 20), ("B", 100), ("C", 10)):
        sched.submit(request(key, prompt, 9, first=prompt * 1000))
    step(sched)
    sched.schedule()
    return sched


MISTAKES: tuple[tuple[str, type[Exception], Callable[[Scheduler], object]], ...] = (
    ("a live id", DuplicateRequest, lambda s: s.submit(request("A", 4))),
    ("a waiting id", DuplicateRequest, lambda s: s.submit(request("C", 4))),
    ("no request", InvalidRequest, lambda s: s.submit(WRONG)),
    ("a third plan", TooManyInFlight, lambda s: (s.schedule(), s.schedule())),
    ("a bad pause", InvalidRequest, lambda s: s.pause("gently")),
    ("an unknown limit", ConfigError, lambda s: s.set_limits(page_size=8)),
    ("a bad limit", ConfigError, lambda s: s.set_limits(max_running=True)),
    ("one good and one bad limit", ConfigError, lambda s: s.set_limits(max_running=7, max_step_tokens=-1)),
    ("a hold of too much", HoldRefused, lambda s: s.hold_pages("x", 41)),
    ("a hold of nothing", HostError, lambda s: s.hold_pages("x", 0)),
    ("a hold for a fraction", HostError, lambda s: s.hold_pages("x", 1, WRONG)),
    ("an unknown state", UnknownRequest, lambda s: s.request_state("X")),
    ("an unknown reason", UnknownRequest, lambda s: s.explain("X")),
    ("unknown tokens", UnknownRequest, lambda s: s.generated("X")),
    ("too few tokens", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7]))),
    ("too many tokens", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7, 7, 7]))),
    ("tokens that are none", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[0.5, 1.0]))),
    ("negative tokens", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[-1, 7]))),
    ("no tokens", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=None))),
    ("drafts without speculation", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7, 7], accepted=[1, 0]))),
    ("an end that is no row", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7, 7], finished=[2]))),
    ("a failure that is no row", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7, 7], failed=[-1]))),
    ("a block that is none", InvalidResult, lambda s: s.commit(s.in_flight[0], StepResult(tokens=[7, 7], final=[0]))),
    ("no result", InvalidResult, lambda s: s.commit(s.in_flight[0], WRONG)),
    ("no plan", OutOfOrder, lambda s: s.commit(WRONG, StepResult(tokens=[]))),
    ("another scheduler's plan", OutOfOrder, lambda s: s.commit(busy().in_flight[0], StepResult(tokens=[7, 7]))),
    ("a rollback of another's plan", OutOfOrder, lambda s: s.rollback(busy().in_flight[0])),
)


@pytest.mark.parametrize(("error", "call"), [pytest.param(error, call, id=name) for name, error, call in MISTAKES])
def test_a_mistake_changes_nothing(error: type[Exception], call: Callable[[Scheduler], object]) -> None:
    sched = busy()
    if error is TooManyInFlight:
        sched.schedule()
        call_once: Callable[[Scheduler], object] = lambda s: s.schedule()  # noqa: E731 -- the third
    else:
        call_once = call
    before = state(sched)
    with pytest.raises(error):
        call_once(sched)
    assert state(sched) == before
    sched.check()
    while sched.in_flight:
        plan = sched.in_flight[0]
        sched.commit(plan, StepResult(tokens=[7] * len(plan)))
    drain(sched)
    assert sched.snapshot()["totals"]["emitted"] == 27


def test_plans_end_in_order_and_once() -> None:
    sched = busy()
    newest = sched.schedule()
    oldest = sched.in_flight[0]
    before = state(sched)
    for call in (lambda: sched.commit(newest, StepResult(tokens=[7] * len(newest))), lambda: sched.rollback(oldest)):
        with pytest.raises(OutOfOrder):
            call()
        assert state(sched) == before
    sched.commit(oldest, StepResult(tokens=[7] * len(oldest)))
    sched.rollback(newest)
    before = state(sched)
    for plan in (oldest, newest):
        with pytest.raises(OutOfOrder):
            sched.commit(plan, StepResult(tokens=[7] * len(plan)))
        with pytest.raises(OutOfOrder):
            sched.rollback(plan)
        assert state(sched) == before


@pytest.mark.parametrize(("fields", "named"), [
    ({"prompt": []}, "prompt"), ({"prompt": [[1, 2]]}, "prompt"), ({"prompt": [0.5]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"), ({"id": ""}, "id"), ({"id": 3}, "id"), ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"), ({"max_new_tokens": True}, "max_new_tokens"), ({"n": 0}, "n"), ({"n": True}, "n"),
    ({"priority": 0.5}, "priority"), ({"min_new_tokens": -1}, "min_new_tokens"), ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"block_tokens": 0}, "block_tokens"), ({"pin": -1}, "pin"), ({"ready": 1}, "ready"),
    ({"tenant": None}, "tenant"), ({"namespace": ("x",)}, "namespace"),
])
def test_c11_a_malformed_request_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Request(**{"id": "A", "prompt": [1, 2], **fields})


def test_c11_no_limit_is_not_zero() -> None:
    sched = make(2)
    sched.submit(request("none", 30, None))
    sched.submit(request("zero", 30, 0, first=9000))
    drain(sched)
    assert sched.snapshot()["totals"]["emitted"] == 3


def test_a_null_cache_is_no_cache() -> None:
    plain = make(cache=False)
    null = Scheduler(SchedulerConfig(page_size=16), PagePool(40, 16), NullCache(16))
    for sched in (plain, null):
        for key in "AB":
            sched.submit(request(key, 50, 9))
            drain(sched)
    assert state(plain) == state(null)


# --- properties of every plan -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=9),
       st.integers(6, 16), st.sampled_from([3, 16, 64]), st.sampled_from([1, 2, 5]))
def test_c80_a_plan_keeps_its_limits(loads: list[tuple[int, int, int]], pages: int, budget: int, places: int) -> None:
    sched = make(pages, 8, max_step_tokens=budget, max_running=places)
    for number, (prompt, new, share) in enumerate(loads):
        sched.submit(request(f"r{number}", prompt, new, first=share * 1000))
    for _ in range(3000):
        if not sched.has_work():
            break
        plan = sched.schedule()
        seen = sched.snapshot()
        assert plan.tokens <= budget
        assert len(seen["running"]) <= places
        assert all(chunk.length >= 1 for chunk in plan.prefill)
        for key in seen["running"]:
            one = sched.request_state(key)
            assert one["computed"] <= one["pages"] * 8
        sched.commit(plan, StepResult(tokens=np.full(len(plan), 5)))
        sched.check()
    assert not sched.has_work()
