"""A request's tokens on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import attrs

from kvsched import Request
from kvsched.plan import Ended
from kvsched.verdict import Accepted


@attrs.frozen
class Piece:
    """What one step gave one sample: tokens, and its end if it came. index: which of the request's n samples."""

    index: int
    tokens: tuple[int, ...]
    end: Ended | None = None


class Stream:
    """The pieces of one request, in order, until each of its samples has ended. Iterate it once, in the event loop."""

    def __init__(self, accepted: Accepted, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.id = accepted.id
        self.ids = accepted.ids
        self.max_new_tokens = accepted.max_new_tokens
        self.prompt_tokens = len(request.tokens)
        self.loop = loop
        self._pieces: deque[Piece] = deque()
        self._news = asyncio.Event()
        self._open = len(accepted.ids)

    def put(self, piece: Piece) -> None:
        """Add a piece. In the event loop only."""
        self._pieces.append(piece)
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while self._open:
            while not self._pieces:
                self._news.clear()
                await self._news.wait()
            piece = self._pieces.popleft()
            self._open -= piece.end is not None
            yield piece
