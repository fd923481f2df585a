"""`kvsched replay`: a trace, or a generated workload, through the real scheduler under a simulated clock.

What lives here: flags, the progress bar, and printing. What does not: the replay itself (`kvsched.sim`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvsched.config import ADMISSIONS, HEADS, ORDERS, SchedulerConfig
from kvsched.errors import ConfigError
from kvsched.memory.eviction import POLICIES
from kvsched.sim.cost import LinearCost
from kvsched.sim.replay import Progress, build, replay
from kvsched.sim.report import Report, refusal_lines, table
from kvsched.sim.trace import BLOCK_TOKENS, FORMATS, Trace, TraceError, read_trace
from kvsched.sim.workload import ARRIVALS, Workload, generate

GENERATE = "generate"
POOL_TOKENS = 262_144
WEDGED = 1
INVALID = 2
_DEFAULT = Workload()
_SHAPE = tuple(field.name for field in attrs.fields(Workload))
_KNOBS = (
    "page_size", "max_running", "max_step_tokens", "chunk_tokens", "context_limit", "admission", "conservativeness", "order",
    "head", "max_in_flight", "stall_steps", "max_queued_requests", "max_queued_tokens",
)


class _Invalid(click.ClickException):
    """The input cannot be used; the message says which part and why."""

    exit_code = INVALID


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def _opt(flag: str, kind: Any, default: Any, text: str) -> Callable[[Any], Any]:
    return click.option(flag, type=kind, default=default, show_default=default is not None, help=text)


_COUNT = click.IntRange(min=1)
_SCHEDULER = _options(
    _opt("--pool-tokens", _COUNT, POOL_TOKENS, "Token slots of the KV pool, rounded down to whole pages."),
    _opt("--page-size", _COUNT, 16, "Tokens per page."),
    _opt("--max-running", _COUNT, 256, "Residents at most, mid-prefill ones included."),
    _opt("--max-step-tokens", _COUNT, 8192, "Tokens computed in one step over all requests."),
    _opt("--chunk-tokens", _COUNT, None, "Tokens of one request's prefill in one step.  [default: bounded by the step alone]"),
    _opt("--context-limit", _COUNT, None, "Prompt + new tokens of one request.  [default: bounded by the pool alone]"),
    _opt("--order", click.Choice(ORDERS), "fcfs", "Who goes first."),
    _opt("--head", click.Choice(HEADS), "strict", "Who may pass a head that does not fit now."),
    _opt("--admission", click.Choice(ADMISSIONS), "expected",
         "Reserve the most a request can write, or an estimate (and retract when it was too low)."),
    _opt("--conservativeness", float, 1.0, "Scales the estimate of expected admission."),
    _opt("--max-in-flight", click.IntRange(1, 2), 1, "Plans not yet committed; 2 overlaps scheduling with execution."),
    _opt("--max-queued-requests", click.IntRange(min=0), None, "Waiting requests at most; more are refused.  [default: no bound]"),
    _opt("--max-queued-tokens", click.IntRange(min=0), None, "Their prompt tokens at most.  [default: no bound]"),
    _opt("--stall-steps", _COUNT, 100, "Steps without progress after which the replay stops as wedged."),
    _opt("--eviction", click.Choice(tuple(POLICIES)), "lru", "What the prefix cache forgets first."),
    click.option("--no-cache", is_flag=True, help="Run without a prefix cache."),
    click.option("--no-ledger", is_flag=True,
                 help="Ignore what was promised to prefills that are under way: shows the deadlock that the ledger prevents."),
)
_WORKLOAD = _options(
    _opt("--requests", _COUNT, _DEFAULT.requests, "generate: how many requests."),
    _opt("--rate", float, _DEFAULT.rate, "generate: arrivals per second, on average."),
    _opt("--arrivals", click.Choice(ARRIVALS), _DEFAULT.arrivals, "generate: distribution of the gaps between arrivals."),
    _opt("--burstiness", float, _DEFAULT.burstiness, "generate: coefficient of variation of gamma gaps; 1 is poisson."),
    _opt("--prompt-mean", float, _DEFAULT.prompt_mean, "generate: mean of a prompt's own tokens (lognormal)."),
    _opt("--prompt-sigma", float, _DEFAULT.prompt_sigma, "generate: sigma of their logarithm."),
    _opt("--output-mean", float, _DEFAULT.output_mean, "generate: mean of the tokens to generate (lognormal)."),
    _opt("--output-sigma", float, _DEFAULT.output_sigma, "generate: sigma of their logarithm."),
    _opt("--tree-depth", int, _DEFAULT.tree_depth, "generate: levels of the tree of shared prefixes; 0: none."),
    _opt("--tree-fanout", int, _DEFAULT.tree_fanout, "generate: children of each of its nodes."),
    _opt("--tree-tokens", int, _DEFAULT.tree_tokens, "generate: tokens of each of its nodes."),
    _opt("--oversize-share", float, _DEFAULT.oversize_share, "generate: share of requests with a prompt of --oversize-tokens."),
    _opt("--oversize-tokens", int, None, "generate: their prompt tokens.  [default: one more than the pool has]"),
    _opt("--tenants", int, _DEFAULT.tenants, "generate: number of tenants, for the fair order."),
    _opt("--priorities", int, _DEFAULT.priorities, "generate: number of priorities, for the priority order."),
)


@click.command(name="replay")
@click.option("--trace", "path", type=click.Path(path_type=Path), metavar="FILE", help="The trace to replay.")
@click.option("--format", "form", type=click.Choice((*FORMATS, GENERATE)), required=True,
              help="What the file is, or generate for a workload drawn from --seed (then there is no file).")
@_opt("--speed", float, 1.0, "Let everybody arrive that many times faster.")
@_opt("--limit", _COUNT, None, "Requests at most, from the top.  [default: all]")
@_opt("--block-tokens", _COUNT, BLOCK_TOKENS, "mooncake: tokens per hash id.")
@_SCHEDULER
@_opt("--t-base", float, LinearCost().t_base, "Simulated seconds of a step besides its tokens.")
@_opt("--t-tok", float, LinearCost().t_tok, "Simulated seconds per token of a step.")
@_WORKLOAD
@_opt("--seed", click.IntRange(min=0), 0, "generate: the same seed gives the same workload.")
@click.option("--check", is_flag=True, help="Check every invariant of the scheduler after each step; slow.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Replay a trace on the real scheduler under a simulated clock, and say what came of it.

    A step of n tokens takes t_base + t_tok * n seconds. Every request generates exactly the tokens its trace says. Times
    to first token and end to end run from the arrival in the trace to the end of a step; percentiles are values that
    occurred: sorted(v)[min(len(v) - 1, int(p * len(v)))]. All figures but the scheduler's own time are the same in every
    run of the same input.

    Exit code: 0 when every request was served or refused, 1 when the replay wedged with work left, 2 for bad input.
    """
    try:
        trace = _trace(ctx, options)
        report = _replay(trace, options)
    except (ConfigError, TraceError) as error:
        raise _Invalid(str(error)) from None
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        print_report(report)
    ctx.exit(WEDGED if report.wedge else 0)


def print_report(report: Report) -> None:
    """The table, then refusals, lines that were skipped and what is stuck, in sentences."""
    lines = [*table({"": report}), *refusal_lines(report)]
    if report.skipped:
        lines.append(f"skipped: {report.skipped:,} lines of the trace that ask for nothing")
    if report.wedge:
        lines += report.wedge.lines()
    click.echo("\n".join(lines))


def _trace(ctx: click.Context, options: dict[str, Any]) -> Trace:
    limit, path = options["limit"], options["path"]
    if options["form"] != GENERATE:
        stated = [name for name in (*_SHAPE, "seed") if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if stated:
            raise click.UsageError(f"--{stated[0].replace('_', '-')} is for --format generate only", ctx)
        if path is None:
            raise click.UsageError(f"--format {options['form']} needs --trace FILE", ctx)
        trace = read_trace(path, options["form"], limit=limit, block_tokens=options["block_tokens"])
        if not trace.arrivals:
            raise TraceError(f"{path}: no request in it, and {trace.skipped:,} lines that ask for nothing")
        return trace
    if path is not None:
        raise click.UsageError("--format generate takes no --trace", ctx)
    shape = {name: options[name] for name in _SHAPE}
    if shape["oversize_tokens"] is None:
        shape["oversize_tokens"] = options["pool_tokens"] + 1
    return Trace(generate(Workload(**shape), options["seed"])[:limit])


def _replay(trace: Trace, options: dict[str, Any]) -> Report:
    config = SchedulerConfig(**{name: options[name] for name in _KNOBS})
    engine = build(
        config, options["pool_tokens"], prefix_cache=not options["no_cache"], eviction=options["eviction"],
        ledger=not options["no_ledger"],
    )
    with _bar(len(trace.arrivals)) as observe:
        return replay(
            trace.arrivals, engine, cost=LinearCost(options["t_base"], options["t_tok"]), speed=options["speed"],
            check=options["check"], skipped=trace.skipped, observe=observe,
        )


@contextmanager
def _bar(requests: int) -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=requests)

        def observe(progress: Progress) -> None:
            share = progress.used / progress.usable
            text = f"{progress.clock_s:,.0f} s, pool {share:.0%} in use, {progress.refused} refused"
            bar.update(task, completed=progress.finished + progress.refused, description=text)

        yield observe
