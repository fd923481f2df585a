"""The demonstration: one generated workload under four settings, and what there is to see in the figures.

What lives here: the workload, the settings, and the sentences. What does not: printing (`kvsched.cli.demo`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvsched.config import SchedulerConfig
from kvsched.sim.replay import Progress, build, replay
from kvsched.sim.report import Report
from kvsched.sim.workload import Workload, generate

PAGE_SIZE = 16
POOL_TOKENS = 16_384
WORKLOAD = Workload(oversize_share=0.02, oversize_tokens=POOL_TOKENS + 1)
COMMAND = "kvsched replay --format generate --oversize-share 0.02 --pool-tokens 16384 --chunk-tokens 256 --max-step-tokens 1024"
"""The command line that runs the same workload; a setting adds its flags to it."""
ANNOUNCEMENTS = 10
STUCK_NAMED = 3
WIDTH = 120


@attrs.frozen
class Setting:
    """One way to run the workload. flags: what to add to `COMMAND` for the same."""

    name: str
    flags: str
    admission: str = "expected"
    prefix_cache: bool = True
    ledger: bool = True


EXPECTED = Setting("expected", "")
GUARANTEED = Setting("guaranteed", "--admission guaranteed", admission="guaranteed")
UNCACHED = Setting("no cache", "--no-cache", prefix_cache=False)
UNLEDGERED = Setting("no ledger", "--admission guaranteed --no-ledger", admission="guaranteed", ledger=False)
SETTINGS = (EXPECTED, GUARANTEED, UNCACHED, UNLEDGERED)
FURTHER = (
    (GUARANTEED.flags, "for the second: no retraction, later first tokens"),
    (UNCACHED.flags, "for the third: every prefix computed anew"),
    (UNLEDGERED.flags, "for the last: it stops, says who is stuck and why, and exits with 1"),
    ("--no-ledger", "to see expected admission retract its way out of the deadlock: count what it recomputes"),
    ("--head backfill", "to let short requests pass a head that does not fit, without delaying it"),
    ("--json", "for all figures as one JSON object"),
)
"""Flags to add to `COMMAND`, and what for."""


def run(setting: Setting, tell: Callable[[str], None] | None = None) -> Report:
    """Replay the workload under a setting; `tell` gets a line each time another tenth of the requests has ended."""
    config = SchedulerConfig(page_size=PAGE_SIZE, chunk_tokens=256, max_step_tokens=1024, admission=setting.admission)
    engine = build(config, POOL_TOKENS, prefix_cache=setting.prefix_cache, ledger=setting.ledger)
    told = 0

    def observe(progress: Progress) -> None:
        nonlocal told
        tenth = ANNOUNCEMENTS * (progress.finished + progress.refused) // progress.requests
        if tell is not None and tenth > told:
            told = tenth
            tell(_account(progress, engine.scheduler.snapshot()))

    return replay(generate(WORKLOAD), engine, observe=observe, every=20)


def _account(progress: Progress, state: Mapping[str, Any]) -> str:
    totals = state["totals"]
    return (
        f"{progress.clock_s:6.1f} s  arrived {progress.arrived:3}  finished {progress.finished:3}  refused {progress.refused:2}  "
        f"running {len(state['running']):3}  waiting {len(state['waiting']):3}  pool {progress.used / progress.usable:4.0%}  "
        f"from cache {totals['cached_tokens']:7,} tokens  retractions {totals['retractions']:3}"
    )


def introduction() -> list[str]:
    """What is about to run."""
    w = WORKLOAD
    who = (
        f"{w.requests} requests arrive in bursts, {w.rate:g} per second on average, at a pool of {POOL_TOKENS:,} token slots"
        f" ({POOL_TOKENS // PAGE_SIZE:,} pages of {PAGE_SIZE})."
    )
    what = (
        f"Each prompt begins with {w.tree_depth * w.tree_tokens} tokens that others share, followed by about {w.prompt_mean:,.0f}"
        f" of its own; about {w.output_mean:,.0f} tokens are generated. {w.oversize_share:.0%} of the prompts are larger than the pool."
    )
    how = "The clock is simulated; the scheduler is the real one."
    return [part for line in (who, what, how) for part in textwrap.wrap(line, WIDTH)]


def lessons(reports: Mapping[str, Report]) -> list[str]:
    """What to look at in the figures of all `SETTINGS`, by name of the setting, and what to try next."""
    lines = [part for line in _lessons(reports) for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    lines += ["", "Try next:", f"  {COMMAND}", "runs the first column. Add to it"]
    width = max(len(flags) for flags, _ in FURTHER)
    return lines + [f"  {flags.ljust(width)}  {what}" for flags, what in FURTHER]


def _lessons(reports: Mapping[str, Report]) -> list[str]:
    expected, guaranteed, uncached, unledgered = (reports[setting.name] for setting in SETTINGS)
    refusal = (
        f"- refused: {expected.refused} requests could never fit, and were told so at once with the two numbers. The other"
        f" {expected.finished} all finished; none of them waited behind one that cannot start."
    )
    admission = (
        f"- admission: `guaranteed` reserves all that a request may write. It retracts nobody ({guaranteed.retractions}) and lets"
        f" requests in later: time to first token p50 is {_s(guaranteed.ttft.p50)}, against {_s(expected.ttft.p50)} with"
        " `expected`, which reserves an estimate."
    )
    retraction = (
        f"- retraction: where the estimate was too low, `expected` took pages back {expected.retractions} times. The victims"
        f" resumed from the cache: {expected.recomputed_tokens:,} tokens were computed twice,"
        f" {expected.recomputed_tokens / max(expected.prefill_tokens, 1):.1%} of all prefill; without a cache"
        f" {uncached.recomputed_tokens:,} were."
    )
    hits = (
        f"- prefix hits: {expected.hit_rate:.0%} of the prompt tokens came from the cache. Without it {uncached.prefill_tokens:,}"
        f" had to be computed instead of {expected.prefill_tokens:,}, and time to first token p50 is {_s(uncached.ttft.p50)}."
    )
    return ["What to look at:", refusal, admission, retraction, hits, *_deadlock(unledgered)]


def _deadlock(report: Report) -> list[str]:
    if report.wedge is None:
        return [f"- ledger: without it the replay came through this time, with {report.retractions} retractions."]
    why = (
        "- ledger: without an account of the prefill that is promised and not yet computed, the same workload wedged after"
        f" {report.finished} requests. {report.unfinished} were never served: those that run hold pages that the others among"
        " them need."
    )
    return [why, *report.wedge.lines()[1 : 1 + STUCK_NAMED]]


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
