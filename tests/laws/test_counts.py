"""What the state counts: gaps between tokens, steps waited, tokens computed again; across retraction, pause and rollback."""

from __future__ import annotations

from loop import STOP, advance, ask, chunks, drain, make, step, submit, totals

from kvsched import Scheduler, StepResult


def gap(sched: Scheduler, key: str) -> int:
    found: dict[str, int] = sched.snapshot()["max_gap"]
    return found[key]


# -- gaps -------------------------------------------------------------------------------------------------------------


def test_a_gap_runs_from_token_to_token_across_a_retraction() -> None:
    """Tokens in steps 1, 2 and 3; two steps in the queue; the resume samples in step 6."""
    sched = make(100)
    submit(sched, ask("A", 5, 20))
    assert gap(sched, "A") == 0
    step(sched)
    assert gap(sched, "A") == 0  # one token, no gap
    step(sched, 2)
    assert gap(sched, "A") == 1
    sched.pause("retract")
    step(sched, 2)
    sched.resume()
    step(sched)
    assert gap(sched, "A") == 3
    step(sched, 3)
    assert gap(sched, "A") == 3


def test_a_gap_runs_from_a_late_token() -> None:
    """The fourth token is in flight at the retraction and comes with its commit; the next one is of step 7."""
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 5, 20))
    step(sched, 3)
    plan = sched.schedule()
    sched.pause("retract")
    sched.commit(plan, StepResult(tokens=[7]))
    assert gap(sched, "A") == 1
    step(sched, 2)
    sched.resume()
    step(sched)
    assert gap(sched, "A") == 3


def test_a_gap_can_end_with_a_late_token() -> None:
    """One token a step: B, left out in step 3, is in flight in step 4 when both are retracted, and resumes at once."""
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 5, 20), ask("B", 5, 20))
    step(sched, 2)
    sched.set_limits(max_step_tokens=1)
    assert step(sched).ids == ("A",)
    plan = sched.schedule()
    assert plan.ids == ("B",)
    sched.pause("retract")
    sched.commit(plan, StepResult(tokens=[7]))
    assert gap(sched, "B") == 2
    sched.set_limits(max_step_tokens=100)
    sched.resume()
    step(sched)
    assert gap(sched, "B") == 2


def test_a_gap_does_not_end_with_a_token_that_never_came() -> None:
    """The step in flight is taken back: the third token is the last one, and the next comes in step 6."""
    sched = make(100, max_in_flight=2)
    submit(sched, ask("A", 5, 20))
    step(sched, 3)
    plan = sched.schedule()
    sched.pause("retract")
    sched.rollback(plan)
    step(sched, 2)
    sched.resume()
    assert step(sched).step == 6
    assert gap(sched, "A") == 3


def test_a_gap_runs_across_a_pause() -> None:
    sched = make(100)
    submit(sched, ask("A", 5, 20))
    step(sched, 3)
    sched.pause("hold")
    step(sched, 4)
    sched.resume()
    step(sched)
    assert gap(sched, "A") == 5
    sched.pause("hold")
    step(sched, 2)
    sched.resume()
    step(sched)
    assert gap(sched, "A") == 5  # the longest


def test_a_gap_of_an_ended_request_is_told_at_its_end() -> None:
    sched = make(100)
    submit(sched, ask("A", 5, 3), ask("B", 5, 1), ask("C", 5, 2))
    step(sched)
    sched.pause("hold")
    step(sched)
    sched.resume()
    plan = sched.schedule()
    ended = sched.commit(plan, StepResult(tokens=[7, 7])).ended
    assert [(end.id, end.max_gap) for end in ended] == [("C", 2)]
    ended = sched.commit(sched.schedule(), StepResult(tokens=[7])).ended
    assert [(end.id, end.max_gap, end.waited_steps) for end in ended] == [("A", 2, 0)]


def test_skipping_a_turn_that_is_taken_back_leaves_no_gap() -> None:
    sched = make(100, max_step_tokens=100)
    submit(sched, ask("A", 5, 20), ask("B", 5, 20))
    step(sched)
    sched.set_limits(max_step_tokens=1)
    sched.rollback(sched.schedule())
    sched.set_limits(max_step_tokens=100)
    step(sched, 2)
    assert (gap(sched, "A"), gap(sched, "B")) == (1, 1)


# -- steps waited -----------------------------------------------------------------------------------------------------


def test_a_pass_that_is_taken_back_was_not_waited() -> None:
    sched = make(10)
    sched.hold_pages("lease", 10)
    submit(sched, ask("A", 5, 1))
    step(sched, 2)
    sched.rollback(sched.schedule())
    assert sched.explain("A").waited_steps == 2
    sched.release_pages("lease")
    plan = sched.schedule()
    assert sched.explain("A").waited_steps == 2
    assert sched.commit(plan, StepResult(tokens=[7])).ended[0].waited_steps == 2


def test_the_step_that_retracts_is_waited() -> None:
    """C is retracted in step 2 and comes back when A and B have ended."""
    sched = make(30, conservativeness=0)
    submit(sched, *(ask(key, 10, 11, stop_token_ids={STOP}) for key in "ABC"))
    step(sched)
    assert step(sched).retracted == ("C",)
    assert sched.explain("C").waited_steps == 1
    step(sched, stop=("A", "B"))
    assert sched.explain("C").waited_steps == 2
    assert step(sched).admitted == ("C",)
    assert sched.explain("C").waited_steps == 2


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_only_what_was_computed_before_counts_as_computed_again() -> None:
    """10 prompt tokens and 4 of the generated ones have KV; the resume computes 15, of which the last one is new."""
    sched = make(100)
    submit(sched, ask("A", 10, 20))
    step(sched, 5)
    sched.pause("retract")
    sched.resume()
    assert chunks(step(sched)) == [("A", 0, 15)]
    assert (totals(sched, "prefill_tokens"), totals(sched, "recomputed_tokens")) == (25, 14)


def test_a_prefill_that_is_cut_off_counts_what_was_computed() -> None:
    sched = make(100, chunk_tokens=4)
    submit(sched, ask("A", 10, 2))
    step(sched, 2)
    sched.pause("retract")
    sched.resume()
    drain(sched, 10)
    assert (totals(sched, "prefill_tokens"), totals(sched, "recomputed_tokens")) == (8 + 10, 8)


def test_a_chunk_in_flight_at_retraction_was_computed() -> None:
    sched = make(100, chunk_tokens=4, max_in_flight=2)
    submit(sched, ask("A", 10, 2))
    step(sched)
    plan = sched.schedule()
    sched.pause("retract")
    sched.commit(plan, StepResult(tokens=[7]))
    sched.resume()
    drain(sched, 10)
    assert (totals(sched, "prefill_tokens"), totals(sched, "recomputed_tokens")) == (8 + 10, 8)


def test_hits_are_counted_once_and_are_not_prefill() -> None:
    sched = make(100, 4, cache=True)
    submit(sched, ask("X", 9, 1, first=0))
    step(sched)
    submit(sched, ask("A", 11, 2, first=0))
    plan = sched.schedule()
    assert totals(sched, "cached_tokens") == 8
    sched.rollback(plan)
    assert totals(sched, "cached_tokens") == 0
    drain(sched, 5)
    assert (totals(sched, "cached_tokens"), totals(sched, "prefill_tokens"), totals(sched, "recomputed_tokens")) == (8, 9 + 3, 0)


def test_tokens_of_a_long_life_are_all_there() -> None:
    """More than four thousand steps: what is kept per step is folded into what is kept per request, and nothing is lost."""
    sched = make(20_000, max_running=2)
    submit(sched, ask("A", 3, 5000))
    said: dict[str, list[int]] = {"A": [], "B": []}
    for token in range(4600):
        if token == 1000:
            submit(sched, ask("B", 3, 4000))
        if token == 4400:
            sched.pause("retract")
            sched.resume()
        plan = sched.schedule()
        outcome = sched.commit(plan, StepResult(tokens=[token + 10_000 * at for at in range(len(plan))]))
        for key, given in zip(plan.ids, outcome.tokens.tolist(), strict=True):
            said[key].append(given)
    sched.check()
    assert (len(said["A"]), len(said["B"])) == (4600, 3600)
    for key, tokens in said.items():
        assert sched.generated(key).tolist() == tokens
        assert sched.request_state(key)["generated"] == len(tokens)


def test_the_hit_of_the_first_admission_is_told_apart_from_that_of_a_resume() -> None:
    """A finds two of its pages in the cache at first, and at its resume its own pages as well; a rollback in between changes nothing."""
    sched = make(100, 4, cache=True)
    submit(sched, ask("P", 9, 1, first=0))
    step(sched)
    submit(sched, ask("A", 17, 3, first=0), ask("N", 5, 1))
    sched.rollback(sched.schedule())
    step(sched)
    sched.pause("retract")
    sched.resume()
    ended = {}
    while sched.has_work():
        ended.update({end.id: end for end in advance(sched)[1].ended})
    assert (ended["A"].first_cached, ended["A"].cached, ended["A"].retractions) == (8, 16, 1)
