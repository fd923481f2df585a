"""The life of the process: bind, answer while the model is loaded, serve, drain, end.

What lives here: uvicorn's server with a drain of ours, and the order of start and end. What does not: the command line
(`reference_server.__main__`), and how a model is read (`reference_server.serving`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Scope

from reference_server.api.app import create_app
from reference_server.api.state import Served, State

KEEP_ALIVE_S = 75
"""Idle connections are kept longer than common clients keep theirs (5 s) and load balancers too (60 s), so that it is never
the server that closes first, under a request that is just being sent."""
LAST_S = 5
"""How long answers that were cut off at the end of a drain may take to be written."""
CUT_S = 4
"""How long their clients have to read them, which is less; then they are hung up on."""


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal drains and whose second one ends the process at once.

    While it drains it still accepts connections and answers 503, so that clients learn why and when to come back.
    """

    def __init__(self, state: State, *, access_log: bool = False) -> None:
        super().__init__(uvicorn.Config(
            create_app(state), http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=access_log,
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=LAST_S,
        ))
        self.state = state
        self.up = asyncio.Event()
        state.hang_up = self.hang_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Signals are heard from before that."""
        await super().startup(sockets)
        self.up.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # a signal handler's signature
        """First signal: drain. Second: end at once, with the status that a shell expects of a process that was killed."""
        if self.state.drain_until is not None:
            os._exit(128 + sig)
        self.drain()
        print(f"draining: {len(self.state.live)} running, up to {self.state.settings.drain_s:g} s; another signal ends at once",
              file=sys.stderr, flush=True)

    def hang_up(self, scope: Scope) -> None:
        """Cut a request's connection, without waiting for what its client has not read.

        It is known by the client's address, which no header may change (`proxy_headers`).
        """
        self._cut(scope["client"])

    def _cut(self, client: Any = None) -> None:
        """Cut the connection of a client, or all of them."""
        for connection in list(self.server_state.connections):
            if client in (None, connection.client):  # type: ignore[union-attr]  # h11's protocol has one
                connection.transport.abort()

    def drain(self) -> None:
        """Take no new requests; end once those that run have ended, or when their time is up."""
        self.state.drain()

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end."""
        until = self.state.drain_until
        if until is not None and (not self.state.busy or time.monotonic() >= until):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what still runs and what is half sent, let its answers be written, and close."""
        self.state.closing.set()
        if self.state.served is not None:
            for live in self.state.live.values():
                for key in live.ids:
                    self.state.served.engine.abort(key)
        asyncio.get_running_loop().call_later(CUT_S, self._cut)  # those who do not read their last words
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything that takes long. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


async def serve(server: Server, listener: socket.socket, load: Callable[[], Served], told: Callable[[Served], None]) -> bool:
    """Serve until drained. load: reads the model, in a thread of its own, while /health answers already. told: it is ready.

    Whether the model was read, which a thread still does otherwise. Raises what `load` raised. The engine is started here,
    and stopped before this returns.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Served] = loop.create_future()

    def arrived(task: asyncio.Future[Served]) -> None:
        if task.cancelled() or task.exception() is not None:
            server.should_exit = True
            return
        served = task.result()
        served.engine.start()
        server.state.served = served
        told(served)

    def read() -> None:
        try:
            served = load()
        except BaseException as error:  # noqa: BLE001  # it is raised where the server ends
            _call(loop, loaded.set_exception, error)
        else:
            _call(loop, loaded.set_result, served)

    loaded.add_done_callback(arrived)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        up = asyncio.ensure_future(server.up.wait())
        await asyncio.wait((serving, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        threading.Thread(target=read, name="loading", daemon=True).start()
        await serving
        if loaded.done():
            loaded.result()
        return loaded.done()
    finally:
        if server.state.served is not None:
            await asyncio.to_thread(server.state.served.engine.stop, 0.0)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Call in the event loop, if it is still there: the server may have been stopped while the model was read."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        print("the model was read after the server had ended", file=sys.stderr)
