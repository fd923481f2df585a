"""GET /health and /ready: what an orchestrator should believe (law F1). Answers without asking the engine's thread.

What does not live here: how it is told (`reference_server.engine.Engine.live`, `kvsched.liveness`).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from reference_server.api.state import LOADING_RETRY_S, State


def signals(state: State) -> dict[str, Any]:
    """The word for the server, and the figures behind it."""
    found: dict[str, Any] = {"status": state.word, "live": True, "ready": False}
    if state.served is not None:
        engine = state.served.engine
        health = engine.vitals.health
        found |= {
            "live": engine.live, "ready": engine.ready and state.drain_until is None, "running": health.running,
            "waiting": health.waiting, "still_steps": health.still_steps, "decode_steps": health.decode_steps,
            "completions": health.completions,
        }
    return found


async def health(request: Request) -> Response:
    """200 while work moves or there is none, a full queue, loading and draining included; 503 when it should be restarted."""
    found = signals(request.app.state.server)
    return JSONResponse(found, status_code=200 if found["live"] else 503)


async def ready(request: Request) -> Response:
    """200 when another request should be sent here; 503 while loading, draining, not live, or with a full queue."""
    state: State = request.app.state.server
    found = signals(state)
    if found["ready"]:
        return JSONResponse(found)
    if found["status"] in ("idle", "live"):
        found["status"] = "queue_full"
    seconds = LOADING_RETRY_S if state.served is None else state.seconds_for(1)
    return JSONResponse(found, status_code=503, headers={"retry-after": str(seconds)})
