"""`kvsched demo`: runs the demonstration and prints it. What does not live here: what it shows (`kvsched.sim.demo`)."""

from __future__ import annotations

import click

from kvsched.sim.demo import EXPECTED, SETTINGS, introduction, lessons, run
from kvsched.sim.report import table


@click.command(name="demo")
def command() -> None:
    """Show admission, prefix hits, retraction and refusal on a generated workload.

    Replays one workload under four settings, with an account of the first as it runs, then a table and what to look at in
    it. Needs no file and takes well under a minute.
    """
    for line in introduction():
        click.echo(line)
    reports = {}
    for setting in SETTINGS:
        click.echo(f"\n{setting.name}:" if setting is EXPECTED else f"{setting.name} ({setting.flags}) ...")
        reports[setting.name] = run(setting, click.echo if setting is EXPECTED else None)
        if setting is EXPECTED:
            click.echo()
    click.echo()
    for line in [*table(reports), "", *lessons(reports)]:
        click.echo(line)
