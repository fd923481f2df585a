"""The replay loop: figures worked out by hand, conservation, determinism, and the deadlock that the ledger prevents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvsched.config import SchedulerConfig
from kvsched.errors import ConfigError
from kvsched.plan import Plan
from kvsched.sim.cost import LinearCost
from kvsched.sim.replay import Progress, build, replay
from kvsched.sim.report import Report
from kvsched.sim.trace import Arrival, Unique, read_trace
from kvsched.sim.workload import Workload, generate

SHARED = Path(__file__).parents[2] / "../shared/data"
SECOND = LinearCost(1.0, 0.01)


def arrive(*shapes: tuple[float, int, int]) -> list[Arrival]:
    """Arrivals of (time, prompt tokens, new tokens) that share nothing."""
    return [Arrival(f"r{i}", time_s, Unique(i, prompt), new) for i, (time_s, prompt, new) in enumerate(shapes)]


def run(arrivals: list[Arrival], pool_tokens: int = 1024, *, cache: bool = False, ledger: bool = True, speed: float = 1.0,
        cost: Any = SECOND, check: bool = True, **knobs: Any) -> Report:
    engine = build(SchedulerConfig(page_size=16, **knobs), pool_tokens, prefix_cache=cache, ledger=ledger)
    report = replay(arrivals, engine, cost=cost, speed=speed, check=check)
    assert report.finished + report.refused + report.unfinished == report.requests
    assert report.wedge is not None or engine.pool.free + engine.cache.evictable == engine.pool.usable
    return report


def fixed(report: Report) -> dict[str, Any]:
    """What must be the same in every run."""
    return {key: value for key, value in report.as_dict().items() if not key.startswith("cpu_")}


def test_two_requests_by_hand() -> None:
    # step 1 computes 80 tokens (1.8 s, 5 pages), step 2 two tokens (1.02 s, 7 pages; r1 ends), step 3 one (1.01 s, 3 pages)
    report = run(arrive((0, 32, 3), (0, 48, 2)), admission="guaranteed")
    assert (report.requests, report.finished, report.steps, report.prefill_tokens, report.generated_tokens) == (2, 2, 3, 80, 5)
    assert (report.ttft.p50, report.ttft.p99) == (1.8, 1.8)
    assert report.e2e.p50 == report.e2e.p99 == pytest.approx(3.83)
    assert report.makespan_s == pytest.approx(3.83)
    assert report.occupancy_peak == 7 / 64
    assert report.occupancy_mean == pytest.approx((5 * 1.8 + 7 * 1.02 + 3 * 1.01) / 3.83 / 64)


def test_the_clock_jumps_over_idle_time_which_counts_as_empty() -> None:
    report = run(arrive((50, 16, 1), (150, 16, 1)))
    assert report.makespan_s == pytest.approx(101.16)
    assert report.ttft.p99 == pytest.approx(1.16)
    assert report.occupancy_mean == pytest.approx(2 * 1.16 / 101.16 / 64)


def test_speed_moves_arrivals_together_and_leaves_steps_as_they_are() -> None:
    report = run(arrive((50, 16, 1), (150, 16, 1)), speed=4.0)
    assert report.makespan_s == pytest.approx(26.16)


def test_an_arrival_during_a_step_waits_for_its_end_and_its_own_time_counts() -> None:
    report = run(arrive((0, 16, 1), (0.5, 16, 1)))
    assert report.ttft.p99 == pytest.approx(1.16 + 1.16 - 0.5)


def test_a_prompt_alone_has_no_first_token() -> None:
    report = run(arrive((0, 40, 0)))
    assert (report.finished, report.generated_tokens, report.steps) == (1, 0, 1)
    assert report.ttft.p50 is None
    assert report.e2e.p50 == pytest.approx(1.4)


def test_what_can_never_fit_is_refused_with_its_numbers_and_counted() -> None:
    report = run(arrive((0, 2000, 50), (0, 1002, 50), (0, 10, 5)), pool_tokens=784)
    assert (report.finished, report.refused, report.unfinished) == (1, 2, 0)
    refusal, = report.refusals
    assert (refusal.reason, refusal.count, refusal.needed, refusal.available) == ("never_fits", 2, 129, 49)
    assert not refusal.retryable


def test_a_queue_bound_refuses_for_good_and_is_told_apart() -> None:
    report = run(arrive(*[(0, 512, 8)] * 6, (0, 9000, 1)), max_queued_requests=2)
    assert report.refused == 5
    assert {r.reason: (r.count, r.retryable) for r in report.refusals} == {"queue_requests": (4, True), "never_fits": (1, False)}


def test_the_same_prompt_again_is_taken_from_the_cache_but_for_its_last_page() -> None:
    first, second = arrive((0, 64, 1), (10, 64, 1))
    again = attrs.evolve(second, content=first.content)
    report = run([first, again], cache=True)
    assert (report.cached_tokens, report.prefill_tokens) == (48, 80)
    assert report.hit_rate == 48 / 128
    assert run([first, again], cache=False).cached_tokens == 0


def test_two_that_outgrow_the_pool_meet_once_and_both_finish() -> None:
    # 16 pages; each needs 13 in the end. They collide at 128 slots; r1 is retracted with 128 computed, and comes back with 129.
    report = run(arrive((0, 100, 100), (0, 100, 100)), pool_tokens=256, admission="expected")
    assert (report.finished, report.generated_tokens, report.retractions) == (2, 200, 1)
    assert (report.recomputed_tokens, report.prefill_tokens) == (128, 329)
    assert report.ttft.p99 == pytest.approx(3.0)


def test_guaranteed_admission_retracts_nobody() -> None:
    report = run(arrive(*[(0, 100, 100)] * 6), pool_tokens=512, admission="guaranteed")
    assert (report.finished, report.retractions, report.recomputed_tokens) == (6, 0, 0)


def test_with_two_plans_in_flight_the_steps_follow_each_other_without_a_gap() -> None:
    arrivals = arrive((0, 16, 2), (0, 16, 5))
    one, two = (run(arrivals, max_in_flight=depth, cost=LinearCost(1.0, 0.0)) for depth in (1, 2))
    assert (one.makespan_s, one.generated_tokens) == (5.0, 7)
    assert (two.makespan_s, two.generated_tokens, two.finished) == (5.0, 7, 2)


def two_long_prompts(tmp_path: Path) -> Path:
    """Each fits the pool of 1,024 tokens alone; what they need together does not."""
    rows = [{"timestamp": 0, "input_length": 800, "output_length": 1, "hash_ids": [2 * i, 2 * i + 1]} for i in range(2)]
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("admission", ["guaranteed", "expected"])
@pytest.mark.parametrize("cache", [True, False])
def test_without_the_ledger_two_requests_that_each_fit_deadlock(tmp_path: Path, admission: str, cache: bool) -> None:
    arrivals = list(read_trace(two_long_prompts(tmp_path), "mooncake").arrivals)
    kept = run(arrivals, admission=admission, cache=cache, chunk_tokens=64, max_step_tokens=128)
    assert (kept.finished, kept.retractions, kept.wedge) == (2, 0, None)
    lost = run(arrivals, admission=admission, cache=cache, chunk_tokens=64, max_step_tokens=128, ledger=False)
    assert (lost.finished, lost.unfinished) == (0, 2)
    assert lost.wedge is not None
    assert {one.id for one in lost.wedge.stuck} == {"L1", "L2"}
    assert all(one.status == "running" and one.computed >= 448 for one in lost.wedge.stuck)
    assert all(one.reason is not None for one in lost.wedge.stuck)
    assert lost.wedge.free_pages + lost.wedge.evictable_pages == 0


MIXED = Workload(requests=120, rate=20, prompt_mean=150, output_mean=60, tree_tokens=64, oversize_share=0.05, oversize_tokens=5000,
                 tenants=2, priorities=2)


@pytest.mark.parametrize("knobs", [
    {}, {"admission": "guaranteed"}, {"max_in_flight": 2}, {"order": "lpm", "head": "skip"}, {"chunk_tokens": 64, "head": "backfill"},
], ids=str)
def test_everybody_is_served_or_refused_and_twice_is_the_same(knobs: dict[str, Any]) -> None:
    first, second = (run(generate(MIXED, 3), 2048, cache=True, cost=None, check=check, **knobs) for check in (True, False))
    assert first.unfinished == 0
    assert first.refused > 0
    assert first.cached_tokens > 0
    served = [a for a in generate(MIXED, 3) if a.prompt_length != 5000]
    assert (first.finished, first.generated_tokens) == (len(served), sum(a.max_new for a in served))
    assert fixed(first) == fixed(second)
    assert fixed(first) != fixed(run(generate(MIXED, 4), 2048, cache=True, cost=None, check=False, **knobs))


def test_a_cost_model_of_ones_own_plugs_in() -> None:
    class PerRow:
        def step_seconds(self, plan: Plan) -> float:
            return float(len(plan))

    assert run(arrive((0, 16, 2), (0, 16, 2)), cost=PerRow()).makespan_s == 4.0


def test_progress_is_told_in_the_middle_and_at_the_end() -> None:
    seen: list[Progress] = []
    engine = build(SchedulerConfig(page_size=16), 1024)
    replay(arrive((0, 16, 5), (0, 9000, 1)), engine, observe=seen.append, every=2)
    assert [(p.steps, p.finished, p.refused, p.requests) for p in seen] == [(2, 0, 1, 2), (4, 0, 1, 2), (5, 1, 1, 2)]


def test_no_arrivals_make_an_empty_report() -> None:
    report = run([])
    assert (report.requests, report.steps, report.makespan_s, report.occupancy_mean, report.cpu_us_per_step) == (0, 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("speed", [0, -1, 1e-320, float("inf"), float("nan"), True])
def test_a_bad_speed_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="speed must be a number from 1e-09 to 1e\\+09"):
        replay([], build(SchedulerConfig(page_size=16), 1024), speed=speed)


def test_a_pool_below_one_page_and_a_bad_cost_are_refused() -> None:
    with pytest.raises(ConfigError, match="pool_tokens must be at least one page of 16 tokens, not 15"):
        build(SchedulerConfig(page_size=16), 15)
    with pytest.raises(ConfigError, match="t_tok must be a number of seconds from 0 to 1e\\+09"):
        LinearCost(t_tok=-1.0)


def test_the_first_hundred_of_the_conversation_trace_are_all_served() -> None:
    file = SHARED / "mooncake_conversation.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is absent: the published traces are not part of the project")
    arrivals = list(read_trace(file, "mooncake", limit=100).arrivals)
    report = run(arrivals, 131_072, cache=True, cost=None, check=False)
    assert (report.finished, report.refused) == (100, 0)
    few = run(arrivals[:10], 32_768, cache=True, cost=None)
    assert (few.finished, few.refused) == (10, 0)
    assert report.generated_tokens == sum(a.max_new for a in arrivals)
    assert report.cached_tokens + report.prefill_tokens - report.recomputed_tokens >= sum(a.prompt_length for a in arrivals)
