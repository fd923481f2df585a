"""Laws C1 to C3: the token ratio, who is retracted and how it comes back, and that things move."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from loop import ask, chunks, drain, make, pages, running, step, submit, totals, until, waiting, why

from kvsched import Finish, Plan, Scheduler, Status, StepResult
from kvsched.admission.ratio import TokenRatio
from kvsched.config import ORDERS

# -- C1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("conservativeness", "initial", "minimum"), [(1.0, 0.7, 0.098), (2.0, 1.0, 0.14), (0.5, 0.35, 0.049), (0, 0, 0)])
def test_c1_start_minimum_and_decay(conservativeness: float, initial: float, minimum: float) -> None:
    """0.7 c, at most 1; 0.14 of that at the least, reached in 600 steps and not left downwards."""
    ratio = TokenRatio(conservativeness, "initial")
    assert ratio.value == pytest.approx(initial)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx((initial + minimum) / 2)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx(minimum)
    ratio.decay()
    assert ratio.value == pytest.approx(minimum)
    ratio.reset()
    assert ratio.value == pytest.approx(initial)
    assert TokenRatio(conservativeness, "minimum").value == pytest.approx(minimum)


@pytest.mark.parametrize(("generated", "survivors", "most", "value"), [
    (30, 2, 200, 0.35), (100, 3, 100, 1.0), (0, 1, 1000, 0.098), (0, 0, 0, 0.4),
])
def test_c1_after_a_retraction_it_is_made_of_the_survivors(generated: int, survivors: int, most: int, value: float) -> None:
    """(tokens generated + 20 for each) / what they may generate, between the minimum and 1; nobody left: as it was."""
    ratio = TokenRatio(1.0, "minimum")
    ratio.value = 0.4
    ratio.retracted(generated, survivors, most)
    assert ratio.value == pytest.approx(value)


def test_c1_it_decays_with_decode_steps_and_is_reset_when_idle() -> None:
    sched = make(1000, ratio_start="initial", chunk_tokens=10)
    submit(sched, ask("A", 30, 4))
    values = []
    for _ in range(6):
        step(sched)
        values.append(sched.snapshot()["ratio"])
    decay = (0.7 - 0.098) / 600
    # three steps of prefill, three of decode; with the last of them nothing is left to do
    assert values == pytest.approx([0.7, 0.7, 0.7, 0.7 - decay, 0.7 - 2 * decay, 0.7])


@pytest.mark.parametrize(("new", "value"), [(20, 1.0), (100, 42 / 200)])
def test_c1_it_jumps_in_the_step_that_retracts(new: int, value: float) -> None:
    """30 slots for A, B and C of 10 each: in step 2 C goes. A and B have one token each: (1 + 1 + 2 x 20) / (2 x new)."""
    sched = make(230, conservativeness=0)
    sched.hold_pages("lease", 200)
    submit(sched, ask("A", 10, new), ask("B", 10, new), ask("C", 10, new))
    step(sched)
    assert sched.snapshot()["ratio"] == 0
    plan = sched.schedule()
    assert plan.retracted == ("C",)
    assert sched.snapshot()["ratio"] == pytest.approx(value)
    sched.rollback(plan)
    assert sched.snapshot()["ratio"] == 0  # the ratio goes back, the retraction stays
    assert running(sched) == ["A", "B"]


def test_c1_who_ignores_eos_reserves_all() -> None:
    sched = make(100, conservativeness=0)
    submit(sched, ask("A", 10, 31, ignore_eos=True), ask("B", 10, 31))
    step(sched)
    assert sched.snapshot()["reserved"] == 30


# -- C2 ---------------------------------------------------------------------------------------------------------------


def collide(sizes: dict[str, tuple[int, int]], *, new: int = 20, **config: Any) -> Plan:
    """Residents {id: (prompt, priority)} fill the pool exactly; the next step needs a page each, and there is none."""
    sched = make(sum(prompt for prompt, _ in sizes.values()), conservativeness=0, **config)
    submit(sched, *(ask(key, prompt, min(new, 1 + sum(p for p, _ in sizes.values()) - prompt), priority=priority)
                    for key, (prompt, priority) in sizes.items()))
    assert step(sched).admitted == tuple(sizes)
    return step(sched)


@pytest.mark.parametrize(("sizes", "victims"), [
    # worst priority first, whatever it loses
    ({"A": (9, 0), "B": (9, 0), "C": (12, 5)}, ("C",)),
    # then the one that loses least
    ({"A": (10, 0), "B": (8, 0), "C": (12, 0)}, ("B",)),
    # then the latest arrival
    ({"A": (10, 0), "B": (10, 0), "C": (10, 0)}, ("C",)),
    # never the oldest of the best priority
    ({"A": (2, 0), "B": (14, 0), "C": (14, 0)}, ("C",)),
    ({"A": (10, 5), "B": (10, 0), "C": (10, 0)}, ("A",)),
    ({"A": (10, 5), "B": (1, 0), "C": (10, 0)}, ("A",)),
    # one page is not enough for two who stay
    ({"A": (10, 0), "B": (1, 0), "C": (10, 0), "D": (1, 1)}, ("D", "B")),
    ({"A": (10, 0), "B": (10, 0), "D": (1, 1)}, ("D", "B")),
])
def test_c2_who_is_retracted(sizes: dict[str, tuple[int, int]], victims: tuple[str, ...]) -> None:
    plan = collide(sizes)
    assert plan.retracted == victims
    assert set(plan.decode_ids) == set(sizes) - set(victims)


def test_c2_what_stays_in_the_tree_is_not_lost() -> None:
    """Page 4. B computed 10 tokens, of which the tree can keep 8; C 8, none of which may be kept: B is cheaper (2 against 8)."""
    sched = make(7, 4, cache=True, conservativeness=0)
    submit(sched, ask("A", 8, 9), ask("B", 10, 9), ask("C", 8, 9, cache_write=False))
    step(sched)
    assert pages(sched) == (0, 0, 4, 3, 0)
    plan = step(sched)
    assert plan.retracted == ("B",)
    assert set(plan.decode_ids) == {"A", "C"}
    # the first two pages of B are valid and can be evicted; two pages were needed, one was free already
    assert plan.evicted == 1


def test_c2_demand_is_read_again_after_each_victim() -> None:
    """Page 16: B and C are at the end of their page, A is not. C gives one page and wants none itself: enough for B."""
    sched = make(3, 16, conservativeness=0)
    submit(sched, ask("A", 5, 9), ask("B", 16, 9), ask("C", 16, 9))
    step(sched)
    plan = step(sched)
    assert plan.retracted == ("C",)
    assert set(plan.decode_ids) == {"A", "B"}


def test_c2_a_finished_request_is_no_victim() -> None:
    """C's last slot is in flight: it is as good as gone, its page is on its way, and nobody is retracted for it."""
    sched = make(12, conservativeness=0, max_in_flight=2)
    submit(sched, ask("A", 4, 9), ask("B", 4, 9), ask("C", 1, 2))
    first = sched.schedule()
    sched.commit(first, StepResult(tokens=[7] * 3))
    second = sched.schedule()
    assert len(second.decode_ids) == 3
    assert pages(sched)[0] == 0
    third = sched.schedule()  # A and B want a page each; C's two are on their way
    assert (third.retracted, len(third)) == ((), 0)
    sched.commit(second, StepResult(tokens=[7] * 3))
    sched.commit(third, StepResult(tokens=[]))
    assert set(step(sched).decode_ids) == {"A", "B"}


def _fenced() -> tuple[Scheduler, Plan, Plan]:
    """16 pages of 16, four requests of 63 tokens and 4 pages, two plans in flight: the second finds no page (case C28)."""
    sched = make(16, 16, conservativeness=0, max_in_flight=2)
    submit(sched, *(ask(f"R{index}", 63, 10) for index in range(1, 5)))
    step(sched)
    second = sched.schedule()
    third = sched.schedule()
    return sched, second, third


def test_c2_pages_on_their_way_count() -> None:
    sched, second, third = _fenced()
    assert third.retracted == ("R4",)  # its four pages are enough for the other three, though none is free yet
    assert (len(third), third.status) == (0, Status.IN_FLIGHT)
    assert pages(sched) == (0, 0, 0, 12, 4)
    sched.commit(second, StepResult(tokens=[7, 8, 9, 10]))
    assert pages(sched) == (4, 0, 0, 12, 0)
    sched.commit(third, StepResult(tokens=[]))
    plan = step(sched)
    assert plan.decode_ids == ("R1", "R2", "R3")
    assert plan.retracted == ()


def test_c2_who_can_be_served_is_by_age() -> None:
    """As before with one page more: it is free now, and R1's. R2 and R3 skip the step, though their pages are on the way."""
    sched = make(17, 16, conservativeness=0, max_in_flight=2)
    submit(sched, *(ask(f"R{index}", 63, 10) for index in range(1, 5)))
    step(sched)
    second, third = sched.schedule(), sched.schedule()
    assert (third.retracted, third.decode_ids) == (("R4",), ("R1",))
    assert {why(sched, key) for key in ("R2", "R3")} == {("pages", 1)}
    sched.commit(second, StepResult(tokens=[7] * 4))
    sched.commit(third, StepResult(tokens=[7]))
    assert step(sched).decode_ids == ("R1", "R2", "R3")


def test_c2_the_late_token_is_delivered_once_and_joins_the_resume() -> None:
    sched, second, third = _fenced()
    outcome = sched.commit(second, StepResult(tokens=[7, 8, 9, 10]))
    assert outcome.tokens.tolist() == [7, 8, 9, 10]
    assert sched.generated("R4").tolist() == [7, 10]  # 7 of the prefill step
    sched.commit(third, StepResult(tokens=[]))
    for key in ("R1", "R2", "R3"):
        sched.abort(key)
    plan = sched.schedule()
    assert chunks(plan) == [("R4", 0, 65)]
    assert plan.prefill[0].tokens[-2:].tolist() == [7, 10]
    sched.commit(plan, StepResult(tokens=[11]))
    assert sched.generated("R4").tolist() == [7, 10, 11]


def test_c2_a_late_token_can_be_the_last() -> None:
    sched = make(16, 16, conservativeness=0, max_in_flight=2)
    submit(sched, *(ask(f"R{index}", 63, 10) for index in range(1, 4)), ask("R4", 63, 10, stop_token_ids={1}))
    step(sched)
    second, third = sched.schedule(), sched.schedule()
    assert third.retracted == ("R4",)
    outcome = sched.commit(second, StepResult(tokens=[7, 7, 7, 1]))
    assert outcome.finish.tolist() == [0, 0, 0, Finish.STOP]
    assert [(end.id, end.generated, end.retractions) for end in outcome.ended] == [("R4", 2, 1)]
    assert waiting(sched) == []


@pytest.mark.parametrize("order", ORDERS)
def test_c2_a_retracted_request_resumes_first_under_every_order(order: str) -> None:
    """B would go first: shorter, more output, another tenant. It never started, and is of the same priority."""
    sched = make(100, order=order, max_running=1)
    submit(sched, ask("A", 20, 5, tenant="a"))
    step(sched, 2)
    sched.pause("retract")
    submit(sched, ask("B", 5, 50, tenant="b"))
    sched.resume()
    assert step(sched).admitted == ("A",)


@pytest.mark.parametrize("order", ORDERS)
def test_c2_a_strictly_better_priority_still_goes_first(order: str) -> None:
    sched = make(100, order=order, max_running=1)
    submit(sched, ask("A", 20, 5))
    step(sched, 2)
    sched.pause("retract")
    submit(sched, ask("B", 5, 50, priority=-1), ask("C", 5, 50, priority=1))
    sched.resume()
    assert step(sched).admitted == ("B",)


def test_c2_several_resume_by_arrival() -> None:
    sched = make(100, max_running=3)
    submit(sched, ask("A", 9, 9), ask("B", 9, 9), ask("C", 9, 9))
    step(sched)
    sched.abort("A")
    sched.pause("retract")
    sched.resume()
    submit(sched, ask("D", 9, 9))
    sched.set_limits(max_running=1)
    assert waiting(sched) == ["B", "C", "D"]
    assert step(sched).admitted == ("B",)


def test_c2_no_token_is_lost_and_none_repeated() -> None:
    """Three requests of 10 + 20 in 40 slots. Every step samples another token; what arrived is what was sampled, once each."""
    sched = make(40, conservativeness=0)
    submit(sched, *(ask(key, 10, 20) for key in "ABC"))
    got: dict[str, list[int]] = {key: [] for key in "ABC"}
    for token in itertools.count(100, 10):
        if not sched.has_work():
            break
        plan = sched.schedule()
        for chunk in plan.prefill:
            if chunk.start + chunk.length > 10:  # a resume computes what it generated
                assert chunk.tokens[max(10 - chunk.start, 0):].tolist() == got[chunk.id][max(chunk.start - 10, 0) :]
        outcome = sched.commit(plan, StepResult(tokens=[token + index for index in range(len(plan))]))
        for key, given in zip(plan.ids, outcome.tokens.tolist(), strict=True):
            if given >= 0:
                got[key].append(given)
        sched.check()
    assert {key: len(tokens) for key, tokens in got.items()} == dict.fromkeys("ABC", 20)
    assert totals(sched, "retractions") > 0
    assert totals(sched, "emitted") == 60


@pytest.mark.parametrize(("new", "left", "admitted"), [(20, 13, ()), (20, 14, ("V",)), (4, 13, ("V",)), (4, 12, ())])
def test_c2_readmitted_when_need_and_a_page_of_growth_fit(new: int, left: int, admitted: tuple[str, ...]) -> None:
    """V has 10 + 3 tokens to compute: 14 slots with a page of growth, but never more than it can write (13 for N = 4)."""
    sched = make(40, conservativeness=0)
    submit(sched, ask("V", 10, new))
    step(sched, 3)
    sched.pause("retract")
    sched.resume()
    sched.hold_pages("lease", 40 - left)
    assert step(sched).admitted == admitted
    if not admitted:
        assert why(sched, "V")[1] == 1


def test_c2_a_step_that_retracted_admits_nobody() -> None:
    """C gives 10 slots and 2 are used. D needs 1, and has the best priority: it comes in the next step, and C after it."""
    sched = make(30, conservativeness=0, clip_new_tokens=1)
    submit(sched, *(ask(key, 10, 20) for key in "ABC"))
    step(sched)
    submit(sched, ask("D", 1, 1, priority=-1))
    plan = step(sched)
    assert (plan.retracted, plan.admitted) == (("C",), ())
    assert step(sched).admitted == ("D",)


def test_c2_what_a_victim_computed_stays_in_the_tree() -> None:
    """Page 4. B is retracted with 8 + 5 slots: three whole pages are cached, and its resume computes what is behind them."""
    sched = make(16, 4, cache=True, chunk_tokens=100)
    submit(sched, ask("B", 8, 9))
    step(sched, 6)
    sched.pause("retract")
    assert pages(sched) == (13, 3, 0, 0, 0)
    sched.resume()
    assert chunks(step(sched)) == [("B", 12, 2)]
    assert totals(sched, "recomputed_tokens") == 1  # the thirteenth was computed before, the fourteenth was not


def test_c2_c27_they_collide_once() -> None:
    """Page 16, 16 pages, A and B of 100 + 100. They meet at 8 pages each; B waits until A has ended."""
    sched = make(16, 16)
    submit(sched, ask("A", 100, 100), ask("B", 100, 100))
    until(sched, lambda plan: plan.retracted == ("B",))
    assert (len(sched.generated("A")), len(sched.generated("B"))) == (30, 29)
    until(sched, lambda plan: "B" in plan.admitted)
    assert totals(sched, "finished") == 1
    drain(sched, 200)
    assert totals(sched, "retractions") == 1
    assert totals(sched, "emitted") == 200


# -- C3 ---------------------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (3, 4), (5, 4), (8, 1), (2, 7), (1, 8))


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
@pytest.mark.parametrize("cache", [False, True])
def test_c3_some_request_can_always_run_to_its_end(admission: str, cache: bool) -> None:
    """Every triple of six shapes, each of which fits 4 pages of 2 alone: all end, with every token."""
    for index, shapes in enumerate(itertools.product(SHAPES, repeat=3)):
        sched = make(4, 2, cache=cache, admission=admission, conservativeness=0, chunk_tokens=1 + index % 4, head=("strict", "backfill", "skip")[index % 3])
        for key, (prompt, new) in zip("ABC", shapes, strict=True):
            submit(sched, ask(key, prompt, new, ignore_eos=bool(index % 2)))
        for _ in range(80):
            if not sched.has_work():
                break
            plan = sched.schedule()
            sched.commit(plan, StepResult(tokens=[7] * len(plan)))
        assert not sched.has_work(), (shapes, sched.snapshot())
        assert totals(sched, "emitted") == sum(new for _, new in shapes)


def test_c3_two_known_lengths_whose_prompts_are_chunked() -> None:
    """6 slots. A: 1 + 4, B: 3 + 2, four slots each, peak 6. In chunks of one they would meet at 3 and 3: one of them waits."""
    sched = make(6, admission="guaranteed", chunk_tokens=1)
    submit(sched, ask("A", 1, 4, ignore_eos=True), ask("B", 3, 2, ignore_eos=True))
    assert step(sched).admitted == ("A", "B")
    drain(sched, 20)
    assert (totals(sched, "emitted"), totals(sched, "retractions")) == (6, 0)


def test_c3_a_decode_does_not_take_the_page_that_lets_another_end() -> None:
    """6 slots. A: 4 + 1 with one token left to compute, B: 2 + 3 with two. One slot is free: it is A's."""
    sched = make(6, admission="guaranteed", chunk_tokens=3)
    submit(sched, ask("A", 4, 1, ignore_eos=True), ask("B", 2, 3, ignore_eos=True))
    assert step(sched).admitted == ("A", "B")
    assert pages(sched)[0] == 1
    assert step(sched).ids == ("A",)
    drain(sched, 20)
    assert (totals(sched, "emitted"), totals(sched, "retractions")) == (4, 0)
