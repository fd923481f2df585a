"""The README's host loop runs as printed and shows what it says; the commands and examples it names are there."""

from __future__ import annotations

import re
import subprocess
import sys

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
    assert commands == ["serve", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:.*##", makefile, re.MULTILINE) for command in commands)


def test_a_block_is_found_as_written() -> None:
    assert blocks("x\n```python\na = 1\n\nb = 2\n```\n```sh\nls\n```\n") == ["a = 1\n\nb = 2\n"]


def test_every_example_is_tested_and_named_in_the_readme() -> None:
    tested = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        assert name in tested, f"{name} has no test"
        assert name in readme, f"the README does not name {name}"
