"""Laws B8 to B10: a deferred head is work, residents in no batch are residents, and who may pass a head."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop import advance, ask, make, pages, running, step, submit, waiting, why

from kvsched import RefusalReason, Refused, Scheduler, Status, StepResult

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


def test_b10_a_pass_counts_against_the_head_and_nobody_else() -> None:
    """C is deferred too, but B is the head: when C is gone, B has been passed once, and that was all it allows."""
    sched = make(100, admission="guaranteed", head="skip", max_bypass=1)
    submit(sched, ask("A", 60, 9), ask("B", 50, 1), ask("C", 50, 1), ask("S1", 5, 2), ask("S2", 5, 2))
    assert step(sched).admitted == ("A", "S1")
    sched.abort("C")
    assert step(sched).admitted == ()
    assert why(sched, "S2") == ("head_of_line", None)


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
    submit(sched, ask("N2", 5, 9), ask("A3", 5, 2, adapter="a"))
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


def test_b10_who_was_overtaken_bars_adapters_though_it_is_not_tried() -> None:
    """H, a better priority, is the head. B was overtaken before and needs more than there is: A3 fits, and waits for B."""
    sched = make(100, max_adapters=1, admission="guaranteed", head="skip", order="priority")
    submit(sched, ask("A1", 20, 9, adapter="a"), ask("B", 90, 1, adapter="b"))
    step(sched)
    assert why(sched, "B") == ("adapter_limit", None)
    submit(sched, ask("H", 95, 1, priority=-1), ask("N", 5, 2), ask("A3", 5, 2, adapter="a"))
    assert step(sched).admitted == ("N",)
    assert why(sched, "A3") == ("adapter_limit", None)


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
