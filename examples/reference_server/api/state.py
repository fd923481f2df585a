"""What all handlers share: the engine once it is loaded, whether we are draining, and the requests under way.

What does not live here: anything that the scheduler knows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
from starlette.types import Scope

from kvsched import Refused
from reference_server.api import errors
from reference_server.api.errors import ApiError
from reference_server.api.metrics import Metrics
from reference_server.engine import Engine
from reference_server.settings import Settings
from reference_server.stats import Vitals
from reference_server.text import Tokenizer

LOADING_RETRY_S = 5
"""Retry-After while the model is read: it takes seconds, and nothing says how many."""
MAX_RETRY_S = 60
"""Retry-After at most: clients that are told to wait longer give up."""
RECENT = 32
"""Ends of requests from which the pace is told."""


@attrs.frozen(eq=False)
class Served:
    """What is served. eos: token ids that end an answer. created: Unix time, for /v1/models."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    eos: frozenset[int]
    created: int = attrs.field(factory=lambda: int(time.time()))


@attrs.define(eq=False)
class Live:
    """One HTTP request under way, for those who look. kind: "chat" or "completion". limit: of new tokens, once accepted."""

    kind: str
    prompt_tokens: int
    samples: int
    stream: bool
    tenant: str
    started: float
    limit: int | None = None
    ids: tuple[str, ...] = ()


class State:
    """The shared state of an app. One event loop owns it; only `served` is set from elsewhere, once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = time.monotonic()
        self.served: Served | None = None
        self.drain_until: float | None = None
        self.closing = asyncio.Event()  # set when the drain is over
        self.live: dict[str, Live] = {}
        self.arriving = 0  # requests whose body is here, and which are not in the engine yet
        self.metrics = Metrics(self._look)
        self.hang_up: Callable[[Scope], None] = lambda _: None  # cut a connection; the server puts its own here
        self._ends: deque[float] = deque(maxlen=RECENT)

    def drain(self) -> None:
        """Refuse everything new from now on. What runs may go on for `drain_s` seconds."""
        if self.drain_until is None:
            self.drain_until = time.monotonic() + self.settings.drain_s

    @property
    def word(self) -> str:
        """One word for the whole server: loading, draining, or the engine's (`Engine.state`)."""
        if self.served is None:
            return "loading"
        state = self.served.engine.state
        return "draining" if self.drain_until is not None and state in ("idle", "live") else state

    def admit(self) -> Served:
        """What serves a new request. Raises `ApiError` 503 while loading, draining, or when the engine is not live."""
        if self.drain_until is not None:
            left = max(math.ceil(self.drain_until - time.monotonic()), 1)
            raise ApiError(503, "The server is shutting down and takes no new requests.", code="draining", retry_after=left)
        if self.served is None:
            raise ApiError(503, "The model is being loaded.", code="loading", retry_after=LOADING_RETRY_S)
        if not self.served.engine.live:
            word = self.word
            raise ApiError(503, f"The server is not live: {word}.", code=word, retry_after=LOADING_RETRY_S)
        return self.served

    @property
    def busy(self) -> bool:
        """Whether somebody has been promised an answer."""
        return bool(self.live or self.arriving)

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """A request is on its way into the engine."""
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    def left(self, key: str) -> None:
        """A request that was under way has ended, in whichever way."""
        live = self.live.pop(key)
        now = time.monotonic()
        self._ends.append(now)
        self.metrics.whole.observe(now - live.started)

    def _look(self) -> tuple[Vitals, bool, bool] | None:
        if self.served is None:
            return None
        engine = self.served.engine
        return engine.vitals, engine.live, engine.ready and self.drain_until is None

    def refused(self, answer: Refused) -> ApiError:
        """The scheduler's refusal as an answer, with a Retry-After told from how fast requests have been ending."""
        places = max(answer.needed - answer.available, 1) if errors.UNITS[answer.reason] == "requests" else 1
        return errors.refused(answer, self.seconds_for(places))

    def seconds_for(self, ends: int) -> int:
        """How long so many ends of requests take at the recent pace, from 1 s to `MAX_RETRY_S`."""
        if len(self._ends) < 2:
            return 1
        pace = (time.monotonic() - self._ends[0]) / (len(self._ends) - 1)
        return min(max(math.ceil(pace * ends), 1), MAX_RETRY_S)
