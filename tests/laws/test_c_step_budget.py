"""Law C4: the order in which a step's tokens are given out, turns of decodes, and the bounds of both waits."""

from __future__ import annotations

import itertools
import math

import pytest
from loop import ask, chunks, drain, make, pages, step, submit, why

from kvsched import Scheduler, StepResult


def test_c4_decodes_then_partial_prefills_then_new_requests() -> None:
    sched = make(500, max_step_tokens=20, chunk_tokens=8)
    submit(sched, ask("D", 4, 50), ask("A", 30, 1))
    step(sched)
    submit(sched, ask("B", 30, 1), ask("C", 30, 1))
    plan = step(sched)
    assert plan.decode_ids == ("D",)
    assert chunks(plan) == [("A", 8, 8), ("B", 0, 8), ("C", 0, 3)]
    assert chunks(step(sched)) == [("A", 16, 8), ("B", 8, 8), ("C", 3, 3)]


def test_c4_decodes_are_charged_their_speculative_slots() -> None:
    sched = make(500, max_step_tokens=20, lookahead_tokens=4)
    submit(sched, ask("D", 4, 50), ask("E", 4, 50))
    step(sched)
    submit(sched, ask("A", 30, 1))
    plan = sched.schedule()
    assert plan.counts.tolist() == [5, 5, 10]


def test_c4_a_chunk_is_not_rounded_to_pages() -> None:
    sched = make(500, 16, max_step_tokens=21, chunk_tokens=10)
    submit(sched, ask("A", 30, 1), ask("B", 30, 1), ask("C", 30, 1))
    assert chunks(step(sched)) == [("A", 0, 10), ("B", 0, 10), ("C", 0, 1)]
    assert chunks(step(sched)) == [("A", 10, 10), ("B", 10, 10), ("C", 1, 1)]


@pytest.mark.parametrize(("running_now", "budget", "lookahead"), [(5, 2, 0), (6, 3, 0), (7, 3, 0), (5, 4, 1), (4, 1, 0)])
def test_c4_decodes_take_turns(running_now: int, budget: int, lookahead: int) -> None:
    """When they exceed the budget, no gap is longer than ceil(running / those that fit in a step)."""
    sched = make(5000, lookahead_tokens=lookahead, max_step_tokens=5000)
    keys = [f"R{index}" for index in range(running_now)]
    submit(sched, *(ask(key, 4, 200) for key in keys))
    step(sched)
    sched.set_limits(max_step_tokens=budget)
    fit = budget // (1 + lookahead)
    gap = math.ceil(running_now / fit)
    for _ in range(6 * gap):
        plan = sched.schedule()
        assert len(plan.decode_ids) == fit
        sched.commit(plan, StepResult(tokens=[[7] * (1 + lookahead)] * len(plan)))
    gaps = sched.snapshot()["max_gap"]
    assert set(gaps) == set(keys)
    assert max(gaps.values()) == gap


def test_c4_the_least_recently_served_goes_first() -> None:
    sched = make(500, max_step_tokens=500)
    submit(sched, *(ask(key, 4, 20) for key in "ABCDE"))
    step(sched)
    sched.set_limits(max_step_tokens=2)
    served = ["".join(step(sched).decode_ids) for _ in range(5)]
    assert served == ["AB", "CD", "AE", "BC", "AD"]  # A and E were both served in the third step: by admission


def test_c4_a_first_token_is_a_turn() -> None:
    """Budget 1, grants and decodes alternate. N's prompt ends in step 4, after A's turn in step 3: A goes before N again."""
    sched = make(500, max_step_tokens=100, prefill_grant=1)
    submit(sched, ask("A", 4, 20), ask("B", 4, 20))
    step(sched)
    sched.set_limits(max_step_tokens=1)
    submit(sched, ask("N", 2, 20))
    assert "".join("".join(step(sched).ids) for _ in range(8)) == "NANBANBA"


def test_c4_a_turn_that_cannot_be_taken_goes_to_the_next() -> None:
    """Page 2. It is A's turn, and A needs a page that is on its way from V. B needs none and gets the token."""
    sched = make(6, 2, conservativeness=0, max_in_flight=2)
    submit(sched, ask("A", 1, 9), ask("B", 4, 8), ask("V", 3, 9, priority=1))
    step(sched)
    second = sched.schedule()
    assert (second.decode_ids, pages(sched)[0]) == (("A", "B", "V"), 0)
    sched.set_limits(max_step_tokens=1)
    third = sched.schedule()
    assert (third.retracted, third.decode_ids) == (("V",), ("B",))
    assert why(sched, "A") == ("pages", 1)
    sched.commit(second, StepResult(tokens=[7] * 3))
    sched.commit(third, StepResult(tokens=[7]))
    assert step(sched).decode_ids == ("A",)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize(("spare", "admitted", "retracted"), [(-1, (), ("B",)), (0, (), ()), (1, ("N",), ())])
def test_c4_prefill_that_goes_first_leaves_decodes_their_pages(lookahead: int, spare: int, admitted: tuple[str, ...],
                                                               retracted: tuple[str, ...]) -> None:
    """A and B need a page each (three with two drafts). What is free beyond that is N's; nobody is admitted where they lack one."""
    due = 2 * (1 + lookahead)
    sched = make(10 + due + spare, conservativeness=0, decode_every=2, lookahead_tokens=lookahead)
    submit(sched, ask("A", 5, 6), ask("B", 5, 6))
    step(sched)
    submit(sched, ask("N", 1, 1))
    plan = sched.schedule()
    assert (plan.admitted, plan.retracted, plan.decodes) == (admitted, retracted, 2 - len(retracted))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_c4_decode_every_bounds_the_gap(every: int) -> None:
    """A long prefill takes whole steps, and in every third of them the decode goes first (case C42 for 1)."""
    sched = make(5000, max_step_tokens=10, decode_every=every)
    submit(sched, ask("D", 4, 100))
    step(sched)
    submit(sched, ask("L", 200, 1))
    given = [len(step(sched).decode_ids) for _ in range(18)]
    assert sched.snapshot()["max_gap"]["D"] == every
    assert sum(given) == 18 // every


def _never_ending(grant: int | None) -> tuple[Scheduler, int]:
    """A batch of decodes that takes the whole budget, and a prompt of 14 chunks beside it (case C43)."""
    sched = make(3200, max_step_tokens=10, chunk_tokens=10, prefill_grant=grant)
    submit(sched, *(ask(f"D{index}", 1, 300) for index in range(10)))
    step(sched)
    submit(sched, ask("L", 140, 1))
    for count in range(1, 200):
        step(sched)
        if "L" not in sched.snapshot()["requests"]:
            return sched, count
    return sched, 0


def test_c4_a_grant_bounds_the_wait_of_a_prefill() -> None:
    """A chunk in every eighth step at the latest: the first token within 14 x 8 = 112."""
    sched, steps = _never_ending(8)
    assert 0 < steps <= 112
    assert max(sched.snapshot()["max_gap"].values()) == 2  # all ten were served in every step but that one


def test_c4_a_grant_is_for_one() -> None:
    """Two newcomers are due, and five decodes want the whole budget of five: one newcomer goes before them."""
    sched = make(500, max_step_tokens=100, prefill_grant=1)
    submit(sched, *(ask(f"D{index}", 1, 50) for index in range(5)))
    step(sched)
    sched.set_limits(max_step_tokens=5)
    submit(sched, ask("N1", 1, 1), ask("N2", 1, 1))
    plan = step(sched)
    assert (plan.admitted, plan.decodes) == (("N1",), 4)


def test_c4_without_a_grant_decodes_always_go_first() -> None:
    assert _never_ending(None)[1] == 0


def test_c4_the_grant_goes_first_and_the_decode_bound_is_one_step_longer() -> None:
    """Ten decodes at a budget of 5 take turns with a gap of 2; with a grant of its whole budget due it is 3, never more."""
    sched = make(1500, max_step_tokens=10, chunk_tokens=10, prefill_grant=3)
    submit(sched, *(ask(f"D{index}", 1, 100) for index in range(10)))
    step(sched)
    submit(sched, ask("L", 400, 1))
    sched.set_limits(max_step_tokens=5)
    firsts = []
    for _ in range(30):
        plan = step(sched)
        firsts.append(plan.counts.tolist() == [5] and plan.decodes == 0)
    grants = [index for index, first in enumerate(firsts) if first]
    assert {after - before for before, after in itertools.pairwise(grants)} == {3}
    assert max(sched.snapshot()["max_gap"].values()) == 3


def test_c4_after_a_grant_that_put_decodes_off_decodes_go_first() -> None:
    """Five decodes and a chunk of five at a budget of five, with a grant due in every step: they alternate."""
    sched = make(500, max_step_tokens=5, prefill_grant=1)
    submit(sched, *(ask(f"D{index}", 1, 50) for index in range(5)))
    step(sched)
    submit(sched, ask("L", 100, 1))
    assert [step(sched).decodes for _ in range(7)] == [0, 5, 0, 5, 0, 5, 0]
    assert max(sched.snapshot()["max_gap"].values()) == 2


def test_c4_a_prefill_that_ends_leaves_its_place_in_the_same_step() -> None:
    sched = make(500, max_step_tokens=40, chunk_tokens=20, max_partial_prefills=1)
    submit(sched, ask("A", 50, 1), ask("B", 50, 1))
    assert chunks(step(sched)) == [("A", 0, 20)]
    assert why(sched, "B") == ("partial_prefill_limit", None)
    assert chunks(step(sched)) == [("A", 20, 20)]
    assert chunks(step(sched)) == [("A", 40, 10), ("B", 0, 20)]


def test_c4_a_prefill_that_would_end_needs_no_place() -> None:
    sched = make(500, max_step_tokens=40, chunk_tokens=20, max_partial_prefills=1)
    submit(sched, ask("A", 50, 1), ask("B", 21, 1), ask("C", 20, 1))
    assert chunks(step(sched)) == [("A", 0, 20), ("C", 0, 20)]
    assert why(sched, "B") == ("partial_prefill_limit", None)


@pytest.mark.parametrize("head", ["strict", "skip", "backfill"])
def test_c4_whole_prefills_wait_for_a_step_that_holds_them(head: str) -> None:
    """64 tokens a step: two decodes leave 62, L needs 63, and S, which needs 8, waits behind it until one of the two has ended."""
    sched = make(500, max_step_tokens=64, context_limit=64, max_partial_prefills=0, head=head)
    submit(sched, ask("D", 4, 5), ask("E", 4, 3))
    step(sched)
    submit(sched, ask("L", 63, 1), ask("S", 8, 1))
    for _ in range(2):
        assert step(sched).ids == ("D", "E")
        assert (why(sched, "L"), why(sched, "S")) == (("step_tokens", None), ("head_of_line", None))
    plan = step(sched)
    assert (plan.decode_ids, chunks(plan)) == (("D",), [("L", 0, 63)])
    assert why(sched, "S") == ("step_tokens", None)
    assert chunks(step(sched)) == [("S", 0, 8)]


def test_c4_a_resuming_request_is_computed_whole_as_well() -> None:
    """A was retracted after 5 tokens: 6 + 5 are computed again in one chunk, which a step of 12 holds beside one decode."""
    sched = make(500, max_step_tokens=12, context_limit=12, max_partial_prefills=0)
    submit(sched, ask("A", 6, 6))
    step(sched, 5)
    sched.pause("retract")
    sched.resume()
    assert chunks(step(sched)) == [("A", 0, 11)]


def test_c4_a_due_grant_computes_a_whole_prefill_before_the_decodes() -> None:
    sched = make(500, max_step_tokens=64, context_limit=64, max_partial_prefills=0, prefill_grant=2)
    submit(sched, *(ask(f"D{index}", 4, 50) for index in range(10)))
    step(sched)
    submit(sched, ask("L", 63, 1))
    assert [(plan.decodes, chunks(plan)) for plan in (step(sched), step(sched))] == [(10, []), (1, [("L", 0, 63)])]


@pytest.mark.parametrize(("prompt", "gone"), [(63, ("V",)), (64, ())])
def test_c4_nobody_is_displaced_for_a_whole_prefill_that_the_step_cannot_hold(prompt: int, gone: tuple[str, ...]) -> None:
    """Without V the decode of D leaves 63 tokens."""
    sched = make(500, max_step_tokens=64, context_limit=64, max_partial_prefills=0, max_running=2, preempt_priority=True)
    submit(sched, ask("D", 4, 5), ask("V", 4, 9, priority=1))
    step(sched)
    submit(sched, ask("H", prompt, 0))
    plan = step(sched)
    assert (plan.retracted, plan.admitted) == (gone, ("H",) if gone else ())
    drain(sched, 20)


def test_c4_the_long_cap_is_off_when_alone() -> None:
    sched = make(500, max_step_tokens=40, long_prefill_tokens=15)
    submit(sched, ask("A", 100, 1))
    assert chunks(step(sched)) == [("A", 0, 40)]
    submit(sched, ask("B", 30, 1))
    assert chunks(step(sched)) == [("A", 40, 15), ("B", 0, 15)]
    assert chunks(step(sched)) == [("A", 55, 15), ("B", 15, 15)]
    assert chunks(step(sched)) == [("A", 70, 30)]


@pytest.mark.parametrize(("decodes", "left"), [(10, 30), (39, 1)])
def test_c4_a_chunk_is_no_longer_than_the_pages_there_are(decodes: int, left: int) -> None:
    """40 pages are free and promised to A, and decodes that grow beyond their estimate take some: A's chunk shrinks (case C41)."""
    sched = make(decodes + 80, chunk_tokens=40, conservativeness=0)
    submit(sched, *(ask(f"D{index}", 1, 9) for index in range(decodes)), ask("A", 80, 1))
    step(sched)
    assert pages(sched)[0] == 40
    plan = step(sched)
    assert (plan.decodes, chunks(plan)) == (decodes, [("A", 40, left)])


def test_c4_a_chunk_without_a_page_is_parked() -> None:
    sched = make(120, chunk_tokens=40, conservativeness=0)
    submit(sched, *(ask(f"D{index}", 1, 9) for index in range(40)), ask("A", 80, 1))
    step(sched)
    plan = sched.schedule()
    assert (plan.decodes, chunks(plan), plan.retracted) == (40, [], ())
    assert why(sched, "A") == ("pages", 1)
