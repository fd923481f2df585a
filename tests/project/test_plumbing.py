"""The project's own files: pinned packages, make targets, and what continuous integration runs."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

from checkout import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("kvsched[cli,testing]", "setuptools", "mypy", "ruff")
"""What the development environment is for; everything else in it is there because one of these needs it."""


def pins() -> dict[str, str]:
    """Distribution name (canonical) to version in requirements/dev.txt. Fails on a line that pins nothing."""
    found = {}
    for line in (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", text)
            assert match, f"not pinned to one version: {line}"
            found[str(canonicalize_name(match[1]))] = match[2]
    return found


def closure(roots: tuple[str, ...]) -> set[str]:
    """Every distribution that the installed `roots` require here, themselves included."""
    todo, seen = [Requirement(root) for root in roots], set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *sorted(wanted.extras)):
            key = (str(canonicalize_name(wanted.name)), extra)
            if key in seen:
                continue
            seen.add(key)
            needs = [Requirement(text) for text in metadata.requires(wanted.name) or ()]
            todo += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def test_every_package_is_pinned_and_no_other_is() -> None:
    pinned = pins()
    assert closure(ROOTS) - {"kvsched"} == set(pinned)
    assert {name: metadata.version(name) for name in pinned} == pinned


def test_make_targets_and_continuous_integration() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK), ".ci/run must be executable"
    body = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert body[0] == "set -euo pipefail"
    assert body[-1].endswith("make test"), "continuous integration runs what a reader of the README runs"
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "soak", "bench"):
        assert f"make {target} " in listed
        dry = subprocess.run(["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr


def test_set_up_refuses_an_old_python(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dev.txt").write_text("")
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.10.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    ran = subprocess.run(["make", "lint", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "needs Python 3.11 or newer" in ran.stderr
    assert "Python 3.10.1" in ran.stderr
    assert not (tmp_path / ".venv").exists()
