"""The reference server as a process of its own, for tests that are about the process or about many clients at once."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import attrs

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""How long a test waits for what must come: generous, since nothing is asserted about time."""
COMMAND = (sys.executable, "-W", "default", "-m", "reference_server")
VARIABLES = ("HOST", "PORT", "MODEL", "PAGE_SIZE", "POOL_TOKENS")
"""What the command reads from the environment."""
READY = "  try "
"""How the last line of the banner begins."""


@attrs.define(eq=False)
class Launched:
    """A server process, and what it has printed so far. Warnings of Python are on, so that what was left open is told."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    @property
    def stdout(self) -> str:
        return Path(self.out.name).read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return Path(self.err.name).read_text(encoding="utf-8")

    @property
    def address(self) -> str:
        """host:port as it was printed."""
        found = re.search(r"^Listening on http://(\S+) ", self.stdout, re.MULTILINE)
        assert found is not None, self.stdout + self.stderr
        return found[1]

    @property
    def place(self) -> tuple[str, int]:
        """Host and port for a socket."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def base_url(self) -> str:
        return f"http://{self.address}/v1"

    @property
    def curl(self) -> str:
        """The line that the banner offers."""
        return next(line.removeprefix(READY).strip() for line in self.stdout.splitlines() if line.startswith(READY))

    def until_printed(self, words: str) -> None:
        """Wait until the output or the log holds certain words."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.stdout and words not in self.stderr:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stdout}{self.stderr}"
            assert time.monotonic() < deadline, f"{words!r} was not printed: {self.stdout}{self.stderr}"
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request over a connection of its own: status and body."""
        link = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        try:
            link.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def seen(self) -> Any:
        """/debug/scheduler."""
        status, body = self.ask("GET", "/debug/scheduler")
        assert status == 200, body
        return json.loads(body)

    def metric(self, line: str) -> float:
        """One figure of /metrics by the line that it stands in; 0 where it does not appear."""
        _, body = self.ask("GET", "/metrics")
        found = re.search(rf"^{re.escape(line)} (\S+)$", body.decode(), re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE_S)

    def ends_well(self) -> None:
        """SIGTERM: it ends with 0, and its log says nothing but that it drains."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.stderr
        assert re.fullmatch(r"draining: \d+ running, up to [\d.]+ s; another signal ends at once\n", self.stderr), self.stderr


@contextmanager
def launched(*flags: str, until: str = READY, **environment: str) -> Iterator[Launched]:
    """A server with those flags and variables, once it has printed certain words; killed at the end if it still runs."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server = subprocess.Popen(
            [*COMMAND, *flags], env=surroundings(**environment), cwd=ROOT, stdout=out, stderr=err,
        )
        try:
            found = Launched(server, out, err)
            found.until_printed(until)
            yield found
        finally:
            server.kill()
            server.wait()


def surroundings(**environment: str) -> dict[str, str]:
    """Our environment, with none of the variables that the command reads but those that are given."""
    kept = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": str(ROOT / "examples"), **environment}
