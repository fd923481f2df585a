"""Percentiles, the keys of the JSON object, and the words of the table."""

from __future__ import annotations

import json
import random

import attrs
import pytest

from kvsched.sim.report import Refusals, Report, Spread, Stuck, Wedge, percentile, refusal_lines, table

STATED = (
    "requests", "finished", "refused", "steps", "retractions", "recomputed_tokens", "cached_tokens", "prefill_tokens",
    "ttft_p50", "ttft_p90", "ttft_p99", "e2e_p50", "e2e_p90", "e2e_p99", "makespan_s", "occupancy_mean", "occupancy_peak",
    "cpu_s", "cpu_us_per_step",
)
REPORT = Report(
    requests=4, finished=2, refused=1, unfinished=1, skipped=0, steps=10, retractions=3, recomputed_tokens=40, cached_tokens=300,
    prefill_tokens=900, generated_tokens=77, ttft=Spread(0.1234567, 0.2, 0.3), e2e=Spread(None, None, None), makespan_s=12.5,
    occupancy_mean=0.25, occupancy_peak=1.0, cpu_s=0.001, cpu_us_per_step=100.0,
)
WEDGE = Wedge(
    clock_s=3.25, step=9, why="nothing moves", free_pages=1, evictable_pages=0, usable_pages=64,
    stuck=(Stuck("a", "running", 512, 32, "pages", 18, 7, "behind itself"), Stuck("b", "waiting", 0, 0, None, None, 0, "")), more=4,
)


def test_percentiles_are_values_that_occurred_by_the_stated_index() -> None:
    values = [float(x) for x in range(100)]
    random.Random(1).shuffle(values)
    assert [percentile(values, p) for p in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0, 50, 90, 99, 99]
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0.5, 0.9, 0.99)] == [2, 3, 3]
    assert percentile([], 0.5) is None
    assert Spread.of(values) == Spread(50, 90, 99)
    assert Spread.of([]) == Spread(None, None, None)


def test_the_json_object_has_every_stated_key_and_survives_json() -> None:
    out = json.loads(json.dumps(attrs.evolve(REPORT, wedge=WEDGE).as_dict()))
    assert set(STATED) <= set(out)
    assert out["ttft_p50"] == 0.123457
    assert out["e2e_p50"] is None
    assert out["wedge"]["stuck"][0]["reason"] == "pages"
    assert REPORT.as_dict()["wedge"] is None


def test_the_table_has_a_line_per_figure_and_a_column_per_report() -> None:
    one = table({"": REPORT})
    assert any(line.split() == ["requests", "4"] for line in one)
    assert any(line.split() == ["share", "from", "cache", "25.0%"] for line in one)
    assert any(line.split() == ["end", "to", "end", "p50", "-"] for line in one)
    two = table({"first": REPORT, "second": attrs.evolve(REPORT, requests=1234)})
    assert two[0].split() == ["first", "second"]
    assert two[1].split() == ["requests", "4", "1,234"]
    assert len(two) == len(one) + 1


def test_hit_rate_of_nothing_is_0() -> None:
    assert attrs.evolve(REPORT, cached_tokens=0, prefill_tokens=0).hit_rate == 0.0


def test_refusals_are_told_apart() -> None:
    report = attrs.evolve(REPORT, refusals=(Refusals("never_fits", 2, 66, 49, False), Refusals("queue_requests", 1, 1, 0, True)))
    never, queue = refusal_lines(report)
    assert never == "refused, never_fits: 2 (can never be served here; the largest needed 66 where 49 are available)"
    assert "could be tried again" in queue


@pytest.mark.parametrize("words", [
    "WEDGED at 3.250 s, step 9: nothing moves; 1 pages free and 0 evictable of 64.",
    "  a: running, 512 tokens computed, 32 pages held; waits for pages, short by 18 (behind itself)",
    "  b: waiting, 0 tokens computed, 0 pages held; no reason is recorded",
    "  and 4 more",
])
def test_a_wedge_says_who_is_stuck_and_why(words: str) -> None:
    assert words in WEDGE.lines()
