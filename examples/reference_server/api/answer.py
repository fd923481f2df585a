"""One way from a body to an answer for both kinds of completion: whole, or as a stream of server-sent events.

What lives here: waiting, streaming, the usage, and what happens when a client leaves or the model fails in the middle. What
does not: the words of an answer, which each kind says for itself (`Shape`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from reference_server.api.body import read, until_disconnect
from reference_server.api.errors import ApiError
from reference_server.api.generation import Generation
from reference_server.api.schema import Options, parse
from reference_server.api.state import Live, Served, State
from reference_server.text import ChatError, TokenizerError

log = logging.getLogger("reference_server")

PULSE_S = 15.0
"""A stream that has nothing to say for so long sends a comment: proxies keep it open, and a dead connection shows."""

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What some clients take for the end of a line, though server-sent events do not: escaped, as JSON allows."""
LARGE_BYTES = 65_536
"""A body from this size on is checked beside the event loop, which would stand still for milliseconds."""

B = TypeVar("B", bound=Options)
T = TypeVar("T")


class Shape(Protocol):
    """How one kind of completion looks. prefix: of ids. kind: for those who look at what runs. whole, chunk: `object` of answers."""

    prefix: str
    kind: str
    whole: str
    chunk: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first event of a choice, where there is one before any text."""

    def part(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A choice in an event."""

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A choice in a whole answer."""


async def answer(request: Request, kind: type[B], shape: Shape, *,
                 tokens: Callable[[Served, B], Awaitable[Sequence[Sequence[int]]]], limit: Callable[[B], int | None]) -> Response:
    """Serve a completion. tokens: the prompts of a body as token ids. limit: new tokens of each sample."""
    state: State = request.app.state.server
    started = time.monotonic()
    state.admit()
    raw = await read(request, state.settings.max_body_bytes, state.closing)
    served = state.admit()  # a body may have taken long to arrive
    with state.arrival():
        body = await asyncio.to_thread(parse, kind, raw) if len(raw) >= LARGE_BYTES else parse(kind, raw)
        if body.model != served.name:
            message = f"The model {body.model!r} does not exist; this server serves {served.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")
        prompts = await tokens(served, body)
        key = request.state.request_id = f"{shape.prefix}-{request.state.request_id}"
        live = Live(shape.kind, sum(map(len, prompts)), (body.n or 1) * len(prompts), bool(body.stream),
                    body.user or body.safety_identifier or "", started)
        generation = Generation(state, served, key, live, prompts=prompts, limit=limit(body), options=body)
        await until_disconnect(request.receive, generation.begin())
    head = {"id": key, "created": int(time.time()), "model": served.name}
    if body.stream:
        return EventStream(generation, shape, head, usage=body.include_usage)
    try:
        return JSONResponse(await until_disconnect(request.receive, _whole(generation, shape, head)))
    finally:
        generation.end()


async def _whole(generation: Generation, shape: Shape, head: dict[str, Any]) -> dict[str, Any]:
    texts: dict[int, list[str]] = {}
    finishes: dict[int, str | None] = {}
    async for delta in generation.deltas():
        texts.setdefault(delta.choice, []).append(delta.text)
        finishes[delta.choice] = delta.finish
    choices = [shape.choice(index, "".join(texts[index]), finishes[index]) for index in sorted(texts)]
    return {**head, "object": shape.whole, "choices": choices, "usage": generation.usage()}


async def encoded(encode: Callable[[T], list[int]], text: T, *, param: str) -> list[int]:
    """Token ids of a text, worked out beside the event loop. Raises `ApiError` 400 for what the tokenizer or the template refuses."""
    try:
        return await asyncio.to_thread(encode, text)
    except (ChatError, TokenizerError) as error:
        raise ApiError(400, f"{error}.", param=param, code="invalid_value") from None


class EventStream(Response):
    """An answer as server-sent events, one for each piece of text. The generation has begun, and ends with the response.

    A client that leaves ends it at once. A model that fails sends an event with the error, and no `[DONE]`.
    """

    def __init__(self, generation: Generation, shape: Shape, head: dict[str, Any], *, usage: bool) -> None:
        self.generation = generation
        self.shape = shape
        self.head = {**head, "object": shape.chunk}
        self.usage = usage
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"})
        self._said = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client leaves first, or leaves what it is sent unread for too long."""
        state = self.generation.state
        deadline = state.settings.write_deadline_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(deadline):
                    await send(message)
            except TimeoutError:
                log.warning("%s: its client has read nothing for %g s, and is hung up on", self.generation.key, deadline)
                state.hang_up(scope)
                raise ClientDisconnect from None

        try:
            await until_disconnect(receive, self._run(send_in_time))
        except ClientDisconnect:
            pass  # nobody is there to be told
        finally:
            self.generation.end()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pulse = asyncio.ensure_future(self._pulse(send))
        try:
            await self._events(send)
        except ApiError as error:
            await self._say(send, json.dumps(error.body()))
        except ClientDisconnect:
            raise
        except Exception:
            log.exception("%s failed in the middle of its stream", self.generation.key)
            await self._say(send, json.dumps(ApiError(500, "The server failed.", code="internal_error").body()))
        finally:
            pulse.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, send: Send) -> None:
        for index in range(self.generation.live.samples):
            opening = self.shape.opening(index)
            if opening is not None:
                await self._say(send, self._event([opening]))
        async for delta in self.generation.deltas():
            await self._say(send, self._event([self.shape.part(delta.choice, delta.text, delta.finish)]))
            await asyncio.sleep(0)  # with many events at hand, whoever left is noticed between two of them
        if self.usage:
            await self._say(send, self._event([], self.generation.usage()))
        await self._say(send, "[DONE]")

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        event = {**self.head, "choices": choices}
        if self.usage:
            event["usage"] = usage
        return json.dumps(event, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)

    async def _say(self, send: Send, data: str) -> None:
        self._said += 1
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def _pulse(self, send: Send) -> None:
        while True:
            said = self._said
            await asyncio.sleep(PULSE_S)
            if said == self._said:
                await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})
