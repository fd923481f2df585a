"""The command line: `python -m reference_server`. Flags, and the environment for those that `make serve` passes on.

What does not live here: what a value may be (`reference_server.settings`), and the life of the server (`reference_server.api.server`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvsched.config import ADMISSIONS, HEADS, ORDERS
from kvsched.errors import ConfigError
from reference_server.settings import DTYPES, TINY, Settings

if TYPE_CHECKING:
    from reference_server.api.state import Served

DEFAULTS = attrs.asdict(Settings())
QUESTION = "What is the capital of France?"
SPIN = "20000"
"""Rounds for which torch's threads (GNU OpenMP) spin before they sleep, where nothing else is set. By default they spin for
milliseconds, and where others want the cores a step of a few rows then takes tens of times as long. With 20,000 rounds an idle machine
loses nothing; with fewer it loses, and a busy one gains more (docs/performance.md, docs/server.md)."""


def _option(name: str, kind: Any, text: str, *, env: bool = False) -> Callable[[Any], Any]:
    """A flag for the setting of that name; its default is the setting's. An empty variable of the environment counts as unset."""
    default = DEFAULTS[name]
    return click.option(
        f"--{name.replace('_', '-')}", name, type=kind, default=default, show_default=default not in (None, ""), help=text,
        envvar=name.upper() if env else None, show_envvar=env,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@_option("host", str, "Address to listen on; 0.0.0.0 for all.")  # no variable: HOST means the machine to many shells
@_option("port", int, "Port to listen on; 0 takes a free one.", env=True)
@_option("model", str, f"A directory with safetensors, a .gguf file, or {TINY!r} for a tiny random model.  [default: SmolLM2-135M-Instruct]", env=True)
@_option("dtype", click.Choice(DTYPES), "Type of weights and KV pool.")
@_option("device", str, "Where the model runs: cpu, cuda or cuda:N.")
@_option("page_size", int, "Tokens per page of the KV pool.", env=True)
@_option("pool_tokens", int, "Token slots of the KV pool, rounded down to whole pages.", env=True)
@_option("max_running", int, "Requests in a step at most.")
@_option("chunk_tokens", int, "Tokens of one prompt computed in one step.")
@_option("max_step_tokens", int, "Tokens computed in one step over all requests.")
@_option("context_limit", int, "Prompt + new tokens of one request.  [default: the model's own]")
@_option("max_queued_requests", int, "Waiting requests at most; more get 429.")
@_option("max_queued_tokens", int, "Their prompt tokens at most.")
@_option("max_in_flight", int, "Plans under way; 2 decides the next step while one is computed.")
@_option("order", click.Choice(ORDERS), "Who goes first.")
@_option("head", click.Choice(HEADS), "Who may pass a request that has to wait for pages.")
@_option("admission", click.Choice(ADMISSIONS), "Reserve the most a request can write, or an estimate (and retract when it was too low).")
@click.option("--prefix-cache/--no-prefix-cache", default=DEFAULTS["prefix_cache"], show_default=True,
              help="Keep the KV of prompts for others that begin alike.")
@_option("stall_steps", int, "Steps without progress after which /health answers 503.")
@_option("max_body_bytes", int, "Largest body of a request.")
@_option("step_deadline_s", float, "Seconds that a step may take before /health answers 503.")
@_option("write_deadline_s", float, "Seconds that a client may leave a stream unread before it is hung up on.")
@_option("drain_s", float, "Seconds that running requests get after SIGTERM.")
@_option("threads", int, "Threads of torch.  [default: its own choice]")
@click.option("--access-log", is_flag=True, help="Print a line for each HTTP request (never its body).")
def main(*, access_log: bool, **values: Any) -> None:
    """Serve a language model over OpenAI's API; kvsched decides every step.

    Besides /v1/chat/completions and /v1/completions there are /health, /ready, /metrics, /debug/scheduler, and a page at /
    that shows all of it. Ctrl+C or SIGTERM lets running requests end; a second one ends at once.
    """
    try:
        settings = Settings(**values)
    except ConfigError as error:
        raise click.UsageError(_as_flag(str(error))) from None
    logging.basicConfig(level=logging.INFO if access_log else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    sys.exit(run(settings, access_log=access_log))


def run(settings: Settings, *, access_log: bool = False) -> int:
    """Bind, load, serve until drained. The exit status: 0 after a drain. Raises `click.ClickException` with one line otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # before torch is imported
    from reference_server.api.server import Server, bind, serve  # noqa: PLC0415  # torch takes seconds to import: not for --help
    from reference_server.api.state import State  # noqa: PLC0415  # the same
    from reference_server.model import ModelError  # noqa: PLC0415  # the same
    from reference_server.serving import load_served  # noqa: PLC0415  # the same
    from reference_server.text import TokenizerError  # noqa: PLC0415  # the same

    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another with --port (PORT=...)") from None
    began = time.monotonic()
    address = url(settings.host, listener.getsockname()[1])

    def told(served: Served) -> None:
        click.echo("\n".join([f"Ready after {time.monotonic() - began:.1f} s.", "", *banner(served, settings, address), ""]))

    click.echo(f"Listening on {address} (/ready answers 503 until the model is loaded).")
    server = Server(State(settings), access_log=access_log)
    try:
        loaded = asyncio.run(serve(server, listener, lambda: load_served(settings, click.echo), told))
    except (ConfigError, ModelError, TokenizerError, OSError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        listener.close()
    if not loaded:
        sys.stdout.flush()
        os._exit(0)  # a thread is in the middle of reading the model, and the interpreter cannot end under it
    return 0


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches the server."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # compared, not bound
    return f"http://{f'[{near}]' if ':' in near else near}:{port}"


def banner(served: Served, settings: Settings, address: str) -> list[str]:
    """What is served, how large the pool is, and a line to try it with."""
    store = served.engine.executor.store
    if served.tokenizer.has_chat:
        path, body = "chat/completions", {"model": served.name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    else:
        path, body = "completions", {"model": served.name, "prompt": "The capital of France is", "max_tokens": 16}
    curl = f"curl {address}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps({**body, 'temperature': 0}))}"
    return [
        f"  model  {served.name}, {settings.dtype} on {settings.device}, context {served.engine.context_limit:,} tokens",
        f"  pool   {store.pages:,} pages x {store.page_size} tokens = {store.pages * store.page_size:,} tokens, {store.bytes / 2**30:.2f} GiB",
        f"  page   {address}/",
        f"  try    {curl}",
    ]


def _as_flag(message: str) -> str:
    """A setting's complaint with the flag's name in front."""
    key, _, rest = message.partition(" ")
    return f"--{key.replace('_', '-')} {rest}"


if __name__ == "__main__":
    main()
