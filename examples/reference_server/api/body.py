"""Reading a request's body, and noticing that its client went away.

What lives here: size, type and time limits of a body, and the race between work and a disconnect. What does not: what the
body says (`reference_server.api.schema`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from reference_server.api.errors import ApiError

BODY_S = 60.0
"""How long a client may take to send its body: far longer than any body takes over a slow link, so that connections that
never send theirs do not pile up."""
DRAINED_BYTES = 64 * 1024 * 1024
"""A body that is refused for its size and announced as at most this long is let run into the void, so that the client reads
the answer. Beyond it the connection is closed, and a client that is still sending may see that instead."""

T = TypeVar("T")


async def read(request: Request, limit: int, closing: asyncio.Event) -> bytes:
    """The whole body. Raises `ApiError` 413, 415 or 408, and 503 when the server closes before it is there; `ClientDisconnect`.

    Never holds more than `limit` bytes and one read.
    """
    body, end = asyncio.ensure_future(_read(request, limit)), asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((body, end), return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            return body.result()
        raise ApiError(503, "The server has shut down before the body was complete.", code="draining", retry_after=1,
                       headers={"connection": "close"})
    finally:
        for task in (body, end):
            task.cancel()
        await asyncio.gather(body, end, return_exceptions=True)


async def _read(request: Request, limit: int) -> bytes:
    _check_type(request.headers)
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > limit:
        await _let_run(request, int(announced))
        raise too_large(limit, announced=int(announced))
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_S:g} s.", code="body_timeout", headers={"connection": "close"}) from None
    return b"".join(parts)


async def _let_run(request: Request, announced: int) -> None:
    """Read a body that is too large into the void, where it is worth it: a client that is cut off while it sends sees no answer."""
    if announced <= DRAINED_BYTES and "expect" not in request.headers:  # one that asks first has sent nothing yet
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_S):
                async for _ in request.stream():
                    pass


def too_large(limit: int, announced: int | None = None) -> ApiError:
    """413, and the end of the connection where the rest of the body is not worth waiting for."""
    size = "" if announced is None else f", not {announced}"
    stays = announced is not None and announced <= DRAINED_BYTES
    headers = {} if stays else {"connection": "close"}
    return ApiError(413, f"The body may have at most {limit} bytes{size}.", code="body_too_large", headers=headers)


def _check_type(headers: Headers) -> None:
    """Raise `ApiError` 415 unless the body is said to be JSON in UTF-8."""
    stated = headers.get("content-type", "")
    kind, *parameters = (part.strip().lower() for part in stated.split(";"))
    charsets = [value.strip('"') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"]
    if kind != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        said = f"not {stated!r}" if stated else "and the request has none"
        raise ApiError(415, f"Content-Type must be application/json in UTF-8, {said}.", code="unsupported_media_type")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises `ClientDisconnect` then.

    The body must have been read: what else arrives on the connection says that it is gone.
    """
    task, ear = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, ear), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, ear):
            each.cancel()
        await asyncio.gather(task, ear, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
