"""The ASGI application: routes, and the one place where errors become answers.

What lives here: the table of routes, request ids, and the count of responses. What does not: what a route does.
"""

from __future__ import annotations

import logging
import uuid
from importlib.resources import files
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference_server.api.chat import chat
from reference_server.api.completions import completions
from reference_server.api.debug import scheduler
from reference_server.api.errors import ApiError
from reference_server.api.health import health, ready
from reference_server.api.models import model, models
from reference_server.api.state import State

log = logging.getLogger("reference_server")

GONE = 499
"""Status by which a response that nobody waits for is counted; it is never sent."""


def create_app(state: State) -> ASGIApp:
    """The application over a shared state."""
    routes = [
        Route("/", page),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", state.metrics.scrape),
        Route("/debug/scheduler", scheduler),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.server = state
    return Envelope(app, state)


async def page(request: Request) -> Response:  # noqa: ARG001  # starlette's signature
    """The live page: one file, which asks /debug/scheduler and /v1/chat/completions of the server that it came from."""
    html = files("reference_server").joinpath("page", "index.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return HTMLResponse(html, headers={"content-security-policy": policy, "cache-control": "no-cache"})


class Envelope:
    """Around every request: an id of its own, told in x-request-id, and a count of the response by its status."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; `request_id` of its state becomes the header, as it is when the response starts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        mine = scope.setdefault("state", {})
        mine["request_id"] = uuid.uuid4().hex

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", mine["request_id"].encode())]
                self._state.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            if "failed" not in mine:
                raise  # starlette raises again what `_failed` has answered, so that servers without a log of their own print it


async def _api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001  # starlette's signature
    return cast(ApiError, error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: a path or a method."""
    fault = cast(HTTPException, error)
    message = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} is not allowed at {request.url.path}."}
    code = {404: "not_found", 405: "method_not_allowed"}.get(fault.status_code)
    return ApiError(fault.status_code, message.get(fault.status_code, str(fault.detail)), code=code, headers=fault.headers or {}).response()


async def _gone(request: Request, error: Exception) -> Response:  # noqa: ARG001  # starlette's signature
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of ours. The log gets the trace, the client the id under which it stands there."""
    request.state.failed = True
    log.error("%s failed", request.state.request_id, exc_info=error)
    return ApiError(500, f"The server failed. Its log has the details under {request.state.request_id}.", code="internal_error").response()
