"""The engine with a tiny real model: streams, aborts, failures, draining, and the truth about its health."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvsched import Request
from kvsched.errors import ConfigError, DuplicateRequest, InvalidRequest
from kvsched.request import Finish
from kvsched.verdict import RefusalReason, Refused
from kvsched_kernels import Attention, ReferenceAttention
from reference_server.engine import Engine, EngineDown
from reference_server.model.tiny import tiny
from reference_server.sampling import GREEDY, Sampling
from reference_server.settings import Settings
from reference_server.stream import Stream

DEADLINE_S = 60
"""Longest wait for something that must happen, far above what it takes."""


def settings(**changes: Any) -> Settings:
    small: dict[str, Any] = {"model": "tiny", "dtype": "float64", "page_size": 4, "pool_tokens": 512, "chunk_tokens": 16}
    return Settings(**(small | changes))


@contextmanager
def running(model: Any = None, **changes: Any) -> Iterator[Engine]:
    engine = Engine(tiny() if model is None else model, settings=settings(**changes))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0.0)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("engine", "device"))]


def at_rest(engine: Engine) -> None:
    """After the end: nothing is owed, every page is free or cached."""
    engine.scheduler.check()
    pages = engine.scheduler.occupancy
    assert pages["free"] + pages["cached"] == pages["usable"]
    assert not engine.executor._sampling
    assert not engine._streams


async def collect(stream: Stream) -> tuple[list[list[int]], list[Finish]]:
    tokens: list[list[int]] = [[] for _ in stream.ids]
    finish = [Finish.NONE] * len(tokens)
    async for piece in stream:
        tokens[piece.index] += piece.tokens
        if piece.end is not None:
            finish[piece.index] = piece.end.finish
    return tokens, finish


async def take(engine: Engine, request: Request, sampling: Sampling = GREEDY) -> tuple[list[list[int]], list[Finish]]:
    stream = await engine.submit(request, sampling)
    assert isinstance(stream, Stream)
    return await collect(stream)


def signs(engine: Engine) -> tuple[bool, bool, str]:
    return engine.live, engine.ready, engine.state


async def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < limit, "it never came"
        await asyncio.sleep(0.005)


def run(awaitable: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(awaitable, DEADLINE_S)
    return asyncio.run(main())


def test_a_request_streams_its_tokens_and_ends() -> None:
    with running() as engine:
        tokens, finish = run(take(engine, Request("a", range(40), max_new_tokens=20)))
        again, _ = run(take(engine, Request("a", range(40), max_new_tokens=20)))
    assert len(tokens[0]) == 20
    assert finish == [Finish.LENGTH]
    assert tokens == again
    at_rest(engine)
    assert engine.vitals.ended == {"length": 2}
    assert engine.vitals.prompt_tokens == 80
    assert engine.vitals.totals["cached_tokens"] > 0
    assert engine.vitals.steps >= 40


def test_many_at_once_say_what_each_says_alone() -> None:
    requests = {f"r{i}": (Request(f"r{i}", range(i, i + 10 + 7 * i), max_new_tokens=15 + i), Sampling(temperature=i % 3 / 2, seed=i))
                for i in range(12)}
    with running() as engine:
        alone = {key: run(take(engine, *both)) for key, both in requests.items()}
    async def together(engine: Engine) -> dict[str, Any]:
        return dict(zip(requests, await asyncio.gather(*(take(engine, *both) for both in requests.values())), strict=True))
    for changes in ({"pool_tokens": 160}, {"pool_tokens": 2048, "max_in_flight": 1, "prefix_cache": False}):
        with running(**changes) as engine:
            assert run(together(engine)) == alone
        at_rest(engine)
        assert (engine.vitals.totals["retractions"] > 0) == (changes["pool_tokens"] == 160)


def test_samples_of_one_request_differ_and_come_back_with_the_seed() -> None:
    with running() as engine:
        request = Request("a", range(20), max_new_tokens=12, n=3)
        first, _ = run(take(engine, request, Sampling(seed=9)))
        again, _ = run(take(engine, request, Sampling(seed=9)))
        other, _ = run(take(engine, request, Sampling(seed=10)))
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 3
    at_rest(engine)


def test_an_abort_frees_the_pages_and_closes_the_stream() -> None:
    async def main(engine: Engine) -> list[Finish]:
        stream = await engine.submit(Request("a", range(20), max_new_tokens=400, n=2), GREEDY)
        assert isinstance(stream, Stream)
        async for _ in stream:
            break
        engine.abort("a")
        engine.abort("a")
        engine.abort("nobody")
        _, finish = await collect(stream)
        await until(lambda: engine.vitals.health.running == 0 and engine.vitals.occupancy["quarantined"] == 0)
        return finish
    with running() as engine:
        assert run(main(engine)) == [Finish.ABORT, Finish.ABORT]
    at_rest(engine)


def test_a_late_stop_ends_one_sample() -> None:
    async def main(engine: Engine) -> list[Finish]:
        stream = await engine.submit(Request("a", range(20), max_new_tokens=60, n=2), GREEDY)
        assert isinstance(stream, Stream)
        async for piece in stream:
            if piece.index == 1:
                break
        engine.finish("a/1")
        engine.finish("nobody")
        return (await collect(stream))[1]
    with running() as engine:
        assert run(main(engine)) == [Finish.LENGTH, Finish.STOP]
    at_rest(engine)


def test_a_caller_that_goes_away_while_it_submits_leaves_nothing() -> None:
    async def main(engine: Engine) -> None:
        task = asyncio.create_task(engine.submit(Request("a", range(20), max_new_tokens=400), GREEDY))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await take(engine, Request("b", range(5), max_new_tokens=1))
    with running() as engine:
        run(main(engine))
        assert engine.vitals.health.running == 0
    at_rest(engine)


def test_what_cannot_be_served_is_answered_and_not_kept() -> None:
    async def main(engine: Engine) -> None:
        answer = await engine.submit(Request("a", [1] * 600, max_new_tokens=4), GREEDY)
        assert isinstance(answer, Refused)
        assert (answer.reason, answer.needed, answer.available) == (RefusalReason.NEVER_FITS, 151, 128)
        with pytest.raises(InvalidRequest, match="token ids below 258, not 258"):
            await engine.submit(Request("b", [258], max_new_tokens=4), GREEDY)
        stream = await engine.submit(Request("c", [1], max_new_tokens=100), GREEDY)
        assert isinstance(stream, Stream)
        with pytest.raises(DuplicateRequest, match="'c' is live already"):
            await engine.submit(Request("c", [1], max_new_tokens=4), GREEDY)
    with running() as engine:
        run(main(engine))
        assert engine.vitals.refused == {"never_fits": 1}


def test_the_snapshot_says_why() -> None:
    async def main(engine: Engine) -> dict[str, Any]:
        for key in ("a", "b"):
            await engine.submit(Request(key, range(20), max_new_tokens=400), GREEDY)
        await until(lambda: engine.vitals.steps > 2)
        return await engine.snapshot()
    with running(max_running=1) as engine:
        state = run(main(engine))
    assert state["running"] == ["a"]
    assert state["why"]["b"]["reason"] == "running_limit"
    assert state["requests"]["b"] | {"prompt": 20, "max_new_tokens": 400} == state["requests"]["b"]


class Faulty:
    """A model that raises, or gives what is not a number, where a prompt holds the token 13; slow where it holds 17."""

    def __init__(self) -> None:
        self.inner = tiny()
        self.config, self.dtype, self.device = self.inner.config, self.inner.dtype, self.inner.device
        self.how = "raise"
        self.gate = threading.Event()

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, last: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(token_ids, positions, attention, last)
        if self.how == "raise" and bool((token_ids == 13).any()):
            raise RuntimeError("thirteen")
        if self.how == "nan":
            logits[token_ids[last] == 13] = torch.nan
        if bool((token_ids == 17).any()):
            assert self.gate.wait(DEADLINE_S)
        return logits


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_model_that_fails_fails_its_requests_and_the_engine_lives(how: str) -> None:
    model = Faulty()
    model.how = how
    async def main(engine: Engine) -> None:
        before = await take(engine, Request("a", [1, 2, 3], max_new_tokens=3))
        _, finish = await take(engine, Request("b", [1, 2, 13], max_new_tokens=3))
        assert finish == [Finish.ERROR]
        assert engine.live
        assert await take(engine, Request("c", [1, 2, 3], max_new_tokens=3)) == before
    with running(model) as engine:
        run(main(engine))
        assert engine.vitals.failures == 1
        assert engine.vitals.ended == {"length": 2, "error": 1}
    at_rest(engine)


class Spoiling(Faulty):
    """Puts what is no number into the keys of its first step, after its output or before it."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late, self.first = late, True

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, last: torch.Tensor) -> torch.Tensor:
        first, self.first = self.first, False
        block: Any = self.inner.blocks[0]
        bias = block.qkv
        kept = bias.clone()
        if first and not self.late:
            bias[-1] = torch.nan
        logits = super().__call__(token_ids, positions, attention, last)
        bias.copy_(kept)
        if first and self.late:
            assert isinstance(attention, ReferenceAttention)
            for keys in attention.store.k:
                keys[:2] = torch.nan
        return logits


@pytest.mark.parametrize("late", [False, True])
def test_what_a_fault_left_in_the_pages_is_met_by_nobody_who_comes_later(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A fault in a chunk that samples nothing is seen in its own step; one behind its output later, with pages in the prefix cache by then."""
    async def main(engine: Engine) -> list[Finish]:
        return [(await take(engine, Request(f"r{i}", [5] * 40 + [i], max_new_tokens=2)))[1][0] for i in range(4)]
    with running(Spoiling(late=late)) as engine:
        assert run(main(engine)) == [Finish.ERROR, *[Finish.LENGTH] * 3]
        assert engine.vitals.totals["cached_tokens"] > 0
    assert ("step 1: logits of 1 rows are not finite" in caplog.text) is not late
    at_rest(engine)


def test_rows_that_are_not_finite_fail_alone() -> None:
    model = Faulty()
    model.how = "nan"
    async def main(engine: Engine) -> list[Any]:
        return list(await asyncio.gather(*(take(engine, Request(f"r{i}", [1, 2, 13 if i == 2 else 4], max_new_tokens=9)) for i in range(4))))
    with running(model) as engine:
        answers = run(main(engine))
    assert [finish for _, (finish,) in answers] == [Finish.LENGTH, Finish.LENGTH, Finish.ERROR, Finish.LENGTH]
    assert len({tuple(tokens[0]) for tokens, _ in answers[:2]}) == 1
    at_rest(engine)


def test_a_step_that_does_not_end_is_not_live_and_a_step_that_ends_is() -> None:
    model = Faulty()
    async def main(engine: Engine) -> None:
        assert signs(engine) == (True, True, "idle")
        stream = await engine.submit(Request("a", [17], max_new_tokens=1), GREEDY)
        await until(lambda: not engine.live)
        assert signs(engine) == (False, False, "stuck")
        model.gate.set()
        assert isinstance(stream, Stream)
        await collect(stream)
        await until(lambda: engine.live and engine.ready)
    with running(model, step_deadline_s=0.2) as engine:
        run(main(engine))


def test_a_full_queue_is_live_and_not_ready() -> None:
    async def main(engine: Engine) -> None:
        async def two(first: int) -> None:
            for i in (first, first + 1):
                assert isinstance(await engine.submit(Request(f"r{i}", [2, 3], max_new_tokens=3000), GREEDY), Stream)
        await two(0)
        await until(lambda: engine.vitals.health.running == 2)
        await two(2)
        await until(lambda: engine.vitals.health.waiting == 2 and not engine.ready)
        assert engine.live
        answer = await engine.submit(Request("more", [1], max_new_tokens=1), GREEDY)
        assert isinstance(answer, Refused)
        assert answer.retryable
    with running(pool_tokens=8192, max_running=2, max_queued_requests=2) as engine:
        run(main(engine))


def test_draining_lets_those_that_run_end() -> None:
    async def main(engine: Engine) -> tuple[list[list[int]], list[Finish]]:
        stream = await engine.submit(Request("a", [1, 2, 3], max_new_tokens=100), GREEDY)
        engine.drain()
        assert not engine.ready
        with pytest.raises(EngineDown, match="draining"):
            await engine.submit(Request("b", [1], max_new_tokens=1), GREEDY)
        assert isinstance(stream, Stream)
        return await collect(stream)
    with running() as engine:
        tokens, finish = run(main(engine))
        engine.stop(DEADLINE_S)
        with pytest.raises(EngineDown):
            run(engine.submit(Request("c", [1], max_new_tokens=1), GREEDY))
        with pytest.raises(EngineDown):
            run(engine.snapshot())
    assert len(tokens[0]) == 100
    assert finish == [Finish.LENGTH]
    at_rest(engine)


def test_the_rest_is_ended_when_the_time_to_drain_is_over() -> None:
    async def main(engine: Engine) -> list[Finish]:
        stream = await engine.submit(Request("a", [1, 2, 3], max_new_tokens=400), GREEDY)
        assert isinstance(stream, Stream)
        async for _ in stream:
            break
        await asyncio.to_thread(engine.stop, 0.0)
        return (await collect(stream))[1]
    with running() as engine:
        assert run(main(engine)) == [Finish.ABORT]
    at_rest(engine)


def fault() -> None:
    raise ValueError("a fault in the engine itself")


def test_an_engine_that_dies_says_so_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    async def main(engine: Engine) -> list[Finish]:
        stream = await engine.submit(Request("a", [1, 2, 3], max_new_tokens=400), GREEDY)
        assert isinstance(stream, Stream)
        async for _ in stream:
            break
        engine._tell(fault)
        _, finish = await collect(stream)
        with pytest.raises(EngineDown, match="ValueError"):
            await engine.submit(Request("b", [1], max_new_tokens=1), GREEDY)
        return finish
    with running() as engine:
        assert run(main(engine)) == [Finish.ERROR]
        assert not engine.live
        assert engine.state == "dead"
    assert "the engine has died" in caplog.text


def test_settings_that_cannot_work_together_are_named() -> None:
    with pytest.raises(ConfigError, match="pool_tokens"):
        settings(pool_tokens=2)
