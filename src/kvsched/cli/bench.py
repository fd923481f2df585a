"""`kvsched bench`: measure what the scheduler itself costs, as a table or as one JSON object per line.

What lives here: flags and printing. What does not: the measurements, each of which is a module of `kvsched.bench`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from kvsched.memory import POLICIES

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object per line instead of a table.")


class _Numbers(click.Command):
    """A command whose option may be followed by several values: `--running 32 256` is read as `--running 32 --running 256`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        many = {flag for option in self.params if getattr(option, "multiple", False) for flag in option.opts}
        spread: list[str] = []
        current = ""
        for word in args:
            if word.startswith("-"):
                name, _, value = word.partition("=")
                current = name if name in many else ""
                spread += [word] if value or not current else []
            else:
                spread += [current, word] if current else [word]
        return super().parse_args(ctx, spread)


@click.group()
def command() -> None:
    """Measure what the scheduler itself costs. Figures depend on the machine; compare only those of one run."""


def _numbers(flag: str, default: tuple[int, ...], text: str) -> Callable[[_Decorated], _Decorated]:
    return click.option(flag, type=_COUNT, multiple=True, default=default, show_default=True, help=text)


def _number(flag: str, default: int, text: str) -> Callable[[_Decorated], _Decorated]:
    return click.option(flag, type=_COUNT, default=default, show_default=True, help=text)


@command.command(cls=_Numbers)
@_numbers("--running", (32, 256, 1024, 4096), "Requests decoding at once; several may follow.")
@_number("--page-size", 16, "Tokens per page.")
@_JSON
def step(as_json: bool, **options: Any) -> None:
    """A steady decode step: schedule and commit."""
    _show("step", options, as_json)


@command.command(cls=_Numbers)
@_numbers("--tokens", (12_000, 128_000), "Prompt lengths; several may follow.")
@_number("--page-size", 16, "Tokens per page.")
@_number("--repeats", 25, "Prompts measured; the figures are medians.")
@_JSON
def prefix(as_json: bool, **options: Any) -> None:
    """Match and lock of a cached prompt, and insert of a cold one."""
    _show("prefix", options, as_json)


@command.command(cls=_Numbers)
@_number("--waiting", 1000, "Requests that wait.")
@_number("--tokens", 12_000, "Prompt tokens of each.")
@_JSON
def admission(as_json: bool, **options: Any) -> None:
    """An admission pass over waiting requests none of which fits."""
    _show("admission", options, as_json)


@command.command(cls=_Numbers)
@_number("--pages", 1_000_000, "Pages in the pool, all of them cached.")
@_number("--leaves", 100_000, "Leaves of the tree.")
@_number("--evictions", 10_000, "Evictions of one page.")
@_number("--page-size", 16, "Tokens per page.")
@click.option("--eviction", type=click.Choice(list(POLICIES)), default="lru", show_default=True, help="Who is evicted first.")
@_JSON
def evict(as_json: bool, **options: Any) -> None:
    """Single-page evictions from a large tree, and memory per cached page."""
    _show("evict", options, as_json)


def _show(name: str, options: dict[str, Any], as_json: bool) -> None:
    """Run one measurement and print each line as soon as it is there (JSON), or all of them as a table."""
    try:
        lines: Iterator[dict[str, Any]] = importlib.import_module(f"kvsched.bench.{name}").run(**options)
        if as_json:
            for line in lines:
                click.echo(json.dumps(line))
        else:
            _table(name, list(lines))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _table(name: str, lines: list[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415 -- JSON output needs no rich
    from rich.table import Table  # noqa: PLC0415

    columns = list(dict.fromkeys(key for line in lines for key in line))
    table = Table(title=f"kvsched bench {name}")
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*(_cell(line.get(column, "")) for column in columns))
    console = Console()
    console.width = max(console.width, sum(len(column) + 8 for column in columns))  # a figure is never cut short
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
