"""Things move: law C3 in the form of docs/liveness.md, stalls that are named (F1), and gaps that are bounded (C4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from kvsched import PagePool, RadixCache, Scheduler, SchedulerConfig
from kvsched.plan import Plan, Status, StepResult
from kvsched.request import Finish, Request
from kvsched.testing import CheckedHost, drive
from kvsched.testing.driver import random_call, random_setup
from kvsched.units import pages_for


def step(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult(np.ones(len(plan), np.int64)))
    return plan


def state(scheduler: Scheduler, name: str) -> dict[str, object]:
    return dict(scheduler.snapshot()["requests"][name])


# -- C3: from every reachable state some request runs to its end ---------------------------------------------------------


def bound(host: CheckedHost) -> int:
    """Steps within which one of the live requests must end, from sizes alone.

    Every step moves somebody (the model sees to that), a retraction is followed by progress of those that stay (C27), and the
    oldest of the best priority is never a victim (C2). So its prefill and its tokens, each step shared with all others and every
    other step given to a prefill grant, bound the time; a block takes up to three passes.
    """
    config = host.model.config
    chunk = min(config.max_step_tokens, config.chunk_tokens or config.max_step_tokens, config.long_prefill_tokens or config.max_step_tokens)
    work = sum(pages_for(a.prompt + a.limit, chunk) + 3 * a.limit for a in host.model.accounts.values())
    return 20 + 2 * work * (1 + len(host.model.accounts))


@pytest.mark.parametrize("first", range(40_000, 40_600, 60))
def test_from_any_reachable_state_some_request_completes(first: int) -> None:
    judged = 0
    for seed in range(first, first + 12):
        rng = Random(seed)
        host = CheckedHost(**random_setup(rng))
        texts: list[list[int]] = []
        for _ in range(rng.randint(5, 50)):
            name, arguments = random_call(rng, host, texts)
            getattr(host, name)(**arguments)
        for held in list(host.holds):  # what the law assumes: holds are released in the end, and the host says ready and resumes
            host.release(held)
        host.resume()
        for name in list(host.model.accounts):
            host.ready(name)
        if not host.model.accounts:
            continue
        judged += 1
        ended, left = sum(host.model.ended.values()), bound(host)
        while sum(host.model.ended.values()) == ended:
            assert left > 0, f"seed {seed}: nothing ended; {host.state}"
            left -= 1
            host.schedule()
            host.commit()
    assert judged > 3


# -- guaranteed admission never retracts for memory ----------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 2])
def test_guaranteed_admission_never_retracts_for_memory(lookahead: int) -> None:
    tally = drive(50_000, 3_000, settings={"admission": "guaranteed", "preempt_priority": False, "lookahead_tokens": lookahead,
                                           "max_step_tokens": 8})
    assert tally.finished > 150  # the model refuses a plan that retracts; pauses may


def test_a_working_set_of_one_and_a_half_pools() -> None:
    """C37: guaranteed mode retracts nobody, expected mode retracts and completes all with every token."""
    rng = Random(7)
    sizes = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(60)]
    for admission in ("guaranteed", "expected"):
        scheduler = Scheduler(SchedulerConfig(page_size=4, admission=admission), PagePool(100, 4))
        for i, (prompt, new) in enumerate(sizes):
            assert scheduler.submit(Request(f"r{i}", [rng.randrange(99) for _ in range(prompt)], new))
        while scheduler.has_work():
            assert step(scheduler)
        totals = scheduler.snapshot()["totals"]
        assert totals["emitted"] == sum(new for _, new in sizes)
        assert totals["finished"] == len(sizes)
        assert (totals["retractions"] == 0) == (admission == "guaranteed")
        assert (totals["recomputed_tokens"] == 0) == (admission == "guaranteed")


@pytest.mark.parametrize("cached", [False, True])
def test_retractions_are_few(cached: bool) -> None:
    """C27: under random loads the retractions are bounded by the requests, and the oldest never loses progress."""
    for seed in range(12):
        rng = Random(seed)
        config = SchedulerConfig(page_size=2, conservativeness=0.1)
        scheduler = Scheduler(config, PagePool(40, 2), RadixCache(2) if cached else None)
        count = 25
        for i in range(count):
            scheduler.submit(Request(f"r{i}", [rng.randrange(3) for _ in range(rng.randint(1, 30))], rng.randint(1, 45)))
        best = (-1, "")
        while scheduler.has_work():
            plan = step(scheduler)
            live = scheduler.snapshot()["requests"]
            oldest = min(live, key=lambda name: int(name[1:]), default="")
            assert oldest not in plan.retracted
            if oldest and best[1] == oldest:
                assert live[oldest]["generated"] >= best[0]
            best = (live[oldest]["generated"], oldest) if oldest else best
        assert scheduler.snapshot()["totals"]["retractions"] <= 2 * count


# -- F1 (C76): stalled means that work exists and nothing moves -----------------------------------------------------------


def blocked(k: int = 6) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(page_size=2, stall_steps=k), PagePool(8, 2))
    scheduler.hold_pages("elsewhere", 8)
    scheduler.submit(Request("a", [1, 2, 3], 4))
    return scheduler


def test_idle_is_healthy_for_any_time() -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=2, stall_steps=3), PagePool(8, 2))
    for _ in range(20):
        assert step(scheduler).status is Status.IDLE
        assert not scheduler.stalled


def test_stalled_after_k_steps_and_not_before() -> None:
    scheduler = blocked(6)
    seen = []
    for _ in range(8):
        assert step(scheduler).status is Status.BLOCKED
        seen.append(scheduler.stalled)
    assert seen == [False] * 5 + [True] * 3
    reason = scheduler.explain("a").reason
    assert reason is not None
    assert reason.value == "pinned_pages"
    scheduler.release_pages("elsewhere")
    step(scheduler)
    assert not scheduler.stalled
    while scheduler.has_work():
        step(scheduler)
    assert not scheduler.stalled


def test_attempts_probes_and_new_arrivals_are_no_progress() -> None:
    scheduler = blocked(6)
    for i in range(8):
        plan = scheduler.schedule()
        scheduler.rollback(plan)  # an attempt
        scheduler.submit(Request(f"probe{i}", [1], 1))
        scheduler.snapshot()
        step(scheduler)
    assert scheduler.stalled


def test_admission_and_recomputing_are_no_progress() -> None:
    """A request that is retracted and computed anew, for ever, moves nothing, however busy it looks."""
    scheduler = Scheduler(SchedulerConfig(page_size=1, chunk_tokens=2, stall_steps=8), PagePool(40, 1))
    scheduler.submit(Request("a", list(range(12)), 4))
    for _ in range(3):
        step(scheduler)  # six tokens: the high-water mark
    busy = []
    for _ in range(6):
        scheduler.pause("retract")
        scheduler.resume()
        busy += [bool(step(scheduler)), bool(step(scheduler))]
    assert all(busy)
    assert scheduler.stalled
    for _ in range(2):
        step(scheduler)  # on from 4 to 8: new ground
    assert not scheduler.stalled


def test_a_long_prefill_and_a_full_queue_are_live() -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=1, chunk_tokens=1, stall_steps=3, max_running=1, max_queued_requests=2), PagePool(80, 1))
    scheduler.submit(Request("a", list(range(60)), 1))
    step(scheduler)
    for name in "bc":
        assert scheduler.submit(Request(name, [1], 1))
    assert not scheduler.submit(Request("d", [1], 1))
    while scheduler.has_work():
        step(scheduler)
        assert not scheduler.stalled


def test_every_request_that_gets_nothing_has_a_reason() -> None:
    for seed in range(60_000, 60_040):
        rng = Random(seed)
        host = CheckedHost(**random_setup(rng))
        texts: list[list[int]] = []
        for _ in range(40):
            name, arguments = random_call(rng, host, texts)
            getattr(host, name)(**arguments)
            if name != "schedule" or not host.in_flight:
                continue
            plan, listed = host.in_flight[-1].plan, host.state["requests"]
            for one, entry in listed.items():
                in_flight = any(one in entry.plan.ids for entry in host.in_flight)
                if one in plan.ids or in_flight or one in plan.retracted:
                    continue
                assert entry["wait_reason"] is not None, f"seed {seed}, step {plan.step}: {one} waits without a reason; {host.state}"


# -- C4: bounds in steps ---------------------------------------------------------------------------------------------------


def gaps(steps: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(steps))


def served(scheduler: Scheduler, name: str, limit: int = 3_000) -> list[int]:
    """The steps in which a request got something, until it ends."""
    out = []
    for _ in range(limit):
        plan = step(scheduler)
        if name in plan.ids:
            out.append(plan.step)
        if name not in scheduler.snapshot()["requests"]:
            break
    return out


@pytest.mark.parametrize(("running", "budget"), [(7, 2), (9, 4), (5, 5), (6, 1)])
def test_decodes_beyond_the_budget_take_turns(running: int, budget: int) -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=4, max_step_tokens=budget, admission="guaranteed", prefill_grant=2), PagePool(400, 4))
    for i in range(running):
        scheduler.submit(Request(f"r{i}", [i], 60))
    while len(scheduler.snapshot()["running"]) < running:
        step(scheduler)
    scheduler.set_limits(max_running=running)
    for _ in range(3 * running):
        step(scheduler)
    rounds: dict[str, list[int]] = {f"r{i}": [] for i in range(running)}
    for _ in range(10 * running):
        plan = step(scheduler)
        for name in plan.decode_ids:
            rounds[name].append(plan.step)
    for seen in rounds.values():
        assert gaps(seen) <= -(-running // budget)


def test_a_decode_beside_a_long_prefill_gets_a_token_in_every_step() -> None:
    """C42: budget 16,384, a prompt of 600,104 tokens is 37 chunks; the decode's gap is one step."""
    scheduler = Scheduler(SchedulerConfig(page_size=64, max_step_tokens=16_384, admission="guaranteed"), PagePool(20_000, 64))
    scheduler.submit(Request("d", [1], 200))
    step(scheduler)
    scheduler.submit(Request("long", np.zeros(600_104, np.int32), 1))
    chunks = tokens = 0
    while "long" in scheduler.snapshot()["requests"]:
        plan = step(scheduler)
        chunks += len(plan.prefill)
        tokens += "d" in plan.decode_ids
    assert chunks == 37
    assert tokens == 37
    assert scheduler.snapshot()["max_gap"]["d"] == 1


@pytest.mark.parametrize("every", [2, 3, 5])
def test_decode_every_bounds_the_gap_under_endless_prefill(every: int) -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=4, max_step_tokens=16, decode_every=every, admission="guaranteed"), PagePool(4000, 4))
    scheduler.submit(Request("d", [1], 50))
    step(scheduler)
    for i in range(40):
        scheduler.submit(Request(f"p{i}", [i] * 64, 1))
    seen = served(scheduler, "d")
    assert gaps(seen) == every


def test_a_prefill_grant_bounds_the_wait_of_a_prefill() -> None:
    """C43: grant 8, a prompt of 14 chunks beside decodes that take the whole budget: its first token within 14 x 8 steps."""
    scheduler = Scheduler(SchedulerConfig(page_size=4, max_step_tokens=4, prefill_grant=8, admission="guaranteed"), PagePool(4000, 4))
    for i in range(4):
        scheduler.submit(Request(f"d{i}", [i], 1000))
        step(scheduler)
    scheduler.submit(Request("p", [9] * 56, 2))
    seen = served(scheduler, "p")
    assert len(seen) == 15
    assert gaps(seen) <= 8
    assert seen[13] - 4 <= 14 * 8
    assert max(scheduler.snapshot()["max_gap"].values()) <= 2


def test_a_short_prompt_is_not_stuck_behind_long_ones() -> None:
    """C43: three prompts of 500,000 tokens and one of 100, with a long-prefill cap: it has its token within two steps."""
    config = SchedulerConfig(page_size=64, max_step_tokens=8192, chunk_tokens=8192, long_prefill_tokens=2000, admission="guaranteed")
    scheduler = Scheduler(config, PagePool(30_000, 64))
    for i in range(3):
        scheduler.submit(Request(f"long{i}", np.full(500_000, i, np.int32), 1))
    step(scheduler)
    scheduler.submit(Request("short", [7] * 100, 1))
    assert served(scheduler, "short")[-1] <= 3


def test_a_request_that_waits_for_the_host_holds_nothing_and_blocks_nobody() -> None:
    """C45: promotion costs no tokens and happens while a hog takes the whole budget."""
    config = SchedulerConfig(page_size=4, max_step_tokens=8, max_running=2, admission="guaranteed")
    scheduler = Scheduler(config, PagePool(100, 4))
    scheduler.submit(Request("grammar", [1], 1, ready=False))
    scheduler.submit(Request("hog", [2] * 80, 1))
    scheduler.submit(Request("w", [3], 1))
    step(scheduler)
    assert state(scheduler, "grammar")["wait_reason"] == "host"
    assert state(scheduler, "grammar")["pages"] == 0
    assert scheduler.mark_ready("grammar")
    while scheduler.has_work():
        step(scheduler)
    assert scheduler.snapshot()["totals"]["finished"] == 3


def test_nothing_waits_for_a_token_that_never_comes() -> None:
    """N = 0, N = 1 and a stop in the first token end at once, and their places are free in the next step."""
    scheduler = Scheduler(SchedulerConfig(page_size=4, max_running=1), PagePool(20, 4))
    scheduler.submit(Request("zero", [1, 2], 0))
    scheduler.submit(Request("one", [1, 2], 1))
    scheduler.submit(Request("stop", [1, 2], 9, stop_token_ids={1}))
    ends = []
    for _ in range(3):
        plan = scheduler.schedule()
        outcome = scheduler.commit(plan, StepResult(np.ones(len(plan), np.int64)))
        ends += [(e.id, e.finish, e.generated) for e in outcome.ended]
    assert ends == [("zero", Finish.LENGTH, 0), ("one", Finish.LENGTH, 1), ("stop", Finish.STOP, 1)]
    assert not scheduler.has_work()
