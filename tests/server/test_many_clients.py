"""Many clients at once, some of which leave: who stays gets what it would have got alone, and nothing is left behind.

The server is a process of its own, the clients are the real `openai` client. Each case is first asked of a second server
that has nothing else to do, no prefix cache and one plan in flight; seeds make every answer repeatable.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import openai
import pytest
from launched import PATIENCE_S, Launched, launched
from openai import AsyncOpenAI, OpenAI
from running import running, until

SOAK_S = 120.0
"""How long the clients of the soak run keep coming."""
LONG_PATIENCE_S = 600.0
"""Deadline of one request under load, retries not counted."""
TINY = ("--port", "0", "--model", "tiny", "--dtype", "float64", "--threads", "1")
ALONE = (*TINY, "--no-prefix-cache", "--max-in-flight", "1", "--max-running", "8")
"""Settings of the server that the answers are held against."""
STEMS = ("", "You answer in one word.\n", "The pool has pages, the queue has a head. " * 4, "Once upon a time there was a long prompt. " * 9)
"""Beginnings that prompts share."""
FATES = ("stay", "leave before the answer", "leave before the first token", "leave in the middle")


@attrs.frozen
class Case:
    """A request as the client sends it."""

    chat: bool
    options: dict[str, Any]

    async def ask(self, client: AsyncOpenAI, **more: Any) -> Any:
        resource = client.chat.completions if self.chat else client.completions
        return await resource.create(**self.options, **more)


@attrs.frozen
class Answer:
    """Texts and finish reasons by choice, and how many tokens were read and generated (None where the stream had no usage)."""

    texts: tuple[str, ...]
    finishes: tuple[str | None, ...]
    tokens: tuple[int, int] | None


@attrs.define(eq=False)
class Visit:
    """What happened to one request of one client, as its HTTP client saw it: attempts sent, and the status of each response."""

    attempts: int = 0
    statuses: list[int] = attrs.field(factory=list)


@attrs.define(eq=False)
class Tally:
    """What all clients saw. wrong: in words, with what was asked."""

    fates: Counter[str] = attrs.field(factory=Counter)
    refused: int = 0
    cut: int = 0
    wrong: list[str] = attrs.field(factory=list)


PRESENT: ContextVar[Visit] = ContextVar("PRESENT")
"""The visit that the running task makes."""


def draw_case(chance: random.Random, most: int) -> Case:
    """A request: shared beginnings, mixed lengths, n, stop strings, temperatures, priorities, now and then several prompts.

    most: new tokens of a sample.
    """
    def said() -> str:
        return chance.choice(STEMS) + "".join(chance.choices("abcdefgh ,.é", k=chance.randint(1, 70)))

    chat = chance.random() < 0.4
    options: dict[str, Any] = {
        "model": "tiny", "max_tokens": chance.choice((1, most // 16, most // 8, most // 4, most // 2, most)), "seed": chance.getrandbits(32), "user": chance.choice("abc"),
        "temperature": chance.choice((0, 0, 0.7, 1, 1.6)), "top_p": chance.choice((1, 1, 0.9, 0.4)), "n": chance.choice((1, 1, 1, 1, 2, 3)),
        "extra_body": {"ignore_eos": chance.random() < 0.5, "priority": chance.randint(-1, 1)},
    }
    if chance.random() < 0.4:
        options["stop"] = chance.sample(("a", "T", "e", "!", "\ufffd\ufffd\ufffd", "no such thing"), chance.randint(1, 3))
    if chat:
        options["messages"] = [{"role": "system", "content": chance.choice(STEMS) or "."}, {"role": "user", "content": said()}]
    else:
        options["prompt"] = [said(), said()] if chance.random() < 0.1 else said()
    return Case(chat, options)


def whole(answer: Any) -> Answer:
    texts = tuple(choice.message.content if hasattr(choice, "message") else choice.text for choice in answer.choices)
    return Answer(texts, tuple(choice.finish_reason for choice in answer.choices), (answer.usage.prompt_tokens, answer.usage.completion_tokens))


async def alone(server: Launched, cases: Sequence[Case]) -> list[Answer]:
    """What each case is answered on a server that has nothing else to do."""
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        return [whole(await case.ask(client)) for case in cases]


@attrs.define(eq=False)
class Crowd:
    """Clients that come, ask one of the cases, stay or leave, and come again. chance: decides all of it."""

    server: Launched
    cases: Sequence[Case]
    expected: Sequence[Answer]
    tally: Tally = attrs.field(factory=Tally)

    async def come(self, clients: int, *, visits: int | None, until: float | None) -> None:
        """Every client comes `visits` times, or until that moment; the last time it stays."""
        client = AsyncOpenAI(
            base_url=self.server.base_url, api_key="none", max_retries=10_000, timeout=LONG_PATIENCE_S,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [_sent], "response": [_answered]}),
        )
        looking = asyncio.ensure_future(self.look())
        async with client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self.one(client, random.Random(number), visits, until))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        if looking.done() and not looking.cancelled() and looking.exception() is not None:
            self.tally.wrong.append(f"while looking: {looking.exception()!r}")

    async def one(self, client: AsyncOpenAI, chance: random.Random, visits: int | None, until: float | None) -> None:
        come = 0
        while (visits is None or come < visits - 1) and (until is None or time.monotonic() < until):
            await self.visit(client, chance, chance.choices(FATES, (6, 1, 1, 2))[0])
            come += 1
        await self.visit(client, chance, "stay")

    async def visit(self, client: AsyncOpenAI, chance: random.Random, fate: str) -> None:
        """One request. Whatever is not as it must be goes into the tally."""
        place = chance.randrange(len(self.cases))
        case, expected = self.cases[place], self.expected[place]
        visit = Visit()
        delay, after = chance.expovariate(3), chance.randint(1, 30)
        stream = chance.random() < (0.8 if fate in FATES[:2] else 1)
        usage = chance.random() < 0.5

        async def run() -> None:
            PRESENT.set(visit)
            if not stream:
                self.hold(case, expected, whole(await case.ask(client)), ended=True)
                return
            more = {"stream_options": {"include_usage": True}} if usage else {}
            events = await case.ask(client, stream=True, **more)
            if fate == FATES[2]:
                await asyncio.sleep(delay / 20)
                await events.close()
                return
            got, ended = await read(events, expected, after if fate == FATES[3] else None)
            await events.close()
            if ended and usage != (got.tokens is not None):
                self.tally.wrong.append(f"usage was asked for: {usage}, and came: {got.tokens}")
            self.hold(case, expected, got, ended=ended)

        task = asyncio.ensure_future(run())
        await asyncio.wait([task], timeout=delay if fate == FATES[1] else None)
        gone = not task.done()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not gone:
                raise
        except Exception as error:  # noqa: BLE001  # the test fails with all that went wrong, not with the first of it
            self.tally.wrong.append(f"{fate}: {error!r} for {case}")
        self.tally.fates[fate if gone or fate != FATES[1] else FATES[0]] += 1
        self.tally.refused += visit.statuses.count(429)
        *earlier, last = visit.statuses or [0]
        if any(status != 429 for status in earlier) or last not in {0, 200, 429} or visit.attempts - len(visit.statuses) > gone:
            self.tally.wrong.append(f"{fate}: {visit.attempts} attempts, answers {visit.statuses}")

    def hold(self, case: Case, expected: Answer, got: Answer, *, ended: bool) -> None:
        """Whoever stayed has the whole answer, whoever left has a beginning of it."""
        if ended:
            right = got == attrs.evolve(expected, tokens=got.tokens and expected.tokens)
        else:
            self.tally.cut += 1
            right = all(text.startswith(part) for text, part in zip(expected.texts, got.texts, strict=True))
        if not right:
            self.tally.wrong.append(f"{case}\n   alone {expected}\n   now   {got}")

    async def look(self) -> None:
        """What anybody sees meanwhile: live, no page lost."""
        while True:
            await asyncio.sleep(0.3)
            status, body = await asyncio.to_thread(self.server.ask, "GET", "/health")
            assert status == 200, body
            seen = await asyncio.to_thread(self.server.seen)
            pages = seen["vitals"]["occupancy"]
            assert sum(pages.values()) == 2 * pages["usable"], pages
            assert set(seen["scheduler"]["waiting"]) == set(seen["scheduler"]["why"])


async def read(events: Any, expected: Answer, limit: int | None) -> tuple[Answer, bool]:
    """The events of a stream, put together; and whether they are all there. limit: events after which the reader leaves."""
    texts, finishes, tokens = [""] * len(expected.texts), [None] * len(expected.texts), None
    count = 0
    async for event in events:
        for choice in event.choices:
            assert finishes[choice.index] is None, "something came after the end"
            texts[choice.index] += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            finishes[choice.index] = choice.finish_reason
        if event.usage is not None:
            tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        count += 1
        if count == limit:
            return Answer(tuple(texts), tuple(finishes), tokens), False
    return Answer(tuple(texts), tuple(finishes), tokens), True


async def _sent(request: Any) -> None:
    PRESENT.get().attempts += 1


async def _answered(response: Any) -> None:
    PRESENT.get().statuses.append(response.status_code)


def settled(server: Launched, tasks: int | None = None) -> dict[str, Any]:
    """/debug/scheduler once nothing runs and nothing waits: every page is free or cached, nobody is under way, no task is left."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen: dict[str, Any] = server.seen()
        pages, health = seen["vitals"]["occupancy"], seen["vitals"]["health"]
        empty = not seen["requests"] and health["running"] == health["waiting"] == 0 and pages["free"] + pages["cached"] == pages["usable"]
        if empty and tasks in {None, seen["server"]["tasks"]}:
            assert not seen["scheduler"]["requests"]
            return seen
        assert time.monotonic() < deadline, f"something is left: {seen}"
        time.sleep(0.05)


def told(tally: Tally, after: Any) -> str:
    """What happened, for people."""
    return f"{dict(tally.fates)}, refused {tally.refused}, cut {tally.cut}; {after['vitals']['totals']}; ended {after['vitals']['ended']}"


def crowd(flags: Sequence[str], *, clients: int, cases: int, most: int, visits: int | None = None, seconds: float | None = None) -> tuple[Tally, dict[str, Any]]:
    """Run it all, check everything that holds whatever the numbers are; what the clients saw, and the server at the end."""
    chance = random.Random(clients)
    drawn = [draw_case(chance, most) for _ in range(cases)]
    with launched(*ALONE) as server:
        expected = asyncio.run(alone(server, drawn))
        server.ends_well()
    with launched(*TINY, *flags) as server:
        with OpenAI(base_url=server.base_url, api_key="none") as client:
            client.completions.create(model="tiny", prompt="warm", max_tokens=2)
        before = settled(server)
        files = server.metric("process_open_fds")
        work = Crowd(server, drawn, expected)
        asyncio.run(work.come(clients, visits=visits, until=None if seconds is None else time.monotonic() + seconds))
        after = settled(server, before["server"]["tasks"])
        tally = work.tally
        print(told(tally, after))  # noqa: T201  # pytest shows it when the test fails, or with -s
        assert not tally.wrong, f"{len(tally.wrong)} of {tally.fates.total()} are wrong:\n" + "\n".join(tally.wrong[:5])
        assert server.metric("process_open_fds") == files
        assert after["server"]["settings"] == before["server"]["settings"]
        assert after["vitals"]["failures"] == 0
        assert set(after["vitals"]["ended"]) <= {"stop", "length", "abort"}
        assert server.metric('kvsched_http_responses_total{code="429"}') >= tally.refused
        server.ends_well()
    return tally, after


def test_a_small_crowd() -> None:
    flags = ("--pool-tokens", "2048", "--max-running", "8", "--max-queued-requests", "8")
    tally, after = crowd(flags, clients=20, cases=24, most=48, visits=5)
    assert tally.fates["stay"] >= 20
    assert tally.fates.total() == 100
    assert after["vitals"]["totals"]["cached_tokens"] > 0


def test_no_task_is_left_of_whoever_left() -> None:
    """A client leaves in the middle of its body, before the answer, at its head, and in the middle of it; with one prompt and several."""
    with running() as server:
        loop = server.server.servers[0].get_loop()

        def tasks() -> int:
            return len(asyncio.all_tasks(loop))

        until(lambda: server.server.started)
        before = tasks()
        for fields in ({"stream": True}, {"stream": False}, {"stream": True, "n": 3, "prompt": ["a", "b"]}):
            raw = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, **fields}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            for sent, least in ((head + raw[:9], 0), (head + raw, 0), *([(head + raw, 1), (head + raw, 20)] if fields["stream"] else ())):
                with socket.create_connection(("127.0.0.1", server.port)) as link:
                    link.sendall(sent)
                    until(lambda: tasks() > before)
                    for _ in range(least):
                        assert link.recv(400)
                until(lambda: tasks() == before)
        server.settled()


@pytest.mark.soak
def test_two_hundred_clients_for_two_minutes() -> None:
    flags = ("--pool-tokens", "3072", "--max-running", "48", "--max-queued-requests", "64")
    tally, after = crowd(flags, clients=200, cases=250, most=240, seconds=SOAK_S)
    assert tally.fates["stay"] >= 200
    assert all(tally.fates[fate] for fate in FATES)
    assert tally.refused > 0
    assert tally.cut > 0
    assert after["vitals"]["ended"]["abort"] > 0
    assert after["vitals"]["totals"]["retractions"] > 0
    assert after["vitals"]["totals"]["cached_tokens"] > 0
