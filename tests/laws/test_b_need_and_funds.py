"""Laws B1 to B5: verdicts, the need of a request, what can be funded, and what the cache promises."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from loop import ask, chunks, drain, make, pages, running, step, submit, totals, why

from kvsched import RadixCache, RefusalReason, Refused, StepResult
from kvsched.admission import budget, intake, ledger, ratio
from kvsched.verdict import Verdict, decide

# -- B1 ---------------------------------------------------------------------------------------------------------------


def test_b1_no_decision_knows_of_a_chunk() -> None:
    with pytest.raises(TypeError):
        decide(640, 100, 100, chunk_tokens=1)  # type: ignore[call-arg]  # it is not to be had
    for room in (budget, intake, ledger, ratio):
        for name, function in inspect.getmembers(room, inspect.isfunction):
            assert not [key for key in inspect.signature(function).parameters if "chunk" in key], f"{room.__name__}.{name}"
    assert list(inspect.signature(decide).parameters) == ["need", "fundable", "ceiling"]


def test_b1_a_request_is_charged_its_length_and_not_its_chunk() -> None:
    """25,000 pages of 16. A of 327,680 tokens is 20,480 pages and computes 512 tokens, 32 pages: a 640th of them."""
    sched = make(25_000, 16, chunk_tokens=512, max_step_tokens=8192)
    submit(sched, ask("A", 327_680, 1), ask("B", 327_680, 1))
    assert chunks(step(sched)) == [("A", 0, 512)]
    assert sched.snapshot()["reserved"] == 20_480 - 32
    assert why(sched, "B") == ("commitment", 20_480 - (25_000 - 20_480))


# -- B2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("need", "fundable", "ceiling", "verdict"), [
    (99, 99, 100, Verdict.ADMIT), (100, 100, 100, Verdict.ADMIT), (100, 99, 100, Verdict.DEFER), (101, 1000, 100, Verdict.REFUSE),
    (101, 0, 100, Verdict.REFUSE), (0, 0, 0, Verdict.ADMIT),
])
def test_b2_three_verdicts(need: int, fundable: int, ceiling: int, verdict: Verdict) -> None:
    assert decide(need, fundable, ceiling) is verdict


def test_b2_no_share_of_the_pool_is_kept_back() -> None:
    """99 % of a large pool goes in, 101 % of a small one does not, and neither does anything in between."""
    large = make(100_000)
    submit(large, ask("R", 99_000, 1))
    assert step(large).admitted == ("R",)
    small = make(100)
    assert small.submit(ask("R", 101, 1)) == Refused("R", RefusalReason.NEVER_FITS, 101, 100, retryable=False)
    submit(small, ask("S", 100, 1))
    assert step(small).admitted == ("S",)


def test_b2_the_band_between_ceiling_and_capacity_is_refused() -> None:
    """50 pages configured, 1 reserved: a need of 50 can never be met, and deferring it would wedge the queue."""
    sched = make(50, 16, reserved=1)
    assert sched.submit(ask("R", 50 * 16, 1)) == Refused("R", RefusalReason.NEVER_FITS, 50, 49, retryable=False)
    submit(sched, ask("S", 49 * 16, 1))
    assert step(sched).admitted == ("S",)


def test_b2_pins_lower_the_ceiling() -> None:
    """100 pages, 20 of them pinned: 85 are refused for good, 80 are not (case C84)."""
    sched = make(100, 4, cache=True, pin_limit_pages=20)
    submit(sched, ask("X", 80, 1, pin=20))
    step(sched)
    assert sched.max_servable_tokens == 320
    assert sched.submit(ask("R", 85 * 4, 1)) == Refused("R", RefusalReason.NEVER_FITS, 85, 80, retryable=False)
    submit(sched, ask("S", 80 * 4, 1))
    assert step(sched).admitted == ("S",)


# -- B3 ---------------------------------------------------------------------------------------------------------------


def test_b3_all_of_it_is_reserved_in_guaranteed_mode() -> None:
    """P = 100, N = 50: 149 slots. The next in line needs 51, and gets them; one more does not."""
    sched = make(200, admission="guaranteed")
    submit(sched, ask("A", 100, 50), ask("B", 1, 52))
    assert step(sched).admitted == ("A",)
    assert sched.snapshot()["reserved"] == 49
    assert why(sched, "B") == ("commitment", 1)
    sched.abort("B")
    submit(sched, ask("C", 1, 51))
    assert step(sched).admitted == ("C",)


def test_b3_an_estimate_is_reserved_in_expected_mode() -> None:
    """At ratio 0.7, A is expected to write ceil(0.7 x 49) = 35 of its 49 further slots: 135 of 200 are its own."""
    sched = make(200, ratio_start="initial")
    submit(sched, ask("A", 100, 50), ask("B", 66, 1))
    assert step(sched).admitted == ("A",)
    assert sched.snapshot()["reserved"] == 35
    assert why(sched, "B") == ("commitment", 1)
    fits = make(200, ratio_start="initial")
    submit(fits, ask("A", 100, 50), ask("B", 65, 1))
    assert step(fits).admitted == ("A", "B")


def test_b3_the_estimate_is_clipped() -> None:
    """Four requests of 100 + 200,000 in 262,144 pages: 1,024 beyond the prompt each with a clip of 1,024 (case C06)."""
    def four(**config: Any) -> Any:
        sched = make(262_144, **config)
        submit(sched, *(ask(key, 100, 200_000) for key in "ABCD"))
        step(sched)
        return sched

    clipped = four(clip_new_tokens=1024, ratio_start="initial")
    assert running(clipped) == ["A", "B", "C", "D"]
    assert clipped.snapshot()["reserved"] == 4 * 1024
    whole = four(admission="guaranteed")
    assert running(whole) == ["A"]
    assert why(whole, "B") == ("commitment", 2 * 200_099 - 262_144)


def test_b3_the_base_is_what_is_computed_or_to_be_computed() -> None:
    """P = 100, chunk 30, N = 51, ratio 0: while the prompt is computed 100 slots are reserved for, then what is computed."""
    sched = make(200, chunk_tokens=30, conservativeness=0)
    submit(sched, ask("A", 100, 51))
    reserved = []
    for _ in range(6):
        step(sched)
        reserved.append(sched.snapshot()["reserved"])
    assert reserved == [70, 40, 10, 0, 0, 0]
    assert pages(sched)[3] == 102


@pytest.mark.parametrize(("free", "admitted"), [(1, ("C",)), (0, ())])
def test_b3_the_match_is_taken_off(free: int, admitted: tuple[str, ...]) -> None:
    """6 pages of 4: 2 hold C's first 8 tokens. C writes 12 slots, 3 pages, of which it lacks 1."""
    sched = make(6, 4, cache=True, admission="guaranteed")
    submit(sched, ask("X", 8, 1, first=0))
    step(sched)
    sched.hold_pages("lease", 4 - free)
    submit(sched, ask("C", 9, 4, first=0))
    assert step(sched).admitted == admitted
    assert why(sched, "C") == ((None, None) if admitted else ("pinned_pages", 1))


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_b3_sums_are_of_pages(admission: str, chunk: int | None) -> None:
    """Page 16, three times 17 tokens: 2 pages each are 6, where 51 tokens would be 4."""
    sched = make(5, 16, admission=admission, chunk_tokens=chunk, conservativeness=0)
    submit(sched, ask("A", 17, 1), ask("B", 17, 1), ask("C", 17, 1))
    assert step(sched).admitted == ("A", "B")
    if chunk is not None:
        assert sched.snapshot()["reserved"] == 2


def test_b3_submit_judges_at_ratio_one_with_nothing_held() -> None:
    sched = make(100, conservativeness=0)
    assert sched.submit(ask("R", 50, 52)) == Refused("R", RefusalReason.NEVER_FITS, 101, 100, retryable=False)
    submit(sched, ask("S", 50, 51))


def test_b3_guaranteed_never_retracts() -> None:
    """Twelve requests that would want 1.5 times the pool together."""
    sched = make(40, 4, admission="guaranteed", max_step_tokens=30)
    for index in range(12):
        submit(sched, ask(f"R{index}", 5 + 3 * index % 17, 1 + 7 * index % 23))
    while sched.has_work():
        assert step(sched).retracted == ()
    assert totals(sched, "retractions") == 0
    assert totals(sched, "emitted") == sum(1 + 7 * index % 23 for index in range(12))


# -- B4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}], ids=["plain", "ignore_eos"])
def test_b4_a_request_as_large_as_the_pool_completes_alone(admission: str, page_size: int, fields: dict[str, Any]) -> None:
    """P = pool, N = 1, chunk < P: a continuation does not compete with its own promise. 96 tokens in chunks of 10."""
    sched = make(96 // page_size, page_size, admission=admission, chunk_tokens=10)
    submit(sched, ask("R", 96, 1, **fields))
    assert drain(sched, 20) == 10
    assert totals(sched, "emitted") == 1


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
def test_b4_a_resume_does_not_compete_with_its_own_promise(admission: str) -> None:
    sched = make(96, admission=admission, chunk_tokens=10)
    submit(sched, ask("R", 90, 7))
    step(sched, 12)
    sched.pause("retract")
    sched.resume()
    assert sched.request_state("R")["status"] == "waiting"
    drain(sched, 30)
    assert totals(sched, "emitted") == 7


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
def test_b4_blocks_do_not_compete_with_their_own_promise(admission: str) -> None:
    """P = 92, N = 5: 96 slots, all there are; the block of 4 opens when the prefill is done."""
    sched = make(96, admission=admission, chunk_tokens=10)
    submit(sched, ask("R", 92, 5, block_tokens=4))
    step(sched, 10)
    plan = sched.schedule()
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([92], [4])
    outcome = sched.commit(plan, StepResult(tokens=[[1, 2, 3, 4]], final=[0]))
    assert [end.generated for end in outcome.ended] == [5]


def test_b4_promises_to_others_are_taken_off() -> None:
    """Fundable = 40 free - 0 - 29 promised to A and not yet held."""
    sched = make(50, admission="guaranteed", chunk_tokens=10)
    submit(sched, ask("A", 30, 10))
    step(sched)
    assert pages(sched)[0] == 40
    assert sched.snapshot()["reserved"] == 39 - 10
    submit(sched, ask("B", 12, 1))
    step(sched)
    assert why(sched, "B") == ("commitment", 1)
    sched.abort("B")
    submit(sched, ask("C", 11, 1))
    assert step(sched).admitted == ("C",)


def test_b4_promises_of_one_pass_count_in_the_same_pass() -> None:
    sched = make(50, admission="guaranteed", chunk_tokens=10)
    submit(sched, ask("A", 30, 1), ask("B", 30, 1))
    assert step(sched).admitted == ("A",)
    assert why(sched, "B") == ("commitment", 10)


def test_b4_the_match_is_locked_when_funds_are_read() -> None:
    """6 pages of 1: 3 cached, 2 held by the host, 1 free. C matches those 3 and lacks 2: with its match locked 1 is left."""
    sched = make(6, cache=True, admission="guaranteed")
    submit(sched, ask("X", 3, 1, first=0))
    step(sched)
    sched.hold_pages("lease", 2)
    submit(sched, ask("C", 4, 2, first=0))
    assert step(sched).admitted == ()
    assert why(sched, "C") == ("pinned_pages", 1)
    assert pages(sched) == (1, 3, 0, 0, 2)  # and no lock is left behind


@pytest.mark.parametrize(("head", "admitted"), [("strict", ("R",)), ("backfill", ("R", "C")), ("skip", ("R", "C"))])
def test_b4_who_is_not_admitted_leaves_no_lock(head: str, admitted: tuple[str, ...]) -> None:
    """8 pages of 4, 2 of them cached. R takes 5 of its own, so B lacks 3 beside its hit and waits; C lacks 1."""
    sched = make(8, 4, cache=True, admission="guaranteed", head=head)
    submit(sched, ask("X", 8, 1, first=0))
    step(sched)
    submit(sched, ask("R", 17, 4, cache_write=False), ask("B", 20, 1, first=0), ask("C", 12, 1, first=0))
    assert step(sched).admitted == admitted
    assert why(sched, "B") == ("pages", 2)
    assert pages(sched)[2] == 0  # C, where it was there, has ended; R shares nothing


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
@pytest.mark.parametrize(("pool", "together"), [(40, True), (39, False)])
def test_b4_known_lengths_are_reserved_by_their_peak(admission: str, pool: int, together: bool) -> None:
    """A ends with 20 slots when B has written 20 of its 25: the peak is 40, where the sum would be 45."""
    sched = make(pool, admission=admission)
    submit(sched, ask("A", 10, 11, ignore_eos=True), ask("B", 10, 16, ignore_eos=True))
    step(sched)
    assert running(sched) == (["A", "B"] if together else ["A"])
    drain(sched, 60)
    assert totals(sched, "retractions") == 0
    assert totals(sched, "emitted") == 27


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
def test_b4_the_peak_of_three(admission: str) -> None:
    """Remaining tokens 2, 6 and 20, from 4 slots each: peaks 18 at 2, 20 at 6, then 24 alone. A pool of 24 takes all three."""
    sched = make(24, admission=admission)
    submit(sched, ask("A", 4, 3, ignore_eos=True), ask("B", 4, 7, ignore_eos=True), ask("C", 4, 21, ignore_eos=True))
    assert step(sched).admitted == ("A", "B", "C")
    while sched.has_work():
        assert step(sched).retracted == ()
    assert totals(sched, "emitted") == 31


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_b4_the_peak_holds_while_prompts_are_chunked(chunk: int) -> None:
    """Prefill and decode move at different speeds; nobody is retracted and everybody ends all the same."""
    sched = make(40, admission="guaranteed", chunk_tokens=chunk)
    submit(sched, ask("A", 10, 11, ignore_eos=True), ask("B", 10, 16, ignore_eos=True))
    drain(sched, 100)
    assert totals(sched, "retractions") == 0
    assert totals(sched, "emitted") == 27


def test_b4_a_block_is_charged_when_it_opens_and_moves_when_it_is_final() -> None:
    """P = 8, N = 9, page 4: 16 slots. Each of the two blocks takes one page, once, however many passes it needs."""
    sched = make(4, 4, admission="guaranteed")
    submit(sched, ask("R", 8, 9, block_tokens=4))
    step(sched)
    seen = []
    for final in (False, False, True, False, True):
        plan = sched.schedule()
        outcome = sched.commit(plan, StepResult(tokens=[[1, 2, 3, 4]], final=[0] if final else None))
        sched.check()
        delivered = outcome.tokens[outcome.tokens >= 0].tolist()
        computed = sched.request_state("R")["computed"] if not outcome.ended else 16
        seen.append((int(plan.starts[0]), int(plan.counts[0]), len(plan.deltas), delivered, computed))
    assert seen == [
        (8, 4, 1, [], 8), (8, 4, 0, [], 8), (8, 4, 0, [1, 2, 3, 4], 12),
        (12, 4, 1, [], 12), (12, 4, 0, [1, 2, 3, 4], 16),
    ]
    assert not sched.has_work()


# -- B5 ---------------------------------------------------------------------------------------------------------------


def test_b5_evict_delivers_what_evictable_says_and_takes_tails() -> None:
    tree = RadixCache(4)
    tokens, held = np.arange(20, dtype=np.int32), np.arange(10, 15, dtype=np.int32)
    handle = tree.lock("space", tokens[:0])
    tree.extend(handle, tokens, held)
    assert (tree.evictable, tree.locked) == (0, 5)
    assert tree.evict(3).tolist() == []  # what is locked is not evictable
    tree.unlock(handle)
    assert (tree.evictable, tree.locked) == (5, 0)
    assert sorted(tree.evict(2).tolist()) == [13, 14]  # a leaf longer than what is asked gives up its tail
    assert tree.match("space", tokens) == 12
    assert (tree.evictable, len(tree.evict(100)), tree.evictable) == (3, 3, 0)


def test_b5_a_locked_part_is_not_promised() -> None:
    """The first 3 of 5 pages are locked: 2 can be had, and 2 are delivered."""
    tree = RadixCache(4)
    tokens = np.arange(20, dtype=np.int32)
    handle = tree.lock(None, tokens[:0])
    tree.extend(handle, tokens, np.arange(5, dtype=np.int32))
    tree.unlock(handle)
    shorter = tree.lock(None, tokens[:12])
    assert (tree.evictable, tree.locked) == (2, 3)
    assert len(tree.evict(5)) == 2
    assert shorter.pages.tolist() == [0, 1, 2]


def test_b5_what_can_be_evicted_funds_a_newcomer() -> None:
    """8 pages, all cached and unlocked: a newcomer of 5 is admitted, and exactly 5 go."""
    sched = make(8, 4, cache=True, admission="guaranteed")
    submit(sched, ask("X", 32, 1))
    step(sched)
    assert pages(sched) == (0, 8, 0, 0, 0)
    submit(sched, ask("R", 20, 1))
    plan = sched.schedule()
    assert (plan.admitted, plan.evicted) == (("R",), 5)
    assert pages(sched) == (0, 3, 0, 5, 0)
