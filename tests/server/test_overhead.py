"""The measurement of the server's own overhead runs, and gives figures. What they are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys

from launched import PATIENCE_S, ROOT, surroundings


def test_it_measures_the_server_and_a_bare_loop() -> None:
    command = [sys.executable, "-m", "reference_server.overhead", "--model=tiny", "--streams=3", "--steps=20", "--threads=1", "--json"]
    done = subprocess.run(command, env=surroundings(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    costs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [cost["what"] for cost in costs] == ["server, 2 in flight", "server, 1 in flight", "bare loop"]
    for cost in costs:
        assert cost["steps"] >= 20
        assert 0 < cost["kvsched"] < cost["wall"]
        assert 0 < cost["kvsched_percent"] < 100
    assert 0 < costs[2]["forward"] < costs[2]["executor"]
