"""Settings: every key is checked when the record is made, and the command line reads flags and the environment."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from kvsched import SchedulerConfig
from kvsched.errors import ConfigError
from reference_server.__main__ import main, url
from reference_server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
"""How long a test waits for a process: generous, since nothing is asserted about time."""

BAD: dict[str, tuple[Any, ...]] = {
    "host": ("", "  ", None, 1),
    "port": (-1, 65536, "8000", 80.0, True, None),
    "model": (None, 3, "  "),
    "dtype": ("auto", "fp8", "", None),
    "device": ("gpu", "cuda:", "cuda:x", "CPU", "", None, 0),
    "page_size": (0, -16, 1.5, "16", True, None, 2**31),
    "pool_tokens": (0, 15, None, 2**31),
    "max_running": (0, None, "many"),
    "chunk_tokens": (0, None, 0.5),
    "max_step_tokens": (0, None),
    "context_limit": (0, -1, "none", False),
    "max_queued_requests": (0, None),
    "max_queued_tokens": (0, None),
    "max_in_flight": (0, 3, None, True),
    "order": ("lifo", "", None, 1),
    "head": ("loose", None),
    "admission": ("hopeful", None),
    "prefix_cache": (1, "yes", None),
    "stall_steps": (0, None),
    "max_body_bytes": (0, None, 1e6),
    "step_deadline_s": (0, -1, float("inf"), float("nan"), "1", True, None),
    "write_deadline_s": (0, float("nan"), "1", None),
    "drain_s": (-0.1, float("inf"), "1", None),
    "threads": (0, 2000, 1.0, True),
}


def test_every_key_has_a_bad_value_here() -> None:
    assert set(BAD) == {field.name for field in attrs.fields(Settings)}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} must be .*, not "):
        Settings(**{key: value})


def test_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'pool'"):
        Settings(pool=1)  # type: ignore[call-arg]  # this is the mistake


def test_settings_do_not_change() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]  # this is the mistake


def test_a_pool_holds_whole_pages_and_at_least_one() -> None:
    assert Settings(page_size=16, pool_tokens=100).pages == 6
    assert Settings(page_size=16, pool_tokens=16).pages == 1
    with pytest.raises(ConfigError, match="pool_tokens must be at least page_size = 64, not 63"):
        Settings(page_size=64, pool_tokens=63)


def test_what_the_scheduler_is_told_is_what_it_knows() -> None:
    shared = {"page_size", "max_running", "chunk_tokens", "max_step_tokens", "context_limit", "max_queued_requests",
              "max_queued_tokens", "max_in_flight", "order", "head", "admission", "stall_steps"}
    settings = Settings()
    config = SchedulerConfig(**{key: getattr(settings, key) for key in shared})
    assert config.max_in_flight == 2


def command(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run([sys.executable, "-m", "reference_server", *flags], env=surroundings(**environment), cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def surroundings(**environment: str) -> dict[str, str]:
    unset = ("HOST", "PORT", "MODEL", "PAGE_SIZE", "POOL_TOKENS")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return {**kept, "PYTHONPATH": str(ROOT / "examples"), "OMP_NUM_THREADS": "1", **environment}


def options(*flags: str, **environment: str) -> Settings:
    """The settings that the command line makes of flags and environment."""
    found: list[Settings] = []

    def run(settings: Settings, *, access_log: bool) -> int:
        assert access_log is False
        found.append(settings)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reference_server.__main__.run", run)
        result = CliRunner().invoke(main, list(flags), env={**dict.fromkeys(("HOST", "PORT", "MODEL", "PAGE_SIZE", "POOL_TOKENS"), ""), **environment})
    assert result.exit_code == 0, result.output
    return found[0]


def test_without_flags_the_defaults_hold_and_an_empty_variable_is_none() -> None:
    assert options() == Settings()


def test_a_flag_goes_before_the_environment() -> None:
    assert options(PORT="9001", HOST="some-machine", MODEL="tiny", PAGE_SIZE="32", POOL_TOKENS="640") == \
        Settings(port=9001, model="tiny", page_size=32, pool_tokens=640)  # HOST names the machine in many shells, and no address to listen on
    assert options("--port", "7", PORT="9001").port == 7


def test_every_setting_has_a_flag() -> None:
    values: dict[str, Any] = {
        "host": "::1", "port": 1, "model": "m", "dtype": "bfloat16", "device": "cuda:1", "page_size": 2, "pool_tokens": 4, "max_running": 5,
        "chunk_tokens": 6, "max_step_tokens": 7, "context_limit": 8, "max_queued_requests": 9, "max_queued_tokens": 10, "max_in_flight": 1,
        "order": "fair", "head": "skip", "admission": "guaranteed", "prefix_cache": False, "stall_steps": 11, "max_body_bytes": 12,
        "step_deadline_s": 1.5, "write_deadline_s": 3.5, "drain_s": 2.5, "threads": 3,
    }
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items() if key != "prefix_cache"]
    assert options(*flags, "--no-prefix-cache") == Settings(**values)
    assert set(values) == {field.name for field in attrs.fields(Settings)}


@pytest.mark.parametrize(("flags", "environment", "words"), [
    (("--page-size", "0"), {}, "--page-size must be an integer from 1 to"),
    (("--pool-tokens", "8"), {}, "--pool-tokens must be at least page_size = 16, not 8"),
    (("--device", "tpu"), {}, "--device must be cpu, cuda or cuda:N"),
    (("--order", "lifo"), {}, "'lifo' is not one of"),
    ((), {"PORT": "http"}, "'http' is not a valid integer"),
    ((), {"PAGE_SIZE": "-1"}, "--page-size must be"),
    (("--nothing",), {}, "No such option"),
])
def test_a_bad_value_is_one_line_and_exit_code_2(flags: tuple[str, ...], environment: dict[str, str], words: str) -> None:
    empty = dict.fromkeys(("HOST", "PORT", "MODEL", "PAGE_SIZE", "POOL_TOKENS"), "")
    result = CliRunner().invoke(main, list(flags), env={**empty, **environment})
    assert result.exit_code == 2
    *_, last = result.output.strip().splitlines()
    assert last.startswith("Error: ")
    assert words in last
    assert "Traceback" not in result.output


def test_what_cannot_be_served_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = command("--port", str(taken.getsockname()[1]))
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"Error: cannot listen on 127\.0\.0\.1 port \d+: Address already in use; choose another with --port \(PORT=\.\.\.\)\n", result.stderr)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        result = command("--port", "0", MODEL=str(path))
        assert result.returncode == 1
        assert re.fullmatch(r"Error: .*" + re.escape(str(path)) + r".*\n", result.stderr)


def test_where_a_client_on_this_machine_finds_it() -> None:
    assert url("127.0.0.1", 8000) == url("0.0.0.0", 8000) == "http://127.0.0.1:8000"  # compared, not bound
    assert url("::", 1) == url("::1", 1) == "http://[::1]:1"
    assert url("example.org", 80) == "http://example.org:80"


@contextmanager
def process(*, until: str = "try ", **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command as `make serve` starts it, when it has printed a certain line, and its lines up to that."""
    with subprocess.Popen([sys.executable, "-m", "reference_server"], env=surroundings(**environment), cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as started:
        assert started.stdout is not None
        try:
            lines = []
            for line in started.stdout:
                lines.append(line.rstrip())
                if line.lstrip().startswith(until):
                    break
            yield started, lines
        finally:
            started.kill()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed, and the printed line is for it")
def test_the_printed_line_works() -> None:
    with process(HOST="", PORT="0", MODEL="tiny", PAGE_SIZE="", POOL_TOKENS="8192") as (_, lines):
        said = "\n".join(lines)
        assert "512 pages x 16 tokens = 8,192 tokens" in said
        assert re.search(r"page +http://127\.0\.0\.1:\d+/$", said, re.MULTILINE)
        curl = next(line.split("try", maxsplit=1)[1].strip() for line in lines if "curl" in line)
        answer = subprocess.run(["/bin/sh", "-c", curl.replace("curl ", "curl -sS --fail ", 1)], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def door(lines: list[str]) -> str:
    """Host and port as the server printed them."""
    address = next(line.split()[-1] for line in lines if line.lstrip().startswith("page"))
    return address.removeprefix("http://").rstrip("/")


def test_sigterm_lets_what_runs_end() -> None:
    with process(PORT="0", MODEL="tiny") as (server, lines):
        link = http.client.HTTPConnection(door(lines), timeout=PATIENCE_S)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 800, "ignore_eos": True, "stream": True}
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        stream = link.getresponse()
        head = stream.read(1)
        server.send_signal(signal.SIGTERM)
        late = http.client.HTTPConnection(door(lines), timeout=PATIENCE_S)
        while True:
            late.request("POST", "/v1/completions", json.dumps({**body, "max_tokens": 1, "stream": False}), {"content-type": "application/json"})
            reply = late.getresponse()
            reply.read()
            if reply.status != 200:
                break
        assert (reply.status, reply.getheader("retry-after") is not None) == (503, True)
        assert (head + stream.read()).endswith(b"data: [DONE]\n\n")
        late.close()
        link.close()
        assert server.wait(PATIENCE_S) == 0
        assert server.stdout is not None
        rest = server.stdout.read()
        assert "draining: 1 running" in rest
        assert "Traceback" not in rest


def test_a_second_signal_ends_at_once() -> None:
    with process(PORT="0", MODEL="tiny") as (server, lines):
        link = http.client.HTTPConnection(door(lines), timeout=PATIENCE_S)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        link.getresponse().read(1)
        server.send_signal(signal.SIGINT)
        assert server.stdout is not None
        assert any("draining" in line for line in iter(server.stdout.readline, ""))
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 128 + signal.SIGINT
        link.close()


def test_a_signal_while_the_model_is_read_ends_it_at_once() -> None:
    with process(until="Reading", PORT="0", MODEL="") as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        assert server.stdout is not None
        assert "draining: 0 running" in server.stdout.read()
