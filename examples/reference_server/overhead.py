"""What the server adds to a decode step: `python -m reference_server.overhead` (with PYTHONPATH=examples, as `make serve` has it).

The same streams run three times: through the server as a process of its own with two plans in flight, through the same
with one, and in a bare loop over the same scheduler and executor without threads, HTTP and text. What lives here: the
measurement. What does not: verdicts on the figures. It needs a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from kvsched import Request
from reference_server.__main__ import SPIN
from reference_server.settings import Settings

WARM_STEPS = 10
"""Decode steps before the measurement starts."""
SPARE_STEPS = 1000
"""Tokens of each stream beyond four times what is measured, so that no stream ends before the measurement does."""
LOOK_S = 0.25
"""Seconds between two readings of the server's counters; each pair of readings is one sample."""


@attrs.frozen
class Cost:
    """Medians over samples, per decode step in microseconds.

    wall: from commit to commit. executor: plan to tensors, forward pass, sampling. forward: of the executor the model alone,
    where it can be seen. kvsched: schedule() and commit(). rest: wall less executor and kvsched; below 0 where they overlap.
    loop_cpu: what the thread of the event loop computed (HTTP, server-sent events, text), on Linux.
    """

    what: str
    steps: int
    wall: float
    executor: float
    forward: float | None
    kvsched: float
    rest: float
    loop_cpu: float | None

    @property
    def share(self) -> float:
        """Of the step that is spent in kvsched, in percent."""
        return 100 * self.kvsched / self.wall


@attrs.frozen
class Load:
    """What is measured. steps: decode steps of each run. prompt: characters of each prompt."""

    model: str
    streams: int
    steps: int
    prompt: int
    temperature: float
    threads: int | None

    def settings(self, depth: int) -> Settings:
        room = self.streams * (self.prompt + self.tokens + 64)
        return Settings(host="127.0.0.1", port=0, model=self.model, threads=self.threads, max_in_flight=depth, max_running=self.streams,
                        pool_tokens=max(room, Settings().pool_tokens), max_queued_requests=self.streams)

    @property
    def tokens(self) -> int:
        """Of each stream, if nobody leaves."""
        return 4 * self.steps + SPARE_STEPS

    def prompts(self) -> list[str]:
        """One for each stream; they differ from their first word on."""
        return [(f"{number} is a number. " * self.prompt)[: self.prompt] for number in range(self.streams)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="", help="As for the server; nothing for the default model.")
@click.option("--streams", default=16, show_default=True, type=click.IntRange(1, 512), help="Streams at a time.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(20), help="Decode steps to measure.")
@click.option("--prompt", default=200, show_default=True, type=click.IntRange(16), help="Characters of each prompt.")
@click.option("--temperature", default=1.0, show_default=True, type=float, help="0 takes the likeliest token.")
@click.option("--threads", default=None, type=click.IntRange(1), help="Threads of torch.  [default: its own choice]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of a table.")
def main(*, as_json: bool, **options: Any) -> None:
    """Measure what the server and kvsched cost per decode step."""
    load = Load(**options)
    costs = [through_server(load, 2), through_server(load, 1), bare(load)]
    if as_json:
        for cost in costs:
            click.echo(json.dumps({**options, **attrs.asdict(cost), "kvsched_percent": cost.share}))
        return
    click.echo(f"{load.streams} streams, {load.model or 'the default model'}; us per decode step")
    columns = ("wall", "executor", "forward", "kvsched", "rest", "loop_cpu")
    click.echo(f"{'':24}" + "".join(f"{name.replace('_', ' '):>12}" for name in columns) + f"{'kvsched, %':>12}{'steps':>8}")
    for cost in costs:
        figures = (getattr(cost, name) for name in columns)
        click.echo(f"{cost.what:24}" + "".join(f"{'-' if it is None else f'{it:,.0f}':>12}" for it in figures) + f"{cost.share:12.2f}{cost.steps:8}")


def bare(load: Load) -> Cost:
    """The scheduler and the executor of a server in a plain loop, one plan at a time."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # as the server does, before torch is imported
    from reference_server.sampling import Sampling  # noqa: PLC0415  # torch takes seconds to import: not for --help
    from reference_server.serving import load_served  # noqa: PLC0415  # the same

    served = load_served(load.settings(1), lambda _: None)
    scheduler, executor = served.engine.scheduler, served.engine.executor
    forward: list[float] = []
    model: Any = executor.model
    model.register_forward_pre_hook(lambda *_: forward.append(-time.perf_counter()))
    model.register_forward_hook(lambda *_: forward.append(forward.pop() + time.perf_counter()))
    for number, prompt in enumerate(load.prompts()):
        key = f"r{number}"
        scheduler.submit(Request(key, prompt=served.tokenizer.encode(prompt), max_new_tokens=load.tokens, ignore_eos=True))
        executor.add(key, Sampling(temperature=load.temperature, seed=number))
    samples: list[tuple[float, ...]] = []
    last, warm = time.perf_counter(), 0
    while len(samples) < load.steps:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        ready = time.perf_counter()
        result = executor.run(plan)
        computed = time.perf_counter()
        scheduler.commit(plan, result)
        end = time.perf_counter()
        if len(plan) == load.streams and not plan.prefill:
            warm += 1
            if warm > WARM_STEPS:
                wall, run, ours = end - last, computed - ready, ready - begin + end - computed
                samples.append((wall, run, forward[-1], ours, wall - run - ours))
        last = end
    wall, run, inner, ours, rest = (statistics.median(column) * 1e6 for column in zip(*samples, strict=True))
    return Cost("bare loop", len(samples), wall, run, inner, ours, rest, None)


def through_server(load: Load, depth: int) -> Cost:
    """The same through a server process: every stream is a connection that reads server-sent events."""
    with _server(load.settings(depth)) as (process, address):
        return asyncio.run(_watch(load, depth, process, address))


async def _watch(load: Load, depth: int, process: int, address: str) -> Cost:
    readers = [asyncio.create_task(_read(load, address, number, prompt)) for number, prompt in enumerate(load.prompts())]
    try:
        first = await _steady(load, address, readers, 0)
        first = before = await _steady(load, address, readers, first["decode_steps"] + WARM_STEPS)
        cpu, samples = _cpu_s(process), list[tuple[float, ...]]()
        while before["decode_steps"] - first["decode_steps"] < load.steps:
            await asyncio.sleep(LOOK_S)
            after = await _steady(load, address, readers, 0)
            steps = after["decode_steps"] - before["decode_steps"]
            if steps:
                wall, run, ours = ((after[key] - before[key]) / steps for key in ("decode_wall_s", "decode_model_s", "decode_scheduler_s"))
                samples.append((wall, run, ours, wall - run - ours))
                before = after
        steps = before["decode_steps"] - first["decode_steps"]
        spent = _cpu_s(process)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    wall, run, ours, rest = (statistics.median(column) * 1e6 for column in zip(*samples, strict=True))
    loop_cpu = None if cpu is None or spent is None else (spent - cpu) / steps * 1e6
    return Cost(f"server, {depth} in flight", steps, wall, run, None, ours, rest, loop_cpu)


async def _steady(load: Load, address: str, readers: list[asyncio.Task[None]], steps: int) -> dict[str, Any]:
    """The counters once every stream is decoding and so many decode steps were made. Raises what a reader raised."""
    while True:
        for reader in readers:
            if reader.done():
                reader.result()
                raise click.ClickException("a stream has ended before the measurement did; ask for fewer steps")
        vitals: dict[str, Any] = (await _get(address, "/debug/scheduler"))["vitals"]
        if vitals["totals"]["emitted"] >= load.streams and vitals["health"]["running"] == load.streams and vitals["decode_steps"] >= steps:
            return vitals
        await asyncio.sleep(LOOK_S / 10)


async def _read(load: Load, address: str, number: int, prompt: str) -> None:
    """One stream, read and thrown away."""
    model = (await _get(address, "/v1/models"))["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": load.tokens, "temperature": load.temperature, "seed": number,
                       "stream": True, "ignore_eos": True}).encode()
    link, out = await asyncio.open_connection(*_parts(address))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    out.write(head.encode() + body)
    try:
        status = await link.readline()
        if b" 200 " not in status:
            raise click.ClickException(f"a stream was refused: {(await link.read(4096)).decode().splitlines()[-1]}")
        while await link.read(1 << 16):
            pass
    finally:
        out.close()


async def _get(address: str, path: str) -> Any:
    """The JSON at a path of the server."""
    link, out = await asyncio.open_connection(*_parts(address))
    out.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
    body = (await link.read()).partition(b"\r\n\r\n")[2]
    out.close()
    return json.loads(body)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _cpu_s(process: int) -> float | None:
    """Seconds that the main thread of a process has computed, where the system tells."""
    path = Path(f"/proc/{process}/task/{process}/stat")
    if not path.exists():
        return None
    fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(settings: Settings) -> Iterator[tuple[int, str]]:
    """A server with those settings, once it is ready: process id and address."""
    different = attrs.asdict(settings, filter=lambda field, value: value != field.default and field.name != "threads")
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in different.items()]
    flags += [] if settings.threads is None else [f"--threads={settings.threads}"]
    unset = ("HOST", "PORT", "MODEL", "PAGE_SIZE", "POOL_TOKENS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    command = [sys.executable, "-m", "reference_server", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)  # noqa: S603  # our own interpreter and settings
    try:
        address = ""
        assert process.stdout is not None
        for line in process.stdout:
            found = re.match(r"Listening on http://(\S+) ", line)
            address = found[1] if found else address
            if line.startswith("  try"):
                break
        else:
            raise click.ClickException("the server did not start")
        yield process.pid, address
    finally:
        process.kill()  # its clients are gone, and nothing is to be drained
        process.communicate()


if __name__ == "__main__":
    main()
