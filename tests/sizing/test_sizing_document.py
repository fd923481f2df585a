"""docs/sizing.md: what its examples show is what the commands print, and its arithmetic by hand comes to what it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsched.cli.group import group
from kvsched.sizing.boot import Boot

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ kvsched (.*)\n((?:.*\n)*?)```", TEXT)


@pytest.mark.parametrize(("words", "shown"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_an_example_prints_what_is_shown(words: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(group, shlex.split(words), catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, shown)


def test_the_python_example_prints_what_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n((?:.*\n)*?)```", TEXT)
    monkeypatch.chdir(ROOT)
    exec(source, {})
    assert capsys.readouterr().out == source.rstrip().rsplit("# ", 1)[1] + "\n"


def test_there_are_examples_of_both_commands() -> None:
    assert {words.split()[0] for words, _ in EXAMPLES} == {"size", "cut"}
    assert len(EXAMPLES) >= 6


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix("B").removesuffix("slots").strip())


def by_hand(left: str) -> float:
    """The value of a line of arithmetic as the document writes it; words beside figures are left out."""
    left = re.sub(r"\([^()\d]*\)", "", left).split(", whole ones")[0].split("=")[0]
    figures = re.sub(r"[a-zA-Z]+[a-z-]*", lambda word: word[0] if word[0] in {"x", "max"} else "", left.replace(",", ""))
    figures = re.sub(r"max\((\d+) +(\d+) / (\d+)\)", lambda m: str(max(int(m[1]), int(m[2]) // int(m[3]))), figures)
    return float(eval(figures.replace("x", "*").replace("^", "**"), {"__builtins__": {}}))


ROWS = [
    (step, left, right) for step, left, right in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d,]+(?: B| slots)?) \|$", TEXT, re.MULTILINE)
    if "prompt" not in left
]


@pytest.mark.parametrize(("step", "left", "right"), ROWS, ids=[f"{number} {row[0]}" for number, row in enumerate(ROWS)])
def test_the_arithmetic_by_hand_holds(step: str, left: str, right: str) -> None:
    last = left.rsplit(";", maxsplit=1)[-1]
    value = by_hand(last)
    assert int(value) == number(right) if "whole ones" in left else value == number(right)


def test_there_is_arithmetic() -> None:
    assert len(ROWS) >= 20


def test_the_record_shown_has_the_keys_that_are_read() -> None:
    (shown,) = re.findall(r"```json\n((?:.*\n)*?)```", TEXT)
    record = Boot.from_dict(json.loads(shown))
    assert record.stages[0].reserve >> 20 == 8848
