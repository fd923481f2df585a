"""The simulated executor against plans written by hand: a right plan runs, and each kind of wrong one is caught."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvsched.plan import Chunk, Deltas, Outcome, Plan, Status, StepResult
from kvsched.protocols import Executor
from kvsched.request import Namespace, Request
from kvsched.testing import ExecutorViolation, SimulatedExecutor
from kvsched.testing.stamps import stamps_of

Decode = tuple[str, int, int, int]
Prefill = tuple[str, int, int, list[int], bool]


def plan_of(
    step: int,
    *,
    decodes: Sequence[Decode] = (),
    prefill: Sequence[Prefill] = (),
    deltas: Sequence[tuple[int, int, int]] = (),
    retracted: Sequence[str] = (),
) -> Plan:
    """decodes: (id, row, start, count); prefill: (id, row, start, tokens, last); deltas: (row, column, page)."""
    chunks = tuple(Chunk(i, row, start, np.array(tokens, np.int32), last) for i, row, start, tokens, last in prefill)
    rows = [d[1] for d in decodes] + [c.row for c in chunks]
    starts = [d[2] for d in decodes] + [c.start for c in chunks]
    counts = [d[3] for d in decodes] + [c.length for c in chunks]
    table = np.array(deltas, np.int64).reshape(-1, 3)
    ids = tuple(d[0] for d in decodes)
    return Plan(
        step, Status.RUN, np.array(rows, np.int64), np.array(starts, np.int64), np.array(counts, np.int64), len(decodes), chunks,
        Deltas(table[:, 0], table[:, 1], table[:, 2].astype(np.int32)), tuple(retracted), 0, (), (), lambda: ids,
    )


def outcome_of(plan: Plan, tokens: list[int]) -> Outcome:
    return Outcome(plan.rows, np.array(tokens), np.zeros(len(plan), np.int8), ())


@pytest.fixture
def executor() -> SimulatedExecutor:
    made = SimulatedExecutor(page_size=2, pages=8)
    made.add(Request("a", [1, 2, 3], 4))
    made.add(Request("b", [1, 2, 4, 4], 4))
    return made


def start_a(executor: SimulatedExecutor) -> int:
    plan = plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)])
    return int(executor.run(plan).tokens[0])


def test_a_prompt_and_its_decodes_give_the_reference_text(executor: SimulatedExecutor) -> None:
    got = [start_a(executor)]
    got.append(executor.run(plan_of(2, decodes=[("a", 0, 3, 1)])).tokens[0])
    got.append(executor.run(plan_of(3, decodes=[("a", 0, 4, 1)], deltas=[(0, 2, 1)])).tokens[0])
    assert got == executor.reference(Request("a", [1, 2, 3], 4), "a", 3)
    assert executor.holds(Namespace(), [1, 2, 3, *got[:2]], [5, 6, 1])


def test_chunks_and_a_shared_page(executor: SimulatedExecutor) -> None:
    start_a(executor)
    hit = plan_of(2, prefill=[("b", 1, 2, [4], False)], deltas=[(1, 0, 5), (1, 1, 2)])
    executor.run(hit)
    assert executor.run(plan_of(3, prefill=[("b", 1, 3, [4], True)])).tokens[0] >= 0
    assert executor.holds(Namespace(), [1, 2, 4, 4], [5, 2])


def test_a_wrong_hit_is_caught(executor: SimulatedExecutor) -> None:
    start_a(executor)
    with pytest.raises(ExecutorViolation, match="b attends to position 0 in page 6"):
        executor.run(plan_of(2, prefill=[("b", 1, 2, [4, 4], True)], deltas=[(1, 0, 6), (1, 1, 2)]))


def test_a_hit_from_another_namespace_is_caught(executor: SimulatedExecutor) -> None:
    start_a(executor)
    executor.add(Request("c", [1, 2, 4, 4], 4, adapter="lora"))
    with pytest.raises(ExecutorViolation, match="c attends to position 0 in page 5"):
        executor.run(plan_of(2, prefill=[("c", 1, 2, [4, 4], True)], deltas=[(1, 0, 5), (1, 1, 2)]))


def test_a_page_with_two_owners_is_caught_in_one_step_and_across_steps(executor: SimulatedExecutor) -> None:
    with pytest.raises(ExecutorViolation, match="page 6 has two owners"):
        executor.run(plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True), ("b", 1, 0, [1, 2, 4, 4], True)],
                             deltas=[(0, 0, 5), (0, 1, 6), (1, 0, 7), (1, 1, 6)]))
    executor = SimulatedExecutor(2, 8)
    executor.add(Request("a", [1, 2, 3], 4))
    executor.add(Request("b", [1, 2, 4, 4], 4))
    start_a(executor)
    executor.run(plan_of(2, prefill=[("b", 1, 0, [1, 2, 4, 4], True)], deltas=[(1, 0, 7), (1, 1, 6)]))
    with pytest.raises(ExecutorViolation, match="a attends to position 2 in page 6"):
        executor.run(plan_of(3, decodes=[("a", 0, 3, 1)]))


def test_a_page_given_away_while_a_step_writes_it_is_caught(executor: SimulatedExecutor) -> None:
    first = plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)])
    executor.receive(first)
    with pytest.raises(ExecutorViolation, match="gives page 6 to row 1 while plan 1 writes it for a"):
        executor.receive(plan_of(2, prefill=[("b", 1, 0, [1, 2, 4, 4], True)], deltas=[(1, 0, 6), (1, 1, 7)], retracted=["a"]))


def test_a_row_in_flight_is_only_appended_to_and_not_reused(executor: SimulatedExecutor) -> None:
    executor.receive(plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)]))
    with pytest.raises(ExecutorViolation, match="overwrites row 0 column 1 while plan 1 uses it for a"):
        executor.receive(plan_of(2, decodes=[("a", 0, 3, 1)], deltas=[(0, 1, 7)]))
    with pytest.raises(ExecutorViolation, match="gives row 0 to b while plan 1 uses it for a"):
        executor.receive(plan_of(2, prefill=[("b", 0, 0, [1, 2], False)]))


def test_the_copy_of_the_table_is_compared(executor: SimulatedExecutor) -> None:
    plan = plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)])
    with pytest.raises(ExecutorViolation, match=r"row 0 \(a\) is \[5, 4\] in the scheduler's table"):
        executor.receive(plan, np.array([[5, 4]], np.int32))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (plan_of(2, decodes=[("a", 0, 4, 1)], deltas=[(0, 2, 1)]), "decodes from position 4; its last token is at 3"),
        (plan_of(2, decodes=[("a", 0, 3, 2)]), "reaches 5 tokens = 3 pages"),
        (plan_of(2, decodes=[("x", 0, 3, 1)]), "names x, which is not live"),
        (plan_of(2, decodes=[("a", 0, 3, 1), ("b", 0, 3, 1)]), "names a row twice"),
        (plan_of(2, decodes=[("a", 0, 3, 1)], deltas=[(0, 2, 8)]), "names page 8 of 8"),
        (plan_of(2, prefill=[("b", 1, 0, [1, 3], False)], deltas=[(1, 0, 1)]), "has other tokens than the request"),
        (plan_of(2, prefill=[("b", 1, 0, [1, 2], True)], deltas=[(1, 0, 1)]), "ends at 2 of 4, last=True"),
    ],
)
def test_other_wrong_plans_are_caught(executor: SimulatedExecutor, plan: Plan, text: str) -> None:
    start_a(executor)
    with pytest.raises(ExecutorViolation, match=text):
        executor.run(plan)


def test_drafts_are_accepted_by_a_seeded_function_and_rejected_ones_are_overwritten() -> None:
    counts = set()
    for seed in range(20):
        executor = SimulatedExecutor(2, 16, lookahead_tokens=2, seed=seed)
        request = Request("a", [1, 2, 3], 40)
        executor.add(request)
        table = [(0, c, c) for c in range(16)]
        result = executor.run(plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=table))
        text = [int(result.tokens[0, 0])]
        step = 2
        while len(text) < 20:
            result = executor.run(plan_of(step, decodes=[("a", 0, 2 + len(text), 3)]))
            taken = int(result.accepted[0])
            counts.add(taken)
            text += result.tokens[0, : taken + 1].tolist()
            step += 1
        assert text[:20] == executor.reference(request, "a", 20)
    assert counts == {0, 1, 2}


def test_two_plans_in_flight_with_rejected_drafts() -> None:
    executor = SimulatedExecutor(2, 16, lookahead_tokens=2, seed=3)
    executor.add(Request("a", [1, 2, 3], 40))
    executor.run(plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, c, c) for c in range(16)]))
    first, second = plan_of(2, decodes=[("a", 0, 3, 3)]), plan_of(3, decodes=[("a", 0, 6, 3)])
    executor.receive(first)
    executor.receive(second)
    with pytest.raises(ExecutorViolation, match="runs before an older plan"):
        executor.run(second)
    one, two = executor.run(first), executor.run(second)
    text = one.tokens[0, : one.accepted[0] + 1].tolist() + two.tokens[0, : two.accepted[0] + 1].tolist()
    assert text == executor.reference(Request("a", [1, 2, 3], 40), "a", 1 + len(text))[1:]


def test_a_commit_that_loses_or_repeats_a_token_is_caught(executor: SimulatedExecutor) -> None:
    plan = plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)])
    executor.receive(plan)
    token = int(executor.run(plan).tokens[0])
    with pytest.raises(ExecutorViolation, match="goes on: sampled"):
        executor.committed(plan, outcome_of(plan, [-1]))
    executor.receive(plan)
    executor._frames[-1].ran = True
    with pytest.raises(ExecutorViolation, match="delivered"):
        executor.committed(plan, outcome_of(plan, [token + 1]))


def test_rollback_forgets_samples_and_a_plan_that_never_ran_gives_its_deltas_back(executor: SimulatedExecutor) -> None:
    start_a(executor)
    executor._frames.clear()
    ran = plan_of(2, decodes=[("a", 0, 3, 1)])
    executor.receive(ran)
    before = executor.run(ran).tokens[0]
    executor.rolled_back(ran)
    unrun = plan_of(2, decodes=[("a", 0, 3, 1)], deltas=[(0, 2, 7)])
    executor.receive(unrun)
    assert executor.pages_of(0, 3) == [5, 6, 7]
    executor.rolled_back(unrun)
    assert executor.pages_of(0, 3) == [5, 6, -1]
    assert executor.run(plan_of(2, decodes=[("a", 0, 3, 1)])).tokens[0] == before


def test_a_stop_comes_exactly_where_it_was_asked_for() -> None:
    executor = SimulatedExecutor(2, 8)
    request = Request("a", [1], 40, stop_token_ids={2})
    for at in range(1, 9):
        text = executor.reference(request, "a", 9, stop_at=at)
        assert text.index(2) == at - 1


def test_stamps_name_the_whole_prefix_and_the_namespace() -> None:
    long = np.arange(100, dtype=np.int32) % 7
    whole = stamps_of(Namespace(), long)
    for cut in (1, 31, 32, 33, 99):  # both ways to work them out
        assert np.array_equal(stamps_of(Namespace(), long[:cut]), whole[:cut])
    other = long.copy()
    other[50] += 1
    same = stamps_of(Namespace(), other) == whole
    assert same[:50].all()
    assert not same[50:].any()
    assert not (stamps_of(Namespace(salt="x"), long) == stamps_of(Namespace(version="x"), long)).any()
    assert not (stamps_of(Namespace(adapter="x"), long) == whole).any()


def missing_members(real: type, double: type) -> list[str]:
    """Public members of a protocol or class that a test double lacks or takes other arguments for."""
    wrong = []
    for name, member in vars(real).items():
        if name.startswith("_"):
            continue
        mine = getattr(double, name, None)
        if mine is None or (callable(member) and list(inspect.signature(member).parameters) != list(inspect.signature(mine).parameters)):
            wrong.append(name)
    return wrong


def test_drift_guard_the_double_is_an_executor(executor: SimulatedExecutor) -> None:
    assert missing_members(Executor, SimulatedExecutor) == []
    assert isinstance(executor, Executor)
    plan = plan_of(1, prefill=[("a", 0, 0, [1, 2, 3], True)], deltas=[(0, 0, 5), (0, 1, 6)])
    result = executor.run(plan)
    assert type(result) is StepResult
    assert len(result.tokens) == len(plan)


def test_drift_guard_can_fail() -> None:
    class Stale:
        def execute(self, plan: Any) -> Any: ...

    class Odd:
        def run(self, plan: Any, stream: Any) -> Any: ...

    assert missing_members(Executor, Stale) == ["run"]
    assert missing_members(Executor, Odd) == ["run"]
