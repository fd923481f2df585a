"""Calls of a host between two steps: a late stop, what a hold gives, who was stopped."""

from __future__ import annotations

import pickle

from kvsched import Condition, Finish, PagePool, RadixCache, Request, Scheduler, SchedulerConfig, StepResult


def make(pages: int = 40) -> Scheduler:
    return Scheduler(SchedulerConfig(page_size=4, stall_steps=5), PagePool(pages, 4), RadixCache(4))


def steps(sched: Scheduler, count: int) -> None:
    for _ in range(count):
        plan = sched.schedule()
        sched.commit(plan, StepResult([7] * len(plan)))


def test_a_stop_that_the_host_finds_late_keeps_what_was_computed() -> None:
    """4 + 20 tokens, of which the last is not written: 23 slots, five whole pages stay; an abort keeps the prompt's only."""
    sched = make()
    sched.submit(Request("a", [1] * 4, max_new_tokens=30))
    steps(sched, 20)
    (end,) = sched.finish("a")
    assert (end.id, end.finish, end.generated) == ("a", Finish.STOP, 20)
    assert sched.snapshot()["cached"] == 5
    assert sched.finish("a") == ()
    sched.submit(Request("b", [2] * 4, max_new_tokens=30))
    steps(sched, 20)
    assert sched.abort("b")
    assert sched.snapshot()["cached"] == 6
    sched.check()


def test_a_late_stop_with_a_step_in_flight_waits_for_it() -> None:
    sched = make()
    sched.submit(Request("a", [1] * 4, max_new_tokens=30))
    steps(sched, 3)
    plan = sched.schedule()
    assert len(sched.finish("a")) == 1
    assert sched.snapshot()["quarantined"] > 0
    outcome = sched.commit(plan, StepResult([7]))
    assert outcome.tokens.tolist() == [-1]
    assert sched.snapshot()["quarantined"] == 0
    sched.check()


def test_a_late_stop_of_a_parent_ends_every_child() -> None:
    sched = make()
    sched.submit(Request("a", [1] * 4, max_new_tokens=30, n=3))
    steps(sched, 2)
    assert sorted(end.id for end in sched.finish("a")) == ["a/0", "a/1", "a/2"]
    assert not sched.has_work()


def test_a_hold_says_which_pages_it_took() -> None:
    sched = make()
    pages = sched.hold_pages("lease", 3)
    assert len(set(pages.tolist())) == 3
    sched.submit(Request("a", [1] * 10, max_new_tokens=9))
    plan = sched.schedule()
    assert not set(plan.deltas.page.tolist()) & set(pages.tolist())
    own = sched.hold_pages("a", 3)
    assert own.tolist() == sched.block_table[plan.rows[0], :3].tolist()


def test_pause_and_abort_all_say_whom_they_met() -> None:
    sched = make()
    for name in "ab":
        sched.submit(Request(name, [1] * 4, max_new_tokens=9))
    steps(sched, 1)
    assert sched.pause("hold") == ("a", "b")
    assert sched.pause("hold") == ()
    assert sched.pause("retract") == ("a", "b")
    sched.resume()
    assert sched.abort_all() == ("a", "b")


def test_a_plan_can_be_sent_to_another_process() -> None:
    sched = make()
    for name in "ab":
        sched.submit(Request(name, [1] * 9, max_new_tokens=9))
    steps(sched, 1)
    plan = sched.schedule()
    copy = pickle.loads(pickle.dumps(plan))
    assert (copy.digest, copy.ids) == (plan.digest, plan.ids) == (plan.digest, ("a", "b"))


def test_plans_that_are_never_committed_are_a_retry_loop() -> None:
    """F1: attempts that rise with no commit are named so."""
    sched = make()
    assert sched.health().condition is Condition.IDLE
    sched.submit(Request("a", [1] * 4, max_new_tokens=9))
    for _ in range(5):
        assert sched.health().condition is Condition.LIVE
        sched.rollback(sched.schedule())
    assert sched.health().condition is Condition.RETRY_LOOP
    steps(sched, 1)
    health = sched.health()
    assert (health.condition, health.running, health.waiting, health.attempts) == (Condition.LIVE, 1, 0, 6)


def test_buckets_and_counts_are_had_without_a_snapshot() -> None:
    sched = Scheduler(SchedulerConfig(page_size=4), PagePool(16, 4), RadixCache(4))
    sched.submit(Request("a", range(9), max_new_tokens=2))
    sched.commit(sched.schedule(), StepResult(tokens=[5]))
    state = sched.snapshot()
    assert sched.occupancy == {key: state[key] for key in ("usable", "free", "cached", "locked", "private", "quarantined")}
    assert sched.occupancy == {"usable": 16, "free": 13, "cached": 0, "locked": 2, "private": 1, "quarantined": 0}
    assert sched.totals == state["totals"]
    sched.totals["steps"] = 99  # a copy
    assert sched.totals["steps"] == 1
