"""From a checked body to text: engine requests are submitted, their tokens become text, and stop strings end them.

What lives here: one HTTP request as one or more requests to the engine, all of which end when it ends. What does not: the
shapes of answers (`reference_server.api.completions`, `reference_server.api.chat`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import attrs

from kvsched import Refused, Request
from kvsched.errors import InvalidRequest
from kvsched.plan import Ended
from kvsched.request import Finish
from kvsched.verdict import RefusalReason
from reference_server.api.errors import ApiError
from reference_server.api.schema import Options
from reference_server.api.state import Live, Served, State
from reference_server.engine import EngineDown
from reference_server.sampling import MOST_SEED, Sampling, seeded
from reference_server.stream import Piece, Stream
from reference_server.text import TextStream

REASONS = {Finish.LENGTH: "length", Finish.STOP: "stop"}
"""`finish_reason` of a sample that ended well."""


@attrs.frozen
class Delta:
    """News of one choice: text that may be empty, and why it ended if it did."""

    choice: int
    text: str
    finish: str | None


@attrs.define(eq=False)
class _Sample:
    """One choice under way. key: its id in the engine. finish: as told to the client. tokens: delivered until then."""

    key: str
    text: TextStream
    finish: str | None = None
    tokens: int = 0
    last: float | None = None
    end: Ended | None = None


class Generation:
    """The engine's work for one HTTP request: `begin`, `deltas`, and `end` in every case, which aborts what still runs.

    key: the id of the HTTP request, from which the ids in the engine are made. prompts: token ids of each prompt. limit:
    new tokens of each sample, None for as many as there is room. Choices are numbered prompt by prompt, sample by sample.
    """

    def __init__(self, state: State, served: Served, key: str, live: Live, *, prompts: Sequence[Sequence[int]], limit: int | None,
                 options: Options) -> None:
        self.state = state
        self.served = served
        self.key = key
        self.live = live
        self.n = options.n or 1
        self._stop = options.stop
        self._ignore_eos = bool(options.ignore_eos)
        self._sampling = Sampling(
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=seeded(options.seed, random.getrandbits(64) & MOST_SEED),
        )
        self.requests = [
            Request(
                key if len(prompts) == 1 else f"{key}-{place}", prompt=prompt, max_new_tokens=limit, stop_token_ids=served.eos,
                ignore_eos=self._ignore_eos, priority=options.priority or 0, tenant=live.tenant, n=self.n,
            )
            for place, prompt in enumerate(prompts)
        ]
        self._streams: list[Stream] = []
        self._samples: list[_Sample] = []

    async def begin(self) -> None:
        """Submit every prompt. Raises `ApiError` when one is refused, or the server is closing; then none of them runs."""
        try:
            answers = await asyncio.gather(*(self._submit(request) for request in self.requests))
        except BaseException:
            self._abort(self.requests)
            raise
        problems = [answer for answer in answers if not isinstance(answer, Stream)]
        if problems:
            self._abort(request for request, answer in zip(self.requests, answers, strict=True) if isinstance(answer, Stream))
            raise self._error(problems)
        if self.state.closing.is_set():
            self._abort(self.requests)
            raise ended_by_us()
        self._streams = [answer for answer in answers if isinstance(answer, Stream)]
        for stream in self._streams:
            self._samples += [_Sample(key, TextStream(self.served.tokenizer, self._stop)) for key in stream.ids]
        self.live.ids = tuple(sample.key for sample in self._samples)
        self.live.limit = self._streams[0].max_new_tokens
        self.state.live[self.key] = self.live

    def end(self) -> None:
        """Whatever happened: what still runs is aborted."""
        left = {at // self.n for at, sample in enumerate(self._samples) if sample.end is None}
        self._abort(self.requests[place] for place in sorted(left))
        self.state.left(self.key)

    async def deltas(self) -> AsyncIterator[Delta]:
        """News until every choice has ended. Raises `ApiError` when one of them failed."""
        async for place, piece in _merged(self._streams):
            choice = place * self.n + piece.index
            sample = self._samples[choice]
            text, finish = self._take(sample, piece)
            if text or finish:
                yield Delta(choice, text, finish)

    def usage(self) -> dict[str, Any]:
        """Tokens read and delivered. Cached: what every sample of a prompt got from the cache, so no token counts twice."""
        prompt = sum(len(request.tokens) for request in self.requests)
        cached = 0
        for place, request in enumerate(self.requests):
            ends = [sample.end for sample in self._samples[place * self.n : (place + 1) * self.n]]
            cached += min(len(request.tokens), *(end.first_cached if end is not None else 0 for end in ends))
        completion = sum(sample.tokens for sample in self._samples)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached}}

    def _take(self, sample: _Sample, piece: Piece) -> tuple[str, str | None]:
        """The text that a piece adds to a sample, and the reason if it ends it."""
        if piece.end is not None:
            sample.end = piece.end
        if sample.finish is not None:
            return "", None  # tokens that were under way when the stop string was found
        if piece.tokens:
            self._measure(sample, len(piece.tokens))
        text = ""
        for token in piece.tokens:
            sample.tokens += 1
            if token in self.served.eos and not self._ignore_eos:
                break  # the end of the answer, and no part of its text
            text += sample.text.push((token,))
            if sample.text.stopped:
                sample.finish = "stop"
                if piece.end is None:
                    self.served.engine.finish(sample.key)
                return text, sample.finish
        if piece.end is not None:
            sample.finish = _reason(piece.end)
            text += sample.text.finish()
        return text, sample.finish

    def _measure(self, sample: _Sample, tokens: int) -> None:
        now, metrics = time.monotonic(), self.state.metrics
        if sample.last is None:
            metrics.first.observe(now - self.live.started)
        else:
            for _ in range(tokens):
                metrics.following.observe((now - sample.last) / tokens)
        sample.last = now

    def _error(self, problems: Sequence[Refused | ApiError]) -> ApiError:
        """The one answer to all refusals of a body: what waiting cannot cure goes before what it can."""
        for problem in problems:
            if isinstance(problem, ApiError):
                return problem
            if not problem.retryable:
                return self.state.refused(problem)
        settings = self.state.settings
        for reason, needed, bound in (
            (RefusalReason.QUEUE_REQUESTS, len(self.requests) * self.n, settings.max_queued_requests),
            (RefusalReason.QUEUE_TOKENS, sum(len(request.tokens) for request in self.requests) * self.n, settings.max_queued_tokens),
        ):
            if needed > bound:  # every prompt of a body waits beside the others, and these can never wait together
                return self.state.refused(Refused(self.key, reason, needed, bound, retryable=False))
        return self.state.refused(next(problem for problem in problems if isinstance(problem, Refused)))

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.served.engine.abort(request.id)

    async def _submit(self, request: Request) -> Stream | Refused | ApiError:
        try:
            return await self.served.engine.submit(request, self._sampling)
        except InvalidRequest as error:
            return ApiError(400, f"{error}.", param="prompt", code="invalid_value")
        except EngineDown as error:
            return ApiError(503, f"{error}.", code="engine_down", retry_after=1)


def _reason(end: Ended) -> str:
    """The finish reason of a sample. Raises `ApiError` for one that did not end well."""
    match end.finish:
        case Finish.ERROR:
            raise ApiError(500, "The model failed while it computed this request.", code="model_error")
        case Finish.ABORT:
            raise ended_by_us()
        case finish:
            return REASONS[finish]


def ended_by_us() -> ApiError:
    """503 for a request that had begun, or was about to, when the server ended."""
    return ApiError(503, "The request was ended by the server, which is shutting down.", code="aborted", retry_after=1)


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    news: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

    async def forward(place: int, stream: Stream) -> None:
        async for piece in stream:
            news.put_nowait((place, piece))
        news.put_nowait((place, None))

    tasks = [asyncio.ensure_future(forward(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            place, found = await news.get()
            if found is None:
                left -= 1
            else:
                yield place, found
    finally:
        for task in tasks:
            task.cancel()
