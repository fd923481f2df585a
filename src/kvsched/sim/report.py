"""What a replay found: figures, whoever got stuck, and both as JSON and as a table for people.

What lives here: records and their presentation as plain text. What does not: the measuring (`kvsched.sim.replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

STUCK_SHOWN = 10
"""Stuck requests that a report names; the rest are counted."""


def percentile(values: Sequence[float], p: float) -> float | None:
    """The element at index min(n - 1, floor(p * n)) of the n sorted values; None without values. O(n log n).

    It is always a value that occurred, and no interpolation takes place.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([1.0], 0.99), percentile([], 0.5)
    (3.0, 1.0, None)
    """
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(p * len(values)))]


@attrs.frozen
class Spread:
    """Median, 90th and 99th percentile (see `percentile`) of some seconds; None where there are none."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`. O(n log n)."""
        ordered = sorted(values)
        return cls(*(percentile(ordered, p) for p in (0.5, 0.9, 0.99)))


@attrs.frozen
class Refusals:
    """Refusals of one reason. needed, available: the numbers of the one that asked for most."""

    reason: str
    count: int
    needed: int
    available: int
    retryable: bool


@attrs.frozen
class Stuck:
    """A request that was left when the replay could not go on, and why (`Scheduler.explain`)."""

    id: str
    status: str
    computed: int
    pages: int
    reason: str | None
    short_by: int | None
    waited_steps: int
    detail: str


@attrs.frozen
class Wedge:
    """The replay stopped with work left. stuck: the first requests concerned, residents first; more: how many others."""

    clock_s: float
    step: int
    why: str
    free_pages: int
    evictable_pages: int
    usable_pages: int
    stuck: tuple[Stuck, ...]
    more: int

    def lines(self) -> list[str]:
        """The same in sentences."""
        pages = f"{self.free_pages} pages free and {self.evictable_pages} evictable of {self.usable_pages}"
        out = [f"WEDGED at {self.clock_s:.3f} s, step {self.step}: {self.why}; {pages}."]
        for one in self.stuck:
            short = "" if one.short_by is None else f", short by {one.short_by}"
            detail = f" ({one.detail})" if one.detail not in {"", one.reason} else ""
            waits = f"waits for {one.reason}{short}{detail}" if one.reason else "no reason is recorded"
            out.append(f"  {one.id}: {one.status}, {one.computed} tokens computed, {one.pages} pages held; {waits}")
        if self.more:
            out.append(f"  and {self.more} more")
        return out


@attrs.frozen(kw_only=True)
class Report:
    """The figures of one replay. Everything but cpu_s and cpu_us_per_step is the same whenever the inputs are.

    requests: arrivals in the trace. finished, refused: how each ended; `refused` counts every reason, those that a client
        could have tried again too (`refusals` tells them apart). unfinished: the rest, 0 unless wedged.
    skipped: lines of the trace that asked for nothing.
    steps: steps that computed something. retractions, recomputed_tokens, cached_tokens, prefill_tokens: the scheduler's totals.
    generated_tokens: tokens delivered.
    ttft: seconds from the arrival in the trace to the end of the step that gave the first token, over requests that got one.
    e2e: seconds from the arrival to the end of the step that ended the request, over requests that finished.
    makespan_s: from the first arrival to the end of the last step.
    occupancy_mean, occupancy_peak: pages in use (locked + private + quarantined) over usable; the mean is weighted by
        simulated time over the makespan.
    cpu_s: wall seconds inside submit, schedule and commit. cpu_us_per_step: the same per step, in microseconds.
    """

    requests: int
    finished: int
    refused: int
    unfinished: int
    skipped: int
    steps: int
    retractions: int
    recomputed_tokens: int
    cached_tokens: int
    prefill_tokens: int
    generated_tokens: int
    ttft: Spread
    e2e: Spread
    makespan_s: float
    occupancy_mean: float
    occupancy_peak: float
    cpu_s: float
    cpu_us_per_step: float
    refusals: tuple[Refusals, ...] = ()
    wedge: Wedge | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of admissions that the cache served; derived, never the source."""
        asked = self.cached_tokens + self.prefill_tokens
        return self.cached_tokens / asked if asked else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as one JSON object; seconds to the microsecond."""
        out: dict[str, Any] = {
            key: getattr(self, key)
            for key in (
                "requests", "finished", "refused", "unfinished", "skipped", "steps", "retractions", "recomputed_tokens",
                "cached_tokens", "prefill_tokens", "generated_tokens",
            )
        }
        for name in ("ttft", "e2e"):
            for p in ("p50", "p90", "p99"):
                value = getattr(getattr(self, name), p)
                out[f"{name}_{p}"] = None if value is None else round(value, 6)
        out["makespan_s"] = round(self.makespan_s, 6)
        out["occupancy_mean"] = round(self.occupancy_mean, 6)
        out["occupancy_peak"] = round(self.occupancy_peak, 6)
        out["cpu_s"] = round(self.cpu_s, 6)
        out["cpu_us_per_step"] = round(self.cpu_us_per_step, 3)
        out["refusals"] = [attrs.asdict(refusal) for refusal in self.refusals]
        out["wedge"] = None if self.wedge is None else attrs.asdict(self.wedge)
        return out


def table(reports: Mapping[str, Report]) -> list[str]:
    """Lines of a table, one column per report, headed by its name unless it is the only one."""
    rows = [("", list(reports))] if len(reports) > 1 else []
    rows += [(label, [show(report) for report in reports.values()]) for label, show in _ROWS]
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(reports))]
    return ["  ".join([label.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
            for label, cells in rows]


def refusal_lines(report: Report) -> list[str]:
    """One sentence per reason for which requests were refused."""
    out = []
    for refusal in report.refusals:
        again = "could be tried again" if refusal.retryable else "can never be served here"
        numbers = f"the largest needed {refusal.needed:,} where {refusal.available:,} are available"
        out.append(f"refused, {refusal.reason}: {refusal.count:,} ({again}; {numbers})")
    return out


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f} s"


_ROWS: tuple[tuple[str, Any], ...] = (
    ("requests", lambda r: f"{r.requests:,}"),
    ("finished", lambda r: f"{r.finished:,}"),
    ("refused", lambda r: f"{r.refused:,}"),
    ("unfinished", lambda r: f"{r.unfinished:,}"),
    ("steps", lambda r: f"{r.steps:,}"),
    ("retractions", lambda r: f"{r.retractions:,}"),
    ("prefill tokens computed", lambda r: f"{r.prefill_tokens:,}"),
    ("  of them recomputed", lambda r: f"{r.recomputed_tokens:,}"),
    ("prompt tokens from cache", lambda r: f"{r.cached_tokens:,}"),
    ("  share from cache", lambda r: f"{r.hit_rate:.1%}"),
    ("tokens generated", lambda r: f"{r.generated_tokens:,}"),
    ("time to first token p50", lambda r: _seconds(r.ttft.p50)),
    ("  p90", lambda r: _seconds(r.ttft.p90)),
    ("  p99", lambda r: _seconds(r.ttft.p99)),
    ("end to end p50", lambda r: _seconds(r.e2e.p50)),
    ("  p90", lambda r: _seconds(r.e2e.p90)),
    ("  p99", lambda r: _seconds(r.e2e.p99)),
    ("makespan", lambda r: _seconds(r.makespan_s)),
    ("pool in use, mean", lambda r: f"{r.occupancy_mean:.1%}"),
    ("  peak", lambda r: f"{r.occupancy_peak:.1%}"),
    ("scheduler time", lambda r: f"{r.cpu_s:,.2f} s"),
    ("  per step", lambda r: f"{r.cpu_us_per_step:,.1f} us"),
)
