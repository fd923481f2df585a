"""The tutorial of docs/ runs as printed, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
HANGS = 300
"""Seconds after which a program that takes one counts as hanging."""


def test_the_host_of_the_tutorial_runs_as_printed() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 60, f"a host in sixty lines has {len(lines)}"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=HANGS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "huge is refused: never_fits, 78 of 24"
    last = re.fullmatch(r"retractions: 0 and (\d+) - the same text: True", ran.stdout.splitlines()[-1])
    assert last, ran.stdout
    assert int(last[1]) > 3
