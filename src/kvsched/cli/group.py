"""The click group behind `kvsched`: its subcommands are imported when they are called. What does not live here: them."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import click

SUBCOMMANDS = {
    "scenario": "Run scenario files against the real scheduler.",
    "replay": "Replay a trace under a simulated clock.",
    "demo": "Show admission, hits, retraction and refusal on a generated workload.",
    "bench": "Measure what the scheduler itself costs.",
}
"""Name and one-line help of each subcommand; its module is kvsched.cli.<name>."""


class _Lazy(click.Group):
    """A group that imports a subcommand's module when it is called, so that `--help` imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- click's signature
        if cmd_name not in SUBCOMMANDS:
            return None
        try:
            module = importlib.import_module(f"kvsched.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if error.name != "rich":
                raise
            raise click.ClickException(f"{cmd_name} needs rich: pip install 'kvsched[cli]'") from None
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.group(name="kvsched", cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvsched"), prog_name="kvsched")
def group() -> None:
    """Schedule the requests of an LLM inference server: run scenarios, replay traces, measure."""
