"""Laws B6, B7 and B11: the commitment ledger and what happens without it, queue bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from loop import ask, chunks, drain, make, pages, running, step, submit, totals, until, why

from kvsched import RefusalReason, Refused, Scheduler, Status, StepResult
from kvsched.admission.ledger import CommitmentLedger
from kvsched.errors import InternalError

# -- B6 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ask_for", "admitted"), [(20_000, ("B",)), (20_001, ())])
def test_b6_committed_prefill_is_not_free(ask_for: int, admitted: tuple[str, ...]) -> None:
    """100,000 tokens free, 80,000 committed to a resident and not yet spent: the next step sees 20,000."""
    sched = make(101_000, chunk_tokens=1000)
    submit(sched, ask("A", 81_000, 1))
    step(sched)
    assert pages(sched)[0] == 100_000
    assert sched.snapshot()["outstanding"] == 80_000
    submit(sched, ask("B", ask_for, 1))
    assert sched.schedule().admitted == admitted
    if not admitted:
        assert why(sched, "B") == ("commitment", 1)


def test_b6_spending_returns_the_budget_step_by_step_and_release_whole() -> None:
    sched = make(1000, chunk_tokens=100)
    submit(sched, ask("A", 800, 1))
    seen = []
    for _ in range(4):
        step(sched)
        seen.append((sched.snapshot()["outstanding"], pages(sched)[0] - sched.snapshot()["reserved"]))
    assert seen == [(700, 200), (600, 200), (500, 200), (400, 200)]  # what is spent is held: what can be promised stays
    sched.abort("A")
    assert (sched.snapshot()["outstanding"], pages(sched)[0] - sched.snapshot()["reserved"]) == (0, 1000)


def test_b6_the_ledger_goes_by_request_and_not_by_batch() -> None:
    """B's entry stays while a step has no room for B."""
    sched = make(100, chunk_tokens=10, max_step_tokens=20)
    submit(sched, ask("A", 40, 1), ask("B", 40, 1))
    step(sched)
    sched.set_limits(max_step_tokens=10)
    assert chunks(step(sched)) == [("A", 10, 10)]
    assert sched.snapshot()["outstanding"] == 20 + 30


def test_b6_retraction_releases_and_readmission_commits_anew() -> None:
    sched = make(100, chunk_tokens=10)
    submit(sched, ask("A", 40, 1))
    step(sched, 2)
    sched.pause("retract")
    assert sched.snapshot()["outstanding"] == 0
    sched.resume()
    step(sched)
    assert sched.snapshot()["outstanding"] == 30


def test_b6_rollback_gives_back_what_was_spent() -> None:
    sched = make(100, chunk_tokens=10)
    submit(sched, ask("A", 40, 1))
    step(sched)
    sched.rollback(sched.schedule())
    assert sched.snapshot()["outstanding"] == 30
    sched.check()


def test_b6_double_commit_and_overspend_are_refused() -> None:
    ledger = CommitmentLedger()
    ledger.commit("a", 10)
    calls: list[Callable[[], object]] = [
        lambda: ledger.commit("a", 1), lambda: ledger.commit("b", -1),
        lambda: ledger.spend("a", 11), lambda: ledger.spend("a", -1), lambda: ledger.spend("b", 0),
    ]
    for refused in calls:
        with pytest.raises(InternalError):
            refused()
        assert (ledger.owed("a"), ledger.owed("b"), ledger.outstanding, ledger.chunks) == (10, 0, 10, 0)


def test_b6_the_count_of_chunks_only_rises() -> None:
    ledger = CommitmentLedger()
    ledger.commit("a", 10)
    ledger.spend("a", 4)
    ledger.spend("a", 6)
    assert ledger.release("a") == 0
    assert ledger.chunks == 2
    ledger.commit("a", 5)
    ledger.spend("a", 5)
    ledger.unspend("a", 5)
    assert (ledger.chunks, ledger.release("a"), ledger.outstanding) == (3, 5, 0)


# -- B7 ---------------------------------------------------------------------------------------------------------------


def _two_that_fit_alone(chunk: int, ledger: CommitmentLedger) -> Scheduler:
    sched = make(100, chunk_tokens=chunk, ledger=ledger, stall_steps=10)
    submit(sched, ask("A", 80, 1), ask("B", 80, 1))
    return sched


@pytest.mark.parametrize("chunk", [2, 5, 10])
def test_b7_without_the_ledger_two_requests_deadlock(chunk: int) -> None:
    """Each locks its prefix chunk by chunk, and neither can give any of it up. A bigger chunk changes nothing."""
    sched = _two_that_fit_alone(chunk, CommitmentLedger(enforced=False))
    plan = until(sched, lambda plan: not plan)
    assert running(sched) == ["A", "B"]
    assert pages(sched) == (0, 0, 0, 100, 0)
    assert totals(sched, "prefill_tokens") == 100  # it looks like a hang and not like a refusal: all of the pool is progress
    assert plan.status is Status.BLOCKED
    step(sched, 10)
    assert sched.stalled
    assert totals(sched, "finished") == 0


@pytest.mark.parametrize("chunk", [2, 5, 10])
def test_b7_with_the_ledger_they_take_turns(chunk: int) -> None:
    sched = _two_that_fit_alone(chunk, CommitmentLedger())
    step(sched)
    assert running(sched) == ["A"]
    assert why(sched, "B") == ("commitment", 60)  # 80 against 100 - 80
    assert drain(sched, 80) == 2 * (80 // chunk) - 1
    assert totals(sched, "retractions") == 0


# -- B11 --------------------------------------------------------------------------------------------------------------


def test_b11_bounds_by_requests_and_by_tokens() -> None:
    """Case C12: four places, 1,000 tokens."""
    sched = make(5000, max_queued_requests=4, max_queued_tokens=1000)
    submit(sched, ask("A", 400, 1), ask("B", 200, 1), ask("C", 300, 1))
    before = sched.snapshot()
    assert sched.submit(ask("D", 10, 1, n=2)) == Refused("D", RefusalReason.QUEUE_REQUESTS, 2, 1, retryable=True)
    assert sched.submit(ask("E", 101, 1)) == Refused("E", RefusalReason.QUEUE_TOKENS, 101, 100, retryable=True)
    assert sched.submit(ask("F", 10, 1, n=5)) == Refused("F", RefusalReason.QUEUE_REQUESTS, 5, 1, retryable=False)
    assert sched.submit(ask("G", 1001, 1)) == Refused("G", RefusalReason.QUEUE_TOKENS, 1001, 100, retryable=False)
    assert sched.submit(ask("H", 6000, 1)) == Refused("H", RefusalReason.NEVER_FITS, 6000, 5000, retryable=False)
    assert sched.snapshot() == before
    sched.set_limits(max_step_tokens=400)
    step(sched)  # A leaves the queue
    submit(sched, ask("E", 101, 1))


def test_b11_n_counts_with_its_prompt_n_times() -> None:
    sched = make(1000, max_queued_tokens=100)
    assert sched.submit(ask("A", 40, 1, n=3)) == Refused("A", RefusalReason.QUEUE_TOKENS, 120, 100, retryable=False)
    submit(sched, ask("A", 40, 1, n=2))
    assert sched.submit(ask("B", 21, 1)) == Refused("B", RefusalReason.QUEUE_TOKENS, 21, 20, retryable=True)


def test_b11_the_prompt_count_in_flight_falls_with_computed_tokens_and_hits() -> None:
    sched = make(1000, 4, cache=True, chunk_tokens=20, max_inflight_prompt_tokens=100)
    submit(sched, ask("A", 80, 1, first=0))

    def left() -> int:
        refused = sched.submit(ask("probe", 101, 1))
        assert isinstance(refused, Refused)
        assert refused.reason is RefusalReason.INFLIGHT_TOKENS
        return refused.available

    seen = [left()]
    for _ in range(4):
        step(sched)
        seen.append(left())
    assert seen == [20, 40, 60, 80, 100]
    submit(sched, ask("B", 100, 1, first=0))  # 80 of its tokens are cached
    assert left() == 0
    plan = sched.schedule()
    assert left() == 80  # hits count at once, what is computed at its commit
    sched.commit(plan, StepResult(tokens=[7]))
    assert left() == 100


def test_b11_a_retracted_request_is_charged_nothing_again() -> None:
    sched = make(100, max_queued_requests=1, max_queued_tokens=50, max_inflight_prompt_tokens=60)
    submit(sched, ask("A", 50, 5))
    step(sched, 2)
    sched.pause("retract")
    submit(sched, ask("B", 50, 5))  # A is in the queue, and in none of the three counts
    sched.abort("B")
    sched.resume()
    step(sched)
    assert sched.request_state("A")["status"] == "running"
    submit(sched, ask("B", 50, 5))


def test_b11_rollback_charges_the_queue_as_before() -> None:
    sched = make(100, max_queued_requests=1, max_inflight_prompt_tokens=60)
    submit(sched, ask("A", 50, 5))
    plan = sched.schedule()
    submit(sched, ask("B", 10, 1))
    sched.abort("B")
    sched.rollback(plan)
    assert sched.submit(ask("B", 10, 1)) == Refused("B", RefusalReason.QUEUE_REQUESTS, 1, 0, retryable=True)
    sched.commit(sched.schedule(), StepResult(tokens=[7]))
    submit(sched, ask("C", 60, 1))  # A's 50 are computed now, and it is a resident


def test_b11_priority_orders_the_queue_only_under_its_order() -> None:
    for order, first in (("fcfs", "A"), ("priority", "B")):
        sched = make(100, max_running=1, order=order)
        submit(sched, ask("A", 5, 2, priority=1), ask("B", 5, 2, priority=0))
        assert step(sched).admitted == (first,)
