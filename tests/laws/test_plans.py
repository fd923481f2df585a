"""What goes between scheduler and host (section "the host loop"): outcomes, rollback, late tokens, speculation, blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loop import STOP, advance, ask, chunks, drain, make, pages, running, step, submit, totals, waiting, why

from kvsched import Agreed, Finish, Outcome, Plan, RefusalReason, Refused, Scheduler, Status, StepResult
from kvsched.errors import InvalidResult

# -- what a commit answers --------------------------------------------------------------------------------------------


def test_outcomes_are_aligned_with_the_plan() -> None:
    """Row by row: a decode that goes on, one that ends by length, one that stops, a chunk that is not the last, one that is."""
    sched = make(200, chunk_tokens=10)
    submit(sched, ask("A", 4, 9), ask("B", 4, 2), ask("C", 4, 9, stop_token_ids={STOP}))
    step(sched)
    submit(sched, ask("D", 20, 9), ask("E", 5, 9))
    plan = sched.schedule()
    assert plan.ids == ("A", "B", "C", "D", "E")
    outcome = sched.commit(plan, StepResult(tokens=[10, 11, STOP, 12, 13]))
    assert outcome.rows.tolist() == plan.rows.tolist()
    assert outcome.tokens.tolist() == [10, 11, STOP, -1, 13]
    assert outcome.finish.tolist() == [Finish.NONE, Finish.LENGTH, Finish.STOP, Finish.NONE, Finish.NONE]
    assert outcome.finish.dtype == np.int8
    assert [(end.id, end.finish, end.generated) for end in outcome.ended] == [("B", Finish.LENGTH, 2), ("C", Finish.STOP, 2)]


def test_a_plan_of_plain_decodes_answers_in_the_same_shape() -> None:
    """The short way through commit answers as the long way does."""
    sched = make(200)
    submit(sched, ask("A", 4, 3), ask("B", 4, 9, stop_token_ids={STOP}))
    step(sched)
    plan, outcome = advance(sched, 9)
    assert (outcome.tokens.tolist(), outcome.finish.tolist(), outcome.ended) == ([9, 9], [0, 0], ())
    plan, outcome = advance(sched, 9, stop=("B",))
    assert (outcome.tokens.tolist(), outcome.finish.tolist()) == ([9, STOP], [Finish.LENGTH, Finish.STOP])
    assert {end.id: (end.generated, end.computed, end.pages) for end in outcome.ended} == {"A": (3, 6, 6), "B": (3, 6, 6)}
    assert plan.decodes == 2


def test_what_the_host_alone_knows() -> None:
    sched = make(200, chunk_tokens=10)
    submit(sched, ask("A", 4, 9), ask("B", 4, 9), ask("C", 25, 9), ask("D", 25, 9))
    step(sched)
    plan = sched.schedule()
    assert plan.ids == ("A", "B", "C", "D")
    outcome = sched.commit(plan, StepResult(tokens=[10, 11, 12, 13], finished=[0, 2], failed=[1]))
    sched.check()
    assert outcome.tokens.tolist() == [10, -1, -1, -1]
    assert outcome.finish.tolist() == [Finish.STOP, Finish.ERROR, Finish.STOP, 0]
    assert {end.id: (end.finish, end.generated) for end in outcome.ended} == {
        "A": (Finish.STOP, 2), "B": (Finish.ERROR, 1), "C": (Finish.STOP, 0)}
    assert running(sched) == ["D"]


def test_a_stop_token_counts_only_after_the_least_number() -> None:
    sched = make(200)
    submit(sched, ask("A", 4, 9, stop_token_ids={STOP}, min_new_tokens=3), ask("B", 4, 4, stop_token_ids={STOP}, ignore_eos=True))
    seen = [advance(sched, stop=("A", "B"))[1].finish.tolist() for _ in range(4)]
    assert seen == [[0, 0], [0, 0], [Finish.STOP, 0], [Finish.LENGTH]]


def test_more_stop_tokens_than_a_few() -> None:
    sched = make(200)
    submit(sched, *(ask(f"R{index}", 4, 9, stop_token_ids={100 + index}) for index in range(7)))
    step(sched)
    plan = sched.schedule()
    outcome = sched.commit(plan, StepResult(tokens=[100, 102, 102, 103, 100, 7, 106]))
    assert outcome.finish.tolist() == [2, 0, 2, 2, 0, 0, 2]


def test_an_empty_plan_answers_with_empty_arrays() -> None:
    sched = make(10)
    plan = sched.schedule()
    assert (plan.status, len(plan), bool(plan), plan.tokens) == (Status.IDLE, 0, False, 0)
    outcome = sched.commit(plan, StepResult(tokens=[]))
    assert (outcome.tokens.shape, outcome.finish.shape, outcome.ended) == ((0,), (0,), ())
    assert totals(sched, "steps") == 1


# -- rollback ---------------------------------------------------------------------------------------------------------


def _seen(sched: Scheduler) -> dict[str, Any]:
    """What rollback has to bring back: not the last plan made, nor the reasons that the last pass found."""
    state = sched.snapshot()
    del state["plan"]
    for request in state["requests"].values():
        del request["wait_reason"], request["short_by"]
    return state


@pytest.mark.parametrize("config", [
    {}, {"admission": "guaranteed"}, {"order": "fair"}, {"order": "sjf"}, {"lookahead_tokens": 2}, {"head": "skip", "max_running": 3},
    {"decode_every": 2}, {"prefill_grant": 1, "max_step_tokens": 12}, {"max_inflight_prompt_tokens": 200}, {"ratio_start": "initial"},
], ids=str)
def test_rollback_brings_everything_back(config: dict[str, Any]) -> None:
    """In every step of a mixed load: schedule, roll back, and the state is what it was; then the same plan is made again."""
    sched = make(60, 2, cache=True, chunk_tokens=5, **{"max_step_tokens": 40, **config})
    submit(sched, ask("A", 12, 6, first=0), ask("B", 17, 5, first=0, tenant="b"), ask("C", 9, 7), ask("D", 20, 3, first=0, adapter="d"),
           ask("E", 3, 9, ready=False), ask("F", 8, 3, n=2))
    for at in range(60):
        if at == 6:
            sched.mark_ready("E")
        if at == 9:
            sched.pause("retract")
            sched.resume()
        if not sched.has_work():
            break
        before = _seen(sched)
        plan = sched.schedule()
        digest = plan.digest
        if plan.evicted or plan.retracted:
            sched.commit(plan, _width(plan))
            continue
        sched.rollback(plan)
        sched.check()
        assert _seen(sched) == before
        again = sched.schedule()
        assert again.digest == digest  # and the pages are the same
        sched.commit(again, _width(again))
        sched.check()
    assert not sched.has_work()


def _width(plan: Plan) -> StepResult:
    wide = max(int(plan.counts[: plan.decodes].max()) if plan.decodes else 1, 1)
    return StepResult(tokens=np.full((len(plan), wide), 7))


def test_rollback_keeps_evictions_and_retractions() -> None:
    sched = make(30, conservativeness=0, cache=True)
    submit(sched, ask("X", 5, 1))
    step(sched)
    submit(sched, *(ask(key, 10, 20) for key in "ABC"))
    plan = step(sched)
    assert plan.evicted == 5
    plan = sched.schedule()
    assert plan.retracted == ("C",)
    sched.rollback(plan)
    sched.check()
    assert running(sched) == ["A", "B"]
    assert waiting(sched) == ["C"]
    assert (totals(sched, "retractions"), totals(sched, "evicted_pages")) == (1, 5 + plan.evicted)


def test_rollback_of_the_newest_of_two() -> None:
    sched = make(40, max_in_flight=2)
    submit(sched, ask("A", 4, 9))
    step(sched)
    first, second = sched.schedule(), sched.schedule()
    assert (first.starts.tolist(), second.starts.tolist()) == ([4], [5])
    sched.rollback(second)
    again = sched.schedule()
    assert again.starts.tolist() == [5]
    sched.commit(first, StepResult(tokens=[7]))
    sched.commit(again, StepResult(tokens=[8]))
    assert sched.generated("A").tolist() == [7, 7, 8]
    assert pages(sched) == (34, 0, 0, 6, 0)


def test_rollback_after_the_id_went_to_another_request() -> None:
    """The plan counted A's hit of four tokens as computed; that is not given back to the A that came after it."""
    sched = make(100, 4, cache=True, max_inflight_prompt_tokens=30)
    submit(sched, ask("P", 5, 1, first=0))
    step(sched)
    submit(sched, ask("A", 9, 1, first=0))
    plan = sched.schedule()
    assert chunks(plan) == [("A", 4, 5)]
    sched.abort("A")
    submit(sched, ask("A", 20, 1))
    sched.rollback(plan)
    sched.check()
    assert sched.submit(ask("B", 11, 1)) == Refused("B", RefusalReason.INFLIGHT_TOKENS, 11, 10, retryable=True)
    drain(sched, 5)


def test_a_pin_is_kept_when_the_id_goes_to_another_request_meanwhile() -> None:
    """A stops with a step in flight that names it, so its pages enter the tree later, when another A waits already."""
    sched = make(100, 4, cache=True, max_in_flight=2, pin_limit_pages=10)
    submit(sched, ask("A", 8, 5, stop_token_ids={STOP}, pin=2))
    first, second = sched.schedule(), sched.schedule()
    sched.commit(first, StepResult(tokens=[STOP]))
    submit(sched, ask("A", 4, 1))
    sched.commit(second, StepResult(tokens=[7]))
    assert sched.ceiling == 98
    drain(sched, 5)
    assert sched.ceiling == 98
    assert sched.unpin("A")


def test_rollback_after_an_abort_of_a_row_in_the_plan() -> None:
    sched = make(40)
    submit(sched, ask("A", 4, 9), ask("B", 4, 9))
    step(sched)
    plan = sched.schedule()
    sched.abort("A")
    assert pages(sched) == (30, 0, 0, 5, 5)
    sched.rollback(plan)
    sched.check()
    assert pages(sched) == (36, 0, 0, 4, 0)
    assert running(sched) == ["B"]


# -- late tokens ------------------------------------------------------------------------------------------------------


def _retracted_in_flight(**fields: Any) -> tuple[Scheduler, Plan]:
    """A has emitted 3 of 10 and its fourth is in flight when it is retracted (case C29)."""
    sched = make(100, max_in_flight=2, lookahead_tokens=fields.pop("lookahead_tokens", 0))
    submit(sched, ask("A", 10, 10, **fields))
    step(sched, 3)
    plan = sched.schedule()
    sched.pause("retract")
    sched.resume()
    return sched, plan


def test_a_late_token_is_delivered_once() -> None:
    sched, plan = _retracted_in_flight()
    assert sched.request_state("A")["generated"] == 3
    assert sched.schedule().status is Status.IN_FLIGHT  # it waits for its own token
    assert why(sched, "A") == ("host", None)
    outcome = sched.commit(plan, StepResult(tokens=[8]))
    assert outcome.tokens.tolist() == [8]
    assert sched.generated("A").tolist() == [7, 7, 7, 8]
    sched.commit(sched.in_flight[0], StepResult(tokens=[]))
    assert chunks(step(sched)) == [("A", 0, 14)]
    drain(sched, 20)
    assert (totals(sched, "emitted"), totals(sched, "recomputed_tokens")) == (10, 13)


def test_a_late_token_of_a_plan_that_is_rolled_back_does_not_come() -> None:
    sched, plan = _retracted_in_flight()
    sched.rollback(plan)
    sched.check()
    assert sched.generated("A").tolist() == [7, 7, 7]
    assert chunks(step(sched)) == [("A", 0, 13)]
    drain(sched, 20)
    assert totals(sched, "emitted") == 10


def test_a_late_token_of_an_aborted_request_is_not_delivered() -> None:
    sched, plan = _retracted_in_flight()
    assert sched.abort("A")
    outcome = sched.commit(plan, StepResult(tokens=[8]))
    assert (outcome.tokens.tolist(), outcome.finish.tolist(), outcome.ended) == ([-1], [0], ())
    assert totals(sched, "emitted") == 3


def test_a_late_token_that_failed_ends_the_request() -> None:
    sched, plan = _retracted_in_flight()
    outcome = sched.commit(plan, StepResult(tokens=[8], failed=[0]))
    assert (outcome.tokens.tolist(), outcome.finish.tolist()) == ([-1], [Finish.ERROR])
    assert [(end.id, end.generated) for end in outcome.ended] == [("A", 3)]


@pytest.mark.parametrize(("result", "code"), [({"failed": [1]}, Finish.ERROR), ({"finished": [1]}, Finish.STOP)])
def test_a_chunk_of_a_retracted_request_can_end_it(result: dict[str, list[int]], code: Finish) -> None:
    """A's second chunk is in flight beside B's token when both are retracted; the host says that A is at its end."""
    sched = make(100, max_in_flight=2, chunk_tokens=4)
    submit(sched, ask("B", 4, 9), ask("A", 12, 5))
    step(sched)
    plan = sched.schedule()
    assert plan.ids == ("B", "A")
    sched.pause("retract")
    outcome = sched.commit(plan, StepResult(tokens=[8, 9], **result))
    assert (outcome.tokens.tolist(), outcome.finish.tolist()) == ([8, -1], [0, code])
    assert [(end.id, end.generated) for end in outcome.ended] == [("A", 0)]
    assert waiting(sched) == ["B"]


def test_late_drafts_are_delivered_as_far_as_they_were_accepted() -> None:
    sched, plan = _retracted_in_flight(lookahead_tokens=3)
    assert plan.counts.tolist() == [4]
    outcome = sched.commit(plan, StepResult(tokens=[[1, 2, 3, 4]], accepted=[2]))
    assert outcome.tokens.tolist() == [[1, 2, 3, -1]]
    assert sched.generated("A").tolist() == [7, 7, 7, 1, 2, 3]
    drain(sched, 20)
    assert totals(sched, "emitted") == 10


def test_the_first_token_can_come_late() -> None:
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 10, 3))
    plan = sched.schedule()
    sched.pause("retract")
    sched.resume()
    outcome = sched.commit(plan, StepResult(tokens=[8]))
    assert outcome.tokens.tolist() == [8]
    plan = step(sched)
    assert chunks(plan) == [("A", 0, 11)]
    assert plan.prefill[0].tokens[-1] == 8


# -- two plans in flight ----------------------------------------------------------------------------------------------


def test_a_second_plan_is_made_before_the_first_ends() -> None:
    sched = make(100, max_in_flight=2, chunk_tokens=6)
    submit(sched, ask("A", 10, 3))
    one, two = sched.schedule(), sched.schedule()
    assert (chunks(one), chunks(two)) == ([("A", 0, 6)], [("A", 6, 4)])
    assert [plan.step for plan in sched.in_flight] == [1, 2]
    sched.commit(one, StepResult(tokens=[7]))
    three = sched.schedule()
    assert three.starts.tolist() == [10]
    sched.commit(two, StepResult(tokens=[7]))
    four = sched.schedule()
    assert four.starts.tolist() == [11]
    assert sched.commit(three, StepResult(tokens=[7])).finish.tolist() == [0]
    assert sched.commit(four, StepResult(tokens=[7])).finish.tolist() == [Finish.LENGTH]


def test_a_stop_drops_the_row_of_the_plan_that_was_made_already() -> None:
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 10, 9, stop_token_ids={STOP}), ask("B", 10, 9))
    step(sched)
    one, two = sched.schedule(), sched.schedule()
    assert sched.commit(one, StepResult(tokens=[STOP, 7])).finish.tolist() == [Finish.STOP, 0]
    assert pages(sched) == (100 - 12 - 12, 0, 0, 12, 12)  # A's pages wait for the plan that still names it
    outcome = sched.commit(two, StepResult(tokens=[9, 8]))
    assert (outcome.tokens.tolist(), outcome.ended) == ([-1, 8], ())
    assert pages(sched) == (88, 0, 0, 12, 0)


# -- speculation ------------------------------------------------------------------------------------------------------


def spec(sched: Scheduler, plan: Plan, accepted: list[int], token: int = 7) -> Outcome:
    outcome = sched.commit(plan, StepResult(tokens=np.full((len(plan), 4), token), accepted=accepted))
    sched.check()
    return outcome


def test_speculation_moves_by_what_was_accepted() -> None:
    """P = 10, N = 20, 3 drafts: 4 slots a step, of which 1 + accepted stay."""
    sched = make(100, lookahead_tokens=3)
    submit(sched, ask("A", 10, 20))
    step(sched)
    starts = []
    for accepted in (0, 3, 2, 1):
        plan = sched.schedule()
        starts.append((int(plan.starts[0]), int(plan.counts[0])))
        outcome = spec(sched, plan, [accepted])
        assert (outcome.tokens >= 0).sum() == 1 + accepted
    assert starts == [(10, 4), (11, 4), (15, 4), (18, 4)]
    assert sched.request_state("A")["generated"] == 1 + 1 + 4 + 3 + 2


def test_speculation_is_clipped_at_the_last_slot() -> None:
    """P = 10, N = 6: 15 slots, positions 10 to 14. Whatever is accepted, no step goes beyond."""
    sched = make(15, lookahead_tokens=3)
    submit(sched, ask("A", 10, 6))
    step(sched)
    shapes = []
    for accepted in (0, 0, 0, 0, 0):
        plan = sched.schedule()
        shapes.append((int(plan.starts[0]), int(plan.counts[0])))
        outcome = spec(sched, plan, [accepted])
    assert shapes == [(10, 4), (11, 4), (12, 3), (13, 2), (14, 1)]
    assert outcome.finish.tolist() == [Finish.LENGTH]


def test_with_two_plans_the_second_assumes_that_all_drafts_are_taken() -> None:
    """Page 16, length 14: 14 to 17 and 18 to 21, so 2 pages at once (case C67); what was not taken is computed again."""
    sched = make(10, 16, lookahead_tokens=3, max_in_flight=2)
    submit(sched, ask("A", 14, 20))
    step(sched)
    one, two = sched.schedule(), sched.schedule()
    assert (one.starts.tolist(), two.starts.tolist()) == ([14], [18])
    spec(sched, one, [1])
    three = sched.schedule()
    assert three.starts.tolist() == [20]  # 22 less the two that were not taken
    spec(sched, two, [0])
    spec(sched, three, [3])
    assert sched.request_state("A")["computed"] == 14 + 2 + 1 + 4
    assert sched.request_state("A")["generated"] == 1 + 2 + 1 + 4


def test_a_stop_among_accepted_drafts_ends_there() -> None:
    sched = make(100, lookahead_tokens=3)
    submit(sched, ask("A", 10, 20, stop_token_ids={STOP}))
    step(sched)
    plan = sched.schedule()
    outcome = sched.commit(plan, StepResult(tokens=[[5, STOP, 6, 7]], accepted=[3]))
    assert (outcome.tokens.tolist(), outcome.finish.tolist()) == ([[5, STOP, -1, -1]], [Finish.STOP])
    assert [(end.generated, end.computed) for end in outcome.ended] == [(3, 12)]


def test_more_accepted_than_drafted_is_refused() -> None:
    sched = make(15, lookahead_tokens=3)
    submit(sched, ask("A", 10, 3))
    step(sched)
    plan = sched.schedule()
    assert plan.counts.tolist() == [2]
    before = sched.snapshot()
    with pytest.raises(InvalidResult, match=r"accepted\[0\] must be from 0 to 1"):
        spec(sched, plan, [2])
    assert sched.snapshot() == before
    assert spec(sched, plan, [1]).finish.tolist() == [Finish.LENGTH]


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_a_block_waits_for_its_result_before_the_next_pass() -> None:
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 4, 9, block_tokens=4))
    step(sched)
    one = sched.schedule()
    two = sched.schedule()
    assert (one.counts.tolist(), len(two), two.status) == ([4], 0, Status.IN_FLIGHT)
    outcome = sched.commit(one, StepResult(tokens=[[1, 2, 3, 4]], final=[0]))
    assert outcome.tokens.tolist() == [[1, 2, 3, 4]]
    sched.commit(two, StepResult(tokens=[]))
    three = sched.schedule()
    assert (three.starts.tolist(), three.counts.tolist()) == ([8], [4])


def test_the_last_block_is_as_wide_as_what_is_left() -> None:
    """P = 4, N = 7: one token with the prefill, a block of 4, and one of 2."""
    sched = make(100)
    submit(sched, ask("A", 4, 7, block_tokens=4))
    step(sched)
    widths = []
    while sched.has_work():
        plan = sched.schedule()
        widths.append(plan.counts.tolist())
        outcome = sched.commit(plan, StepResult(tokens=[[1, 2, 3, 4]], final=[0]))
    assert widths == [[4], [2]]
    assert outcome.tokens.tolist() == [[1, 2, -1, -1]]
    assert [(end.generated, end.finish) for end in outcome.ended] == [(7, Finish.LENGTH)]


def test_a_stop_inside_a_final_block_ends_there() -> None:
    sched = make(100)
    submit(sched, ask("A", 4, 9, block_tokens=4, stop_token_ids={STOP}))
    step(sched)
    plan = sched.schedule()
    outcome = sched.commit(plan, StepResult(tokens=[[5, STOP, 6, 7]]))
    assert outcome.tokens.tolist() == [[-1] * 4]  # not final: nothing is delivered, and nothing stops
    plan = sched.schedule()
    outcome = sched.commit(plan, StepResult(tokens=[[5, STOP, 6, 7]], final=[0]))
    assert (outcome.tokens.tolist(), outcome.finish.tolist()) == ([[5, STOP, -1, -1]], [Finish.STOP])


def test_blocks_and_plain_decodes_beside_each_other() -> None:
    sched = make(100)
    submit(sched, ask("A", 4, 9), ask("B", 4, 9, block_tokens=4))
    step(sched)
    plan = sched.schedule()
    assert plan.counts.tolist() == [1, 4]
    outcome = sched.commit(plan, StepResult(tokens=[[5, 0, 0, 0], [1, 2, 3, 4]], final=[1]))
    assert outcome.tokens.tolist() == [[5, -1, -1, -1], [1, 2, 3, 4]]
    with pytest.raises(InvalidResult, match="final names position 0, which is no block row"):
        sched.commit(sched.schedule(), StepResult(tokens=[[5, 0, 0, 0], [1, 2, 3, 4]], final=[0]))


def test_rollback_of_a_block_opens_it_again() -> None:
    sched = make(100)
    submit(sched, ask("A", 4, 9, block_tokens=4))
    step(sched)
    sched.rollback(sched.schedule())
    assert pages(sched) == (96, 0, 0, 4, 0)
    plan = sched.schedule()
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([4], [4])


# -- what the ranks agreed --------------------------------------------------------------------------------------------


def test_an_agreed_floor_is_what_can_be_used() -> None:
    sched = make(100)
    submit(sched, ask("A", 50, 1), ask("B", 20, 1), ask("C", 31, 1))
    plan = sched.schedule(Agreed(free_pages=75))
    assert plan.admitted == ("A", "B")
    assert why(sched, "C") == ("pages", 26)  # 5 are left of the floor


def test_an_agreed_count_bounds_who_starts() -> None:
    sched = make(100)
    submit(sched, *(ask(key, 5, 1) for key in "ABC"))
    assert sched.schedule(Agreed(admit=2)).admitted == ("A", "B")
    assert why(sched, "C") == ("rank_agreement", 1)


def test_agreed_prefill_tokens_bound_chunks_and_newcomers_alike() -> None:
    """D decodes, A is between two chunks, B and C are new: 10 tokens are 4 of A and 6 of B, and 0 leave the decode alone."""
    sched = make(200, chunk_tokens=8)
    submit(sched, ask("D", 5, 20))
    step(sched)
    submit(sched, ask("A", 12, 1))
    step(sched)
    submit(sched, ask("B", 20, 1), ask("C", 5, 1))
    plan = sched.schedule(Agreed(prefill_tokens=10))
    assert (plan.decode_ids, chunks(plan)) == (("D",), [("A", 8, 4), ("B", 0, 6)])
    assert why(sched, "C") == ("step_tokens", None)
    sched.rollback(plan)
    plan = sched.schedule(Agreed(prefill_tokens=0))
    assert (plan.ids, chunks(plan)) == (("D",), [])
    assert {why(sched, key) for key in "ABC"} == {("step_tokens", None)}
    sched.rollback(plan)
    sched.abort("D")
    plan = sched.schedule(Agreed(prefill_tokens=0))
    assert (len(plan), plan.status) == (0, Status.BLOCKED)
    sched.commit(plan, StepResult(tokens=[]))
    drain(sched, 10)


def test_nobody_is_displaced_for_prefill_that_the_ranks_do_not_allow() -> None:
    sched = make(200, max_running=1, preempt_priority=True)
    submit(sched, ask("V", 5, 20, priority=1))
    step(sched)
    submit(sched, ask("H", 5, 20))
    assert sched.schedule(Agreed(prefill_tokens=0)).retracted == ()


def test_agreed_aborts_come_before_the_step() -> None:
    sched = make(100)
    submit(sched, ask("A", 5, 9), ask("B", 5, 9))
    step(sched)
    plan = sched.schedule(Agreed(aborts=("A", "unknown")))
    assert plan.decode_ids == ("B",)
