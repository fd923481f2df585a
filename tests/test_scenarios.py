"""Runs every scenario file: ours, each of which states a case or a law with its right value, and the shared ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvsched.scenario import run_file

OURS = Path(__file__).parent / "scenarios"
SHARED = Path(__file__).parents[1] / "../shared/scenarios"

CASES = {
    1, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 18, 20, 23, 24, 26, 27, 28, 29, 31, 32, 33, 34, 35, 37, 38, 39, 41, 42, 43, 44, 45, 46, 53,
    56, 67, 76, 78, 80, 81, 82, 83, 84, 85, 87, 89,
}
"""Cases of the decision core that a scenario file can hold; those that it cannot stand in test_cases.py."""


@pytest.mark.parametrize("path", sorted(OURS.glob("*.json")), ids=lambda path: path.stem)
def test_ours(path: Path) -> None:
    report = run_file(path)
    assert report.code == 0, "\n".join(report.failures)
    assert report.expectations


def test_shared() -> None:
    paths = sorted(SHARED.glob("*.json"))
    if not paths:
        pytest.skip(f"no scenario files in {SHARED.resolve()}: it stands beside a checkout, not in it")
    failures = [f"{path.name}: {failure}" for path in paths for failure in run_file(path).failures]
    assert not failures, "\n".join(failures)


def test_every_case_has_a_file() -> None:
    found = {int(match[1]) for path in OURS.glob("*.json") if (match := re.match(r"c(\d\d)_", path.name))}
    assert found == CASES


def test_names_are_sentences_of_their_own() -> None:
    names = [json.loads(path.read_text())["name"] for path in OURS.glob("*.json")]
    assert len(set(names)) == len(names)
    assert min(len(name.split()) for name in names) >= 5
