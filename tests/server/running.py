"""A real server for tests: the tiny model, the real engine, a real socket; and clients that speak to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from openai import OpenAI

from reference_server.api.server import Server, bind, serve
from reference_server.api.state import Served, State
from reference_server.engine import Engine
from reference_server.model import tiny, tiny_tokenizer
from reference_server.model.tiny import EOS
from reference_server.settings import Settings

PATIENCE_S = 60.0
"""How long a test waits for what must come: generous, since nothing is asserted about time."""
SMALL = Settings(host="127.0.0.1", port=0, model="tiny", dtype="float64", pool_tokens=4096, drain_s=30.0)


def tiny_served(settings: Settings, **changes: Any) -> Served:
    """The tiny model behind an engine that is not started."""
    return Served("tiny", Engine(tiny(**changes), settings=settings), tiny_tokenizer(), frozenset((EOS,)))


@attrs.define(eq=False)
class Running:
    """A server under way in a thread of its own."""

    port: int
    state: State
    server: Server
    thread: threading.Thread
    problems: list[BaseException]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def served(self) -> Served:
        assert self.state.served is not None
        return self.state.served

    @property
    def engine(self) -> Engine:
        return self.served.engine

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options})

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request over a connection of its own. A body that is no bytes is sent as JSON."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if raw is None else {"content-type": "application/json"}
            link.request(method, path, raw, {**kind, **(headers or {})})
            answer = link.getresponse()
            return Reply(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        finally:
            link.close()

    def post(self, path: str, **fields: Any) -> Reply:
        return self.ask("POST", path, {"model": "tiny", **fields})

    def settled(self) -> None:
        """Wait until nothing is under way and every page is free or cached."""

        def nothing() -> bool:
            vitals = self.engine.vitals
            pages = vitals.occupancy
            empty = pages["free"] + pages["cached"] == pages["usable"] and vitals.health.running + vitals.health.waiting == 0
            return empty and not self.state.live

        until(nothing)

    def stop(self) -> None:
        """End it as SIGTERM does, and wait."""
        self.server.drain()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@attrs.frozen
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a look at its shape."""
        error: dict[str, Any] = self.json["error"]
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert {"param", "code"} <= set(error)
        return error


@contextmanager
def running(settings: Settings = SMALL, load: Callable[[], Served] | None = None, *, wait: bool = True) -> Iterator[Running]:
    """A server, ready to serve unless told not to wait for that; drained at the end."""
    state = State(settings)
    server = Server(state)
    listener = bind(settings.host, settings.port)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve(server, listener, load or (lambda: tiny_served(settings)), lambda _: None))
        except BaseException as error:  # noqa: BLE001  # it is raised in the test's own thread
            problems.append(error)

    thread = threading.Thread(target=run, name="server")
    found = Running(listener.getsockname()[1], state, server, thread, problems)
    thread.start()
    try:
        until(lambda: server.started or problems)
        if wait:
            until(lambda: state.served is not None or problems)
        if problems:
            raise problems[0]
        yield found
    finally:
        server.drain()
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive()


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what had to come did not"
        time.sleep(0.005)
