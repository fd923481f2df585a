"""`kvsched` as a process: what it says and how it ends when its output cannot be written, is not read, or it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsched.cli.group import INTERRUPTED, PIPE_CLOSED, UNWRITABLE, group

COMMAND = [sys.executable, "-c", "import sys; from kvsched.cli import main; sys.exit(main())"]
SHORT = ["replay", "--format", "generate", "--requests", "3"]
FULL = Path("/dev/full")


def run(words: list[str], output: int) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *words], stdout=output, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("words", [SHORT, ["--help"], ["replay", "--help"]], ids=" ".join)
def test_a_full_disk_is_one_line_and_a_code_of_its_own(words: list[str]) -> None:
    with FULL.open("wb") as full:
        assert run(words, full.fileno()) == (UNWRITABLE, "Error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", [SHORT, ["--help"], ["replay", "--help"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_wedge_and_no_traceback(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(words, writer) == (PIPE_CLOSED, "")
    finally:
        os.close(writer)


def test_a_closed_output_is_said() -> None:
    closing = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", closing, *COMMAND[1:], *SHORT], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (UNWRITABLE, "Error: the output cannot be written: standard output is closed\n")


def test_an_interrupt_has_a_code_of_its_own() -> None:
    """It is sent from inside, once the replay runs, so that it cannot come too early or too late."""
    program = ("import os, signal, sys; import kvsched.cli.replay as command; from kvsched.cli import main;"
               "command.replay = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT); sys.exit(main())")
    done = subprocess.run([sys.executable, "-c", program, *SHORT], capture_output=True, text=True, timeout=120, check=False,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert (done.returncode, done.stdout, done.stderr.strip()) == (INTERRUPTED, "", "Interrupted.")


def test_a_caller_in_the_same_process_gets_what_click_gives() -> None:
    assert group.main(["scenario", "--help"], standalone_mode=False) == 0
    assert CliRunner().invoke(group, ["nonsense"]).exit_code == 2
