"""The project's own files: pinned packages, make targets, and what continuous integration runs."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from checkout import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SERVER = ("kvsched[kernels]", "tokenizers", "safetensors", "gguf", "jinja2", "starlette", "uvicorn", "pydantic", "prometheus-client", "click", "setuptools")
"""What `make serve` is for; everything else in its list is there because one of these needs it."""
ROOTS = (*SERVER, "kvsched[cli,testing]", "transformers", "openai", "selenium", "mypy", "ruff")
"""The same of the development environment."""


def pins(name: str) -> dict[str, str]:
    """Distribution name (canonical) to version in one list of requirements/. Fails on a line that pins nothing."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found |= pins(text[3:])
        elif text:
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


@pytest.mark.parametrize(("name", "roots"), [("serve.txt", SERVER), ("dev.txt", ROOTS)])
def test_every_package_is_pinned_and_no_other_is(name: str, roots: tuple[str, ...]) -> None:
    pinned = pins(name)
    assert closure(roots) - {"kvsched"} == set(pinned)
    assert {key: metadata.version(key).partition("+")[0] for key in pinned} == pinned


@pytest.mark.parametrize("name", ["serve-no-deps.txt", "dev-no-deps.txt"])
def test_what_is_installed_without_its_dependencies_is_pinned_too(name: str) -> None:
    pinned = pins(name)
    assert {key: metadata.version(key) for key in pinned} == pinned


def test_make_targets_and_continuous_integration() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK), ".ci/run must be executable"
    body = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert body[0] == "set -euo pipefail"
    assert body[-1].endswith("make test"), "continuous integration runs what a reader of the README runs"
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("serve", "demo", "test", "lint", "soak", "bench"):
        assert f"make {target} " in listed
        dry = subprocess.run(["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr


def test_set_up_refuses_an_old_python(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "requirements").mkdir()
    for name in ("serve.txt", "serve-no-deps.txt", "dev.txt", "dev-no-deps.txt"):
        (tmp_path / "requirements" / name).write_text("")
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.10.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    ran = subprocess.run(["make", "lint", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "needs Python 3.11 or newer" in ran.stderr
    assert "Python 3.10.1" in ran.stderr
    assert not (tmp_path / ".venv").exists()
