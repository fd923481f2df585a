"""The README's host loop and the examples run as printed, and show what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

HANGS = 300
"""Seconds after which a program that takes one counts as hanging."""


def blocks(text: str) -> list[str]:
    """The Python blocks of a Markdown text, as written."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_host_loop_runs_as_printed() -> None:
    (loop,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in loop.splitlines() if line.strip()]) <= 25
    ran = subprocess.run([sys.executable, "-W", "error", "-c", loop], capture_output=True, text=True, check=False, timeout=HANGS)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "eve is refused: never_fits 128 pages of 64"
    ended = re.findall(r"^(\w+): 40 tokens, length, (\d+) prompt tokens came from the cache$", ran.stdout, re.MULTILINE)
    assert sorted(ended) == [("ann", "0"), ("bob", "400"), ("cat", "400"), ("dan", "400")]


def test_the_two_commands_of_the_readme_are_make_targets() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    make (\w+)", text, re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:.*##", makefile, re.MULTILINE) for command in commands)


def test_a_block_is_found_as_written() -> None:
    assert blocks("x\n```python\na = 1\n\nb = 2\n```\n```sh\nls\n```\n") == ["a = 1\n\nb = 2\n"]


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_to_its_end(path: Path) -> None:
    ran = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, check=False, timeout=HANGS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout, "an example shows what came of it"
    assert path.name in (ROOT / "README.md").read_text(encoding="utf-8"), "the README names every example"
