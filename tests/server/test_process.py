"""The server as a process: what `make serve` starts, how clients reach it, and each way in which it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from launched import COMMAND, PATIENCE_S, ROOT, Launched, launched, surroundings
from openai import AsyncOpenAI, OpenAI

CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed, and the printed line is for it")
ENDLESS: dict[str, Any] = {"model": "tiny", "max_tokens": 3000, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
"""A stream that goes on for longer than any test reads it."""


@pytest.fixture(scope="module")
def server() -> Iterator[Launched]:
    with launched("--port", "0", "--model", "tiny", "--dtype", "float64") as found:
        yield found


def client(server: Launched, **options: Any) -> OpenAI:
    return OpenAI(**{"base_url": server.base_url, "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options})


def shell(line: str) -> bytes:
    """What a line for the shell prints. It must succeed and complain about nothing."""
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_serve_starts_this_command() -> None:
    said = subprocess.run(["make", "--no-print-directory", "-n", "serve", "PORT=8001"], cwd=ROOT, env=surroundings(), capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"PYTHONPATH=examples \S*/bin/python -m reference_server", said.strip().splitlines()[-1])


@CURL
def test_the_printed_line_and_the_client_are_answered_alike(server: Launched) -> None:
    answer = json.loads(shell(server.curl))
    body = json.loads(re.search(r"-d '(.*)'$", server.curl)[1])  # type: ignore[index]  # no match fails the test as well
    with client(server) as ours:
        same = ours.chat.completions.create(**body)
    assert answer["choices"][0]["message"]["content"] == same.choices[0].message.content
    assert same.usage is not None
    assert answer["usage"]["completion_tokens"] == same.usage.completion_tokens > 0
    status = shell(f"curl -s -o /dev/null -w '%{{http_code}}' http://{server.address}/health")
    assert status == b"200"


@CURL
def test_curl_reads_a_stream(server: Launched) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 5, "stream": True})
    said = shell(f"curl -sN http://{server.address}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    assert said.endswith(b"data: [DONE]\n\n")


def test_the_log_stays_empty_while_all_is_well(server: Launched) -> None:
    with client(server) as ours:
        events = ours.completions.create(prompt="x", **ENDLESS)
        next(iter(events))
        events.close()
        with pytest.raises(openai.BadRequestError):
            ours.completions.create(model="tiny", prompt="x", max_tokens=-1)
    assert server.stderr == ""


async def _together(server: Launched, prompts: list[str], tokens: int) -> list[str | openai.APIError]:
    """Streams of so many tokens; SIGTERM once each of them has begun. What each got, or how it was told that it gets no more."""
    began = asyncio.Semaphore(0)

    async def one(ours: AsyncOpenAI, prompt: str) -> str | openai.APIError:
        parts = []
        try:
            async for event in await ours.completions.create(prompt=prompt, **{**ENDLESS, "max_tokens": tokens}):
                parts.append(event.choices[0].text)
                if len(parts) == 1:
                    began.release()
        except openai.APIError as error:
            return error
        return "".join(parts)

    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as ours:
        readers = [asyncio.ensure_future(one(ours, prompt)) for prompt in prompts]
        for _ in prompts:
            await began.acquire()
        server.signal(signal.SIGTERM)
        return await asyncio.gather(*readers)


def test_sigterm_lets_every_stream_end_as_it_would_have() -> None:
    """Connections that ask nothing hold up nothing: one that never did, and one whose answer is long there."""
    prompts = [f"stream {number}" for number in range(6)]
    with launched("--port", "0", "--model", "tiny", "--dtype", "float64", "--drain-s", "100") as server:
        with client(server) as ours:
            whole = [ours.completions.create(prompt=prompt, **{**ENDLESS, "max_tokens": 300, "stream": False}).choices[0].text for prompt in prompts]
            with socket.create_connection(server.place):
                assert asyncio.run(_together(server, prompts, 300)) == whole
                assert server.wait() == 0
        assert re.fullmatch(r"draining: \d running, up to 100 s; another signal ends at once\n", server.stderr)


def test_streams_that_outlive_the_drain_are_told_and_the_end_is_clean() -> None:
    with launched("--port", "0", "--model", "tiny", "--drain-s", "0.2") as server:
        ends = asyncio.run(_together(server, ["a", "b", "c"], 3000))
        assert server.wait() == 0
    for end in ends:
        assert isinstance(end, openai.APIError)
        assert "shutting down" in str(end)


def test_a_body_half_sent_does_not_hold_up_the_end() -> None:
    with launched("--port", "0", "--model", "tiny", "--drain-s", "1000") as server, socket.create_connection(server.place) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        server.ends_well()
        assert half.recv(100).startswith(b"HTTP/1.1 503 ")


def test_another_signal_ends_at_once_with_its_status() -> None:
    with launched("--port", "0", "--model", "tiny", "--drain-s", "1000") as server, client(server) as ours:
        events = iter(ours.completions.create(prompt="a", **ENDLESS))
        next(events)
        server.signal(signal.SIGTERM)
        server.until_printed("draining: 1 running")
        next(events)
        server.signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize(("flags", "environment", "words"), [
    (("--max-running", "many"), {}, "'many' is not a valid integer"),
    ((), {"POOL_TOKENS": "3"}, "--pool-tokens must be at least page_size"),
])
def test_a_bad_value_is_told_in_one_line(flags: tuple[str, ...], environment: dict[str, str], words: str) -> None:
    done = subprocess.run([*COMMAND, *flags], env=surroundings(**environment), cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    *usage, last = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert words in last
    assert not any("Error" in line or "Traceback" in line for line in usage)


@CURL
@pytest.mark.soak
def test_the_default_model_knows_the_capital_of_france_while_others_stream() -> None:
    with launched("--port", "0", HOST="", MODEL="", PAGE_SIZE="", POOL_TOKENS="") as server:
        asyncio.run(_capital(server))
        server.ends_well()


async def _capital(server: Launched) -> None:
    """Sixteen streams go on from before the questions are asked until after they are answered."""
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    counts, begun = [0] * 16, asyncio.Event()

    async def read(ours: AsyncOpenAI, model: str, number: int) -> None:
        said: Any = [{"role": "user", "content": f"Tell me a long story about the number {number}."}]
        events = await ours.chat.completions.create(model=model, messages=said, max_tokens=1500, stream=True, seed=number, extra_body={"ignore_eos": True})
        async for _ in events:
            counts[number] += 1
            if min(counts) >= 5:
                begun.set()

    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as ours:
        model = (await ours.models.list()).data[0].id
        readers = [asyncio.ensure_future(read(ours, model, number)) for number in range(16)]
        try:
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            before = list(counts)
            answer = await ours.chat.completions.create(model=model, messages=question, max_tokens=64, temperature=0)
            assert "Paris" in (answer.choices[0].message.content or "")
            assert "Paris" in json.loads(await asyncio.to_thread(shell, server.curl))["choices"][0]["message"]["content"]
            assert not any(reader.done() for reader in readers)
            assert all(now > then for now, then in zip(counts, before, strict=True))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
