"""The examples run, and show what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_overlapped_host_serves_and_gives_everything_back() -> None:
    said = run("examples/overlapped_host.py")
    assert "eve: went away" in said
    assert "bob: length after 24 tokens, 96 of its prompt from the cache" in said
    assert "= 256" in said


def test_a_pool_of_ones_own_conforms_and_serves() -> None:
    assert "passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/own_pool.py")
    assert "served with it: 8 tokens" in run("examples/own_pool.py")
