"""`kvsched scenario`: run scenario files and say what did not hold. What does not live here: running them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvsched.scenario import Report, run_file
from kvsched.scenario.runner import INVALID


@click.command(name="scenario")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print each file's final state, one JSON object a line, instead of prose.")
def command(files: tuple[Path, ...], as_json: bool) -> None:
    """Run scenario files against the real scheduler.

    Exit code: 0 when every expectation held, 1 when one did not, 2 when a file is not valid; the worst of all files.
    """
    worst = 0
    for path in files:
        report = run_file(path)
        worst = max(worst, report.code)
        if as_json:
            _print_state(path, report)
        else:
            _print_prose(path, report)
    raise SystemExit(worst)


def _print_state(path: Path, report: Report) -> None:
    answer = {"error": report.failures[-1]} if report.state is None else report.state
    click.echo(json.dumps(answer))
    for failure in report.failures:
        click.echo(f"{path}: {failure}", err=True)


def _print_prose(path: Path, report: Report) -> None:
    if not report.code:
        held = f"{report.expectations} expectation{'s' if report.expectations != 1 else ''} held"
        click.echo(f"{path}: ok: {report.name} ({held})")
    for failure in report.failures:
        click.echo(f"{path}: {failure}", err=report.code == INVALID)
