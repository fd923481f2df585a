"""Laws B6 to B11: the commitment ledger and what happens without it, heads and who may pass them, queue bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop import advance, ask, chunks, drain, make, pages, running, step, submit, totals, until, waiting, why

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


# -- B8 ---------------------------------------------------------------------------------------------------------------


def test_b8_a_deferred_head_is_pending_work() -> None:
    sched = make(10, stall_steps=4)
    sched.hold_pages("lease", 6)
    submit(sched, ask("A", 5, 1))
    for age in (1, 2, 3, 4):
        plan = step(sched)
        assert plan.status is Status.BLOCKED  # and not idle
        assert sched.has_work()
        state = sched.request_state("A")
        assert (state["wait_reason"], state["short_by"], state["waited_steps"]) == ("pinned_pages", 1, age)
        told = sched.explain("A")
        assert (told.short_by, told.waited_steps, told.since_step) == (1, age, 1)
    assert sched.stalled
    sched.release_pages("lease")
    assert step(sched).status is Status.RUN
    assert sched.schedule().status is Status.IDLE
    assert not sched.stalled


def test_b8_age_counts_over_all_stays_in_the_queue() -> None:
    sched = make(20, max_running=1)
    submit(sched, ask("A", 5, 3), ask("B", 5, 5))
    step(sched, 3)
    assert sched.explain("B").waited_steps == 3
    step(sched)
    assert running(sched) == ["B"]
    sched.pause("retract")
    sched.resume()
    sched.hold_pages("lease", 20)
    assert sched.explain("B").since_step is None  # nobody has deferred it in this stay
    step(sched, 2)
    told = sched.explain("B")
    assert (told.waited_steps, told.since_step) == (5, 5)


# -- B9 ---------------------------------------------------------------------------------------------------------------


def test_b9_a_resident_in_no_batch_is_a_resident() -> None:
    """B is between two chunks and the step has no tokens for it: the second place is taken all the same."""
    sched = make(100, chunk_tokens=5, max_running=2, max_step_tokens=10)
    submit(sched, ask("A", 20, 1), ask("B", 20, 1))
    step(sched)
    sched.set_limits(max_step_tokens=5)
    submit(sched, ask("C", 5, 1))
    plan = step(sched)
    assert plan.ids == ("A",)
    assert running(sched) == ["A", "B"]
    assert why(sched, "B") == ("step_tokens", None)
    assert why(sched, "C") == ("running_limit", 1)
    sched.set_limits(max_step_tokens=100)
    assert step(sched).ids == ("A", "B")
    assert running(sched) == ["A", "B"]


def test_b9_a_resident_in_no_batch_keeps_its_place() -> None:
    """R's last token is in flight: the next plan names nobody, and R's place is not C's before its commit."""
    sched = make(100, max_in_flight=2, max_running=1)
    submit(sched, ask("R", 5, 1), ask("C", 5, 1))
    one, two = sched.schedule(), sched.schedule()
    assert (one.ids, two.ids) == (("R",), ())
    assert why(sched, "C") == ("running_limit", 1)
    sched.commit(one, StepResult(tokens=[7]))
    sched.commit(two, StepResult(tokens=[]))
    assert step(sched).admitted == ("C",)


def test_b9_a_resident_in_no_batch_keeps_its_adapter_and_its_promise() -> None:
    sched = make(60, chunk_tokens=5, max_adapters=1, max_step_tokens=5)
    submit(sched, ask("A", 20, 1, adapter="a"), ask("B", 20, 1, adapter="a"))
    step(sched)
    sched.set_limits(max_step_tokens=15)
    step(sched)
    assert running(sched) == ["A", "B"]
    sched.set_limits(max_step_tokens=5)
    submit(sched, ask("C", 1, 1, adapter="c"), ask("D", 21, 1))
    sched.set_limits(max_step_tokens=10)
    assert step(sched).ids == ("A", "B")
    assert why(sched, "C") == ("adapter_limit", None)
    assert why(sched, "D") == ("commitment", 1)  # 60 - 20 - 20 are left


# -- B10 --------------------------------------------------------------------------------------------------------------


def _c89(head: str, **config: Any) -> Scheduler:
    """Pool of 24,600. A writes 8,703 slots, B 16,895 of which 15,897 are left; C1 to C8 write 1,535 each (case C89)."""
    sched = make(24_600, admission="guaranteed", head=head, **config)
    submit(sched, ask("A", 8192, 512, stop_token_ids={1}), ask("B", 16_384, 512))
    submit(sched, *(ask(f"C{index}", 1024, 512) for index in range(1, 9)))
    return sched


def test_b10_backfill_passes_the_head_only_where_its_start_is_not_delayed() -> None:
    """Beside B, after A's release, 24,600 - 16,895 = 7,705 are left: five times 1,535."""
    sched = _c89("backfill")
    assert step(sched).admitted == ("A", "C1", "C2", "C3", "C4", "C5")
    assert why(sched, "B") == ("pages", 998)
    assert {why(sched, f"C{index}")[0] for index in (6, 7, 8)} == {"head_of_line"}
    assert step(sched).admitted == ()
    advance(sched, stop=("A",))
    assert step(sched).admitted == ("B",)  # in the very step after A's end
    assert waiting(sched) == ["C6", "C7", "C8"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(requests=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=3, max_size=7), pool=st.integers(19, 25),
       page_size=st.sampled_from([1, 3]), chunk=st.sampled_from([None, 3]))
def test_b10_backfill_delays_no_head(requests: list[tuple[int, int]], pool: int, page_size: int, chunk: int | None) -> None:
    """The first that is deferred starts in the same step as where nobody may pass it, or earlier."""
    start: dict[str, dict[str, int]] = {}
    for head in ("strict", "backfill"):
        sched = make(pool // page_size, page_size, admission="guaranteed", head=head, chunk_tokens=chunk)
        accepted = [key for key, (prompt, new) in enumerate(requests) if sched.submit(ask(f"R{key}", prompt, new))]
        start[head] = {}
        while sched.has_work():
            plan = sched.schedule()
            start[head].update(dict.fromkeys(plan.admitted, plan.step))
            sched.commit(plan, StepResult(tokens=[7] * len(plan)))
        assert len(start[head]) == len(accepted)
    deferred = [key for key, at in start["strict"].items() if at > 1]
    if deferred:
        first = min(deferred, key=lambda key: int(key[1:]))
        assert start["backfill"][first] <= start["strict"][first]


def test_b10_strict_lets_nobody_pass() -> None:
    sched = _c89("strict")
    assert step(sched).admitted == ("A",)
    assert why(sched, "B") == ("pages", 998)
    assert why(sched, "C1") == ("head_of_line", None)
    advance(sched, stop=("A",))
    assert step(sched).admitted == ("B", "C1", "C2", "C3", "C4", "C5")


def test_b10_skip_is_bounded_by_a_count() -> None:
    sched = _c89("skip", max_bypass=3)
    assert step(sched).admitted == ("A", "C1", "C2", "C3")
    assert step(sched).admitted == ()  # the count is the head's, not the step's
    assert why(sched, "C4") == ("head_of_line", None)
    advance(sched, stop=("A",))
    assert step(sched).admitted[0] == "B"


@pytest.mark.parametrize("head", ["strict", "backfill", "skip"])
def test_b10_a_running_place_is_a_shortage_that_holds_the_line(head: str) -> None:
    sched = make(100, max_running=1, head=head)
    submit(sched, ask("A", 5, 3), ask("B", 5, 1), ask("C", 5, 1))
    step(sched)
    assert why(sched, "B") == ("running_limit", 1)
    assert why(sched, "C")[0] in ("running_limit", "head_of_line")


def test_b10_the_adapter_limit_steps_over_once() -> None:
    """max_adapters 1, a batch of `a`. B is overtaken in the pass that first finds it, and by nobody with an adapter after."""
    sched = make(100, max_adapters=1)
    submit(sched, ask("A1", 5, 9, adapter="a"), ask("B", 5, 2, adapter="b"), ask("A2", 5, 9, adapter="a"), ask("N1", 5, 9))
    assert step(sched).admitted == ("A1", "A2", "N1")
    assert why(sched, "B") == ("adapter_limit", None)
    submit(sched, ask("A3", 5, 2, adapter="a"), ask("N2", 5, 9))
    assert step(sched).admitted == ("N2",)
    assert why(sched, "A3") == ("adapter_limit", None)
    step(sched, 7)
    assert step(sched).admitted == ("B",)  # nine tokens each: the present batch has drained
    assert why(sched, "A3") == ("adapter_limit", None)
    step(sched)
    assert step(sched).admitted == ("A3",)


@pytest.mark.parametrize("head", ["strict", "backfill", "skip"])
def test_b10_who_was_overtaken_is_not_overtaken_for_another_reason(head: str) -> None:
    """B was stepped over for the adapter limit; now it lacks memory. The adapter place is free, and A2 may not have it."""
    sched = make(100, max_adapters=1, admission="guaranteed", head=head)
    submit(sched, ask("N", 60, 6), ask("A", 5, 2, adapter="a"))
    step(sched)
    submit(sched, ask("B", 50, 2, adapter="b"))
    step(sched)
    assert why(sched, "B") == ("adapter_limit", None)
    submit(sched, ask("A2", 5, 9, adapter="a"))
    assert step(sched).admitted == ()
    assert why(sched, "B") == ("pages", 51 - 35)  # N holds 62 and is promised three more
    assert [key for _ in range(5) for key in step(sched).admitted] == ["B"]


def test_b10_backfill_keeps_the_adapter_place_of_the_head() -> None:
    """B is deferred for memory and needs the one adapter place at its start: A fits beside it, and waits; N2 does not care."""
    sched = make(100, max_adapters=1, admission="guaranteed", head="backfill")
    submit(sched, ask("N", 60, 6))
    step(sched)
    submit(sched, ask("B", 50, 2, adapter="b"), ask("A", 5, 9, adapter="a"), ask("N2", 5, 9), ask("B2", 5, 9, adapter="b"))
    assert step(sched).admitted == ("N2", "B2")
    assert why(sched, "A") == ("head_of_line", None)
    assert [key for _ in range(5) for key in step(sched).admitted] == ["B"]


def test_b10_adapters_of_one_pass_count_together() -> None:
    """Case C46: four adapters; only those of the fifth wait."""
    sched = make(1000, max_adapters=4)
    uses = ["", "", "", "L1", "L3", "L2", "L4", "L5", "L5", "L5", "L5", "", "", "L1", "L2", "L3"]
    submit(sched, *(ask(f"R{at + 1}", 5, 3, adapter=name or None) for at, name in enumerate(uses)))
    assert step(sched).admitted == tuple(f"R{at}" for at in (1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16))


@pytest.mark.parametrize("head", ["strict", "backfill", "skip"])
def test_b10_who_is_not_ready_is_stepped_over(head: str) -> None:
    sched = make(100, max_running=2, max_queued_requests=3, head=head)
    submit(sched, ask("G", 50, 3, ready=False), ask("A", 5, 3), ask("B", 5, 2))
    refused = sched.submit(ask("C", 5, 3))
    assert isinstance(refused, Refused)  # it counts for the queue
    assert refused.reason is RefusalReason.QUEUE_REQUESTS
    assert step(sched).admitted == ("A", "B")  # and not for the running places
    assert why(sched, "G") == ("host", None)
    assert pages(sched)[3] == 10  # it holds nothing
    assert sched.mark_ready("G") is True
    assert sched.mark_ready("G") is False
    step(sched)
    assert step(sched).admitted == ("G",)


def test_b10_being_made_ready_costs_no_tokens() -> None:
    """A prefill takes the whole budget of each step; G's readiness does not wait for it."""
    sched = make(200, max_step_tokens=10, max_running=2)
    submit(sched, ask("G", 5, 1, ready=False), ask("H", 100, 1))
    step(sched)
    assert why(sched, "G")[0] == "host"
    sched.mark_ready("G")
    step(sched)
    assert why(sched, "G")[0] == "step_tokens"


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
