"""Law F1: what counts as progress, what as a stall, and that whoever waits can say why."""

from __future__ import annotations

import pytest
from loop import ask, make, running, step, submit, waiting, why

from kvsched import Condition, Scheduler, Status, StepResult


def blocked(stall_steps: int = 5) -> Scheduler:
    """One request, and no page for it until the host gives some back."""
    sched = make(10, stall_steps=stall_steps, conservativeness=0)
    sched.hold_pages("lease", 8)
    submit(sched, ask("A", 4, 3))
    return sched


def test_f1_stalled_after_so_many_steps_without_progress() -> None:
    sched = blocked()
    seen = []
    for _ in range(7):
        step(sched)
        seen.append(sched.stalled)
    assert seen == [False] * 4 + [True] * 3
    assert sched.snapshot()["stalled"] is True
    sched.release_pages("lease")
    assert sched.stalled  # nothing has moved yet
    step(sched)
    assert not sched.stalled


def test_f1_asking_does_not_reset_it() -> None:
    sched = blocked()
    for _ in range(5):
        step(sched)
        assert sched.explain("A").short_by == 2
        sched.snapshot()
        sched.check()
        assert sched.has_work()
    assert sched.stalled


def test_f1_a_request_that_comes_in_is_no_progress() -> None:
    sched = blocked()
    for at in range(5):
        step(sched)
        submit(sched, ask(f"B{at}", 4, 1))
    assert sched.stalled


@pytest.mark.parametrize("signal", ["token", "chunk"])
def test_f1_tokens_and_chunks_are_progress(signal: str) -> None:
    sched = make(200, stall_steps=2, chunk_tokens=3, max_running=1)
    submit(sched, ask("A", 90, 90))
    if signal == "token":
        step(sched, 30)
    for _ in range(20):
        plan = step(sched)
        assert (plan.decodes, len(plan.prefill)) == ((1, 0) if signal == "token" else (0, 1))
        assert not sched.stalled


def test_f1_clients_that_give_up_are_no_progress() -> None:
    """Nothing is finished and nothing computed, however many aborts there are (case C76)."""
    sched = blocked()
    for at in range(5):
        submit(sched, ask(f"B{at}", 4, 1))
        step(sched)
        sched.abort(f"B{at}")
    assert sched.stalled


def test_f1_what_is_computed_again_is_no_progress() -> None:
    """A is admitted in every step, computes its first five tokens, and is sent back: attempts, admissions, no progress."""
    sched = make(100, stall_steps=6, chunk_tokens=5)
    submit(sched, ask("A", 20, 2))
    seen = []
    for _ in range(8):
        plan = step(sched)
        assert plan.admitted == ("A",)
        seen.append(sched.stalled)
        sched.pause("retract")
        sched.resume()
    assert seen == [False] * 6 + [True] * 2
    step(sched)
    step(sched)  # five more than ever before
    assert not sched.stalled


def test_f1_a_commit_with_nothing_new_is_no_progress() -> None:
    """A block that does not become final is computed in every step, and nothing comes of it."""
    sched = make(100, stall_steps=5)
    submit(sched, ask("A", 4, 9, block_tokens=4))
    step(sched)
    for count in range(1, 8):
        plan = sched.schedule()
        assert plan.counts.tolist() == [4]
        sched.commit(plan, StepResult(tokens=[[1, 2, 3, 4]]))
        assert sched.stalled is (count >= 5)


def test_f1_idle_is_healthy_for_ever() -> None:
    sched = make(10, stall_steps=3)
    for _ in range(10):
        assert step(sched).status is Status.IDLE
        assert not sched.stalled
    submit(sched, ask("A", 4, 1))
    assert not sched.stalled  # it came just now
    sched.hold_pages("lease", 10)
    step(sched, 2)
    assert not sched.stalled
    step(sched)
    assert sched.stalled


def test_f1_a_full_queue_with_tokens_flowing_is_live() -> None:
    sched = make(100, stall_steps=3, max_running=1, max_queued_requests=2)
    submit(sched, ask("A", 4, 60))
    step(sched)
    submit(sched, ask("B", 4, 1), ask("C", 4, 1))
    assert not sched.submit(ask("D", 4, 1))
    step(sched, 30)
    assert not sched.stalled
    assert waiting(sched) == ["B", "C"]


def test_f1_whoever_waits_can_say_why() -> None:
    """A waits for the host, B for pages, C behind B; D runs; then everybody is paused."""
    sched = make(20, max_in_flight=2)
    submit(sched, ask("A", 4, 1, ready=False), ask("D", 10, 9), ask("B", 12, 1), ask("C", 4, 1))
    step(sched)
    assert running(sched) == ["D"]
    assert {key: why(sched, key) for key in "ABC"} == {"A": ("host", None), "B": ("pages", 3), "C": ("head_of_line", None)}
    sched.pause("hold")
    step(sched)
    assert {why(sched, key)[0] for key in "ABCD"} == {"paused"}
    assert sched.snapshot()["requests"]["D"]["status"] == "paused"


def test_f1_signals_only_rise() -> None:
    """Attempts, committed chunks, decode steps and completions: no rollback, retraction or abort takes one back."""
    sched = make(100, chunk_tokens=5)

    def signals() -> tuple[int, int, int, int]:
        health = sched.health()
        return health.attempts, health.chunks, health.decode_steps, health.completions

    submit(sched, ask("A", 10, 5), ask("B", 10, 1))
    assert signals() == (0, 0, 0, 0)
    step(sched, 2)
    assert signals() == (2, 4, 0, 1)
    sched.rollback(sched.schedule())
    assert signals() == (3, 4, 0, 1)
    step(sched)
    assert signals() == (4, 4, 1, 1)
    sched.pause("retract")
    sched.resume()
    plan = sched.schedule()
    assert signals() == (5, 4, 1, 1)
    sched.rollback(plan)
    assert signals() == (5, 4, 1, 1)
    sched.abort("A")
    assert signals() == (5, 4, 1, 1)  # who gives up has completed nothing


def test_f1_plans_that_are_never_committed_are_a_retry_loop() -> None:
    sched = make(100, stall_steps=5)
    submit(sched, ask("A", 10, 5))
    seen = []
    for _ in range(6):
        sched.rollback(sched.schedule())
        seen.append(sched.health().condition)
    assert seen == [Condition.LIVE] * 4 + [Condition.RETRY_LOOP] * 2
    step(sched)
    assert sched.health().condition is Condition.LIVE


def test_f1_the_word_for_it() -> None:
    """Idle and ready; live though the queue is full; stalled, and still for so many steps; live again."""
    sched = make(10, stall_steps=3, conservativeness=0, max_queued_requests=1)

    def word() -> tuple[Condition, bool, int]:
        health = sched.health()
        return health.condition, health.ready, health.still_steps

    assert word() == (Condition.IDLE, True, 0)
    submit(sched, ask("A", 4, 6))
    assert word() == (Condition.LIVE, False, 0)
    step(sched)
    assert word() == (Condition.LIVE, True, 0)
    submit(sched, ask("B", 9, 1))
    step(sched, 3)
    assert word() == (Condition.LIVE, False, 0)
    sched.pause("hold")
    step(sched, 2)
    assert word() == (Condition.LIVE, False, 2)
    step(sched)
    assert word() == (Condition.STALLED, False, 3)
    sched.resume()
    step(sched)
    assert word() == (Condition.LIVE, False, 0)
