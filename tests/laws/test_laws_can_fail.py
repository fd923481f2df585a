"""Each law's test turns red when the law is broken: in a copy of the package, by a change of one line."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, PAGE, ROOT, Mutant, page

LAWS = [*(f"A{n}" for n in range(1, 5)), *(f"B{n}" for n in range(1, 12)), *(f"C{n}" for n in range(1, 5)),
        *(f"D{n}" for n in (1, 2, 3, 4, 5, 7, 8)), "F1"]


def test_every_law_has_one() -> None:
    assert list(dict.fromkeys(mutant.law for mutant in MUTANTS)) == LAWS


def test_the_tests_are_there() -> None:
    there = {
        f"{file.name}:{node.name}" for file in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    }
    for mutant in MUTANTS:
        test = mutant.test.split(":")[1]
        assert mutant.test in there
        assert mutant.law.lower() in test.split("_"), f"{mutant.test} is not named for {mutant.law}"


def test_the_page_shows_the_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tests/laws/mutants.py"


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.law}-{mutant.where}")
def test_the_test_of_a_broken_law_fails(mutant: Mutant, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    file = source / "kvsched" / mutant.path
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.where} does not have the line any more, or has it twice: {mutant.old}"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    name, test = mutant.test.split(":")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{Path(__file__).parent / name}::{test}"]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, f"{mutant.test} is green though {mutant.seen}\n{done.stdout[-2000:]}"
