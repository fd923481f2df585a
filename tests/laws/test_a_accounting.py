"""Laws A1 to A4: one unit, the slots of a request, owners of pages, children."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from loop import TERMS, advance, ask, chunks, drain, make, pages, running, step, submit, totals, why

import kvsched
from kvsched import Accepted, Finish, PagePool, RefusalReason, Refused, Status, StepResult
from kvsched.errors import AccountingError, DoubleFree, DuplicateRequest

SOURCE = Path(kvsched.__file__).parent

# -- A1 ---------------------------------------------------------------------------------------------------------------


def test_a1_every_page_is_in_exactly_one_term() -> None:
    """20 pages of 4. Each term of the equation is above 0 at once, and each is worked out by hand."""
    sched = make(20, 4, cache=True)
    submit(sched, ask("X", 8, 1, first=0))
    step(sched)  # 8 tokens, 2 pages, all valid: they stay in the cache
    assert pages(sched) == (18, 2, 0, 0, 0)
    submit(sched, ask("Y", 9, 4, first=0), ask("Z", 4, 1))  # Y: X's 8 tokens and one more; Z ends at once and leaves a page
    step(sched)
    assert pages(sched) == (16, 1, 2, 1, 0)
    sched.hold_pages("lease", 3)
    assert pages(sched) == (13, 1, 2, 1, 3)
    submit(sched, ask("W", 4, 1))
    plan = sched.schedule()
    assert pages(sched) == (12, 1, 2, 2, 3)
    sched.abort("W")  # its page is in flight
    assert pages(sched) == (12, 1, 2, 1, 4)
    sched.check()
    sched.commit(plan, StepResult(tokens=[7, 7]))
    assert pages(sched) == (13, 1, 2, 1, 3)
    assert sum(pages(sched)) == sched.snapshot()["usable"] == 20


@pytest.mark.parametrize("term", ["private", "quarantined"])
def test_a1_check_prints_every_term(term: str) -> None:
    sched = make(20, 4, cache=True)
    submit(sched, ask("X", 8, 3))
    step(sched)
    setattr(sched._core, term, getattr(sched._core, term) + 1)
    with pytest.raises(AccountingError) as caught:
        sched.check()
    for word in ("usable", *TERMS):
        assert f"'{word}': {sched.snapshot()[word]}" in str(caught.value)


def test_a1_reserved_pages_are_outside_the_equation() -> None:
    sched = make(50, 16, reserved=1)
    assert sched.snapshot()["usable"] == 49
    submit(sched, ask("R", 49 * 16, 1))
    plan = sched.schedule()
    assert pages(sched) == (0, 0, 0, 49, 0)
    assert 0 not in plan.deltas.page
    sched.check()


def test_a1_tokens_become_pages_in_one_place() -> None:
    """No module of the core rounds a quotient up itself: `-(-a // b)` stands in `kvsched.units` alone."""
    edges = {"sim", "scenario", "bench", "testing", "cli"}
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] in edges or file.name == "units.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.BinOp) and isinstance(node.operand.op, ast.FloorDiv):
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ceil") and "/" in ast.unparse(node):
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


# -- A2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "new", "needed"), [(4080, 16, None), (4081, 16, 4097), (4095, 1, None), (4096, 1, 4097)])
def test_a2_the_context_limit_is_on_prompt_and_output(prompt: int, new: int, needed: int | None) -> None:
    sched = make(4095, context_limit=4096)
    answer = sched.submit(ask("R", prompt, new))
    if needed is not None:
        assert answer == Refused("R", RefusalReason.CONTEXT_LIMIT, needed, 4096, retryable=False)
        return
    assert answer
    least = 4095
    emitted = decoded = 0
    while sched.has_work():
        plan = sched.schedule()
        least = min(least, sched.snapshot()["free"])
        decoded += plan.decodes
        outcome = sched.commit(plan, StepResult(tokens=[7]))
        emitted += int((outcome.tokens >= 0).sum())
    assert (emitted, decoded) == (new, new - 1)
    assert least == 0  # 4,095 slots: the last token of each is never written


@pytest.mark.parametrize(("prompt", "new", "needed"), [(4096, 1, None), (4096, 0, None), (4096, 2, 4097), (4000, 97, None), (4000, 98, 4097)])
def test_a2_the_pool_limit_is_one_slot_less(prompt: int, new: int, needed: int | None) -> None:
    sched = make(4096)
    answer = sched.submit(ask("R", prompt, new))
    if needed is not None:
        assert answer == Refused("R", RefusalReason.NEVER_FITS, needed, 4096, retryable=False)
    else:
        assert answer
        drain(sched, 200)
        assert totals(sched, "emitted") == new


def test_a2_no_new_tokens_is_a_prefill_that_ends_by_length() -> None:
    sched = make(8, 16, cache=True)
    submit(sched, ask("R", 64, 0, first=0))
    plan, outcome = advance(sched)
    assert chunks(plan) == [("R", 0, 64)]
    assert outcome.tokens.tolist() == [-1]
    assert outcome.finish.tolist() == [Finish.LENGTH]
    assert [(end.generated, end.computed) for end in outcome.ended] == [(0, 64)]
    assert pages(sched) == (4, 4, 0, 0, 0)
    submit(sched, ask("S", 64, 0, first=0))
    assert chunks(step(sched)) == [("S", 48, 16)]  # fully cached, and it still computes its last page


def test_a2_speculative_slots_end_at_the_last_slot() -> None:
    """P = 10, N = 4: 13 slots. Of 1 + 4 speculative ones beside 10 computed only 3 are there, and the pool has no more."""
    sched = make(13, lookahead_tokens=4)
    submit(sched, ask("R", 10, 4))
    step(sched)
    plan = sched.schedule()
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([10], [3])
    outcome = sched.commit(plan, StepResult(tokens=[[7, 8, 9]], accepted=[2]))
    assert outcome.tokens.tolist() == [[7, 8, 9]]
    assert [(end.finish, end.generated, end.computed) for end in outcome.ended] == [(Finish.LENGTH, 4, 13)]


# -- A3 ---------------------------------------------------------------------------------------------------------------


def test_a3_a_double_free_raises_and_changes_nothing() -> None:
    pool = PagePool(pages=8, page_size=16, reserved_pages=1)
    page = pool.alloc(1)
    pool.release(page)
    with pytest.raises(DoubleFree):
        pool.release(page)
    assert pool.free == 7
    with pytest.raises(DoubleFree):
        pool.release(np.array([0], dtype=np.int32))
    assert len({*pool.alloc(3).tolist(), *pool.alloc(4).tolist()}) == 7


def test_a3_two_that_computed_one_prefix_share_the_copy_in_the_tree() -> None:
    """Both are cold and compute 8 equal tokens beside each other: of the 2 + 2 pages one pair goes back to the pool."""
    sched = make(20, 4, cache=True)
    submit(sched, ask("A", 9, 4, first=0), ask("B", 9, 4, first=0))
    sched.commit(sched.schedule(), StepResult(tokens=[7, 8]))
    sched.check()
    assert pages(sched) == (16, 0, 2, 2, 0)
    rows = {key: sched._core.running[key].row for key in ("A", "B")}
    table = sched.block_table
    assert table[rows["A"], :2].tolist() == table[rows["B"], :2].tolist()
    assert table[rows["A"], 2] != table[rows["B"], 2]
    plan = sched.schedule()
    changed = {(int(r), int(c)): int(p) for r, c, p in zip(plan.deltas.row, plan.deltas.column, plan.deltas.page, strict=True)}
    assert changed == {(rows["B"], column): int(table[rows["B"], column]) for column in (0, 1)}  # the host hears of it


def test_a3_a_page_in_flight_is_handed_to_nobody() -> None:
    sched = make(4, max_in_flight=2)
    submit(sched, ask("A", 4, 1))
    plan = sched.schedule()
    sched.abort("A")
    submit(sched, ask("B", 1, 1))
    assert sched.schedule().status is Status.IN_FLIGHT  # all four pages may still be written to
    sched.commit(plan, StepResult(tokens=[7]))
    assert pages(sched) == (4, 0, 0, 0, 0)


# -- A4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "cache", "computed"), [(10, True, 10 + 2 + 2), (8, True, 8 + 4 + 4), (10, False, 30)])
def test_a4_full_pages_of_the_prompt_are_computed_once(prompt: int, cache: bool, computed: int) -> None:
    sched = make(40, 4, cache=cache)
    submit(sched, ask("R", prompt, 2, n=3))
    drain(sched, 20)
    assert totals(sched, "prefill_tokens") == computed
    assert totals(sched, "finished") == 3
    assert totals(sched, "emitted") == 6


def test_a4_children_wait_for_the_shared_prefill_only() -> None:
    sched = make(40, 4, cache=True, chunk_tokens=4)
    submit(sched, ask("R", 10, 2, n=3))
    assert chunks(step(sched)) == [("R/0", 0, 4)]
    assert [why(sched, f"R/{child}") for child in (1, 2)] == [("shared_prefill", None)] * 2
    # page 2 is being computed, and neither child can have it yet; then both compute the last, partial page themselves
    assert chunks(step(sched)) == [("R/0", 4, 4)]
    assert chunks(step(sched)) == [("R/0", 8, 2), ("R/1", 8, 2), ("R/2", 8, 2)]


def test_a4_refused_by_the_need_of_one_and_entering_whole() -> None:
    sched = make(3, 4, max_queued_requests=3)
    assert sched.submit(ask("R", 13, 1, n=2)) == Refused("R", RefusalReason.NEVER_FITS, 4, 3, retryable=False)
    assert sched.submit(ask("R", 12, 1, n=4)) == Refused("R", RefusalReason.QUEUE_REQUESTS, 4, 3, retryable=False)
    assert not sched.has_work()
    submit(sched, ask("R", 12, 1, n=3))  # 3 x 3 pages in a pool of 3: one after the other
    assert drain(sched, 10) == 3


def test_a4_the_parent_stands_for_its_children() -> None:
    sched = make(40, 4)
    answer = sched.submit(ask("R", 8, 5, n=3))
    assert isinstance(answer, Accepted)
    assert answer.ids == ("R/0", "R/1", "R/2")
    for key in ("R", "R/1"):
        with pytest.raises(DuplicateRequest):
            sched.submit(ask(key, 8, 5))
    step(sched)
    assert sched.abort("R/1") is True  # children are independent once queued
    assert running(sched) == ["R/0", "R/2"]
    assert sched.abort("R") is True
    assert not sched.has_work()
    assert sched.abort("R") is False
    assert totals(sched, "aborted") == 3
