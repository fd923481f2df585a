"""The click group behind `kvsched`: its subcommands are imported when they are called. What does not live here: them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import click

SUBCOMMANDS = {
    "scenario": "Run scenario files against the real scheduler.",
    "replay": "Replay a trace under a simulated clock.",
    "demo": "Show admission, hits, retraction and refusal on a generated workload.",
    "bench": "Measure what the scheduler itself costs.",
    "size": "Say how many tokens a deployment holds, and why.",
    "cut": "Cut a pipeline into stages, and say which one binds.",
}
"""Name and one-line help of each subcommand; its module is kvsched.cli.<name>."""


UNWRITABLE = 74
"""Exit code when the output cannot be written: EX_IOERR of sysexits.h."""
INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C: what a shell says of a process that SIGINT ended."""
PIPE_CLOSED = 128 + 13
"""Exit code when the reader of the output went away: what a shell says of a process that SIGPIPE ended."""


class _PipeClosedError(Exception):
    """The reader of the output went away. Not an OSError, which click would end with the code of a replay that wedged."""


@contextmanager
def _closed_pipes_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _PipeClosedError from error


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that Python can end in peace."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _Lazy(click.Group):
    """A group that imports a subcommand's module when it is called, so that `--help` imports none."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command; as a process, end with a code that says what happened, and never with a traceback of the output's."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        if sys.stdout is None:  # it was closed before we came
            click.echo("Error: the output cannot be written: standard output is closed", err=True)
            sys.exit(UNWRITABLE)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        except _PipeClosedError:
            _drop_output()
            code = PIPE_CLOSED
        except OSError as error:
            _drop_output()
            click.echo(f"Error: the output cannot be written: {error.strerror or error}", err=True)
            code = UNWRITABLE
        sys.exit(code if isinstance(code, int) else 0)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _closed_pipes_apart():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_pipes_apart():
            return super().invoke(ctx)

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
    """Schedule the requests of an LLM inference server: run scenarios, replay traces, measure.

    Exit codes that every command shares: 2 for bad input, 74 when the output cannot be written, 130 after Ctrl-C, 141 when
    the reader of the output went away.
    """
