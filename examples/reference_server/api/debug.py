"""GET /debug/scheduler: everything that the scheduler knows, and why each request waits; what the page at / shows.

Never the text or the tokens of anybody's prompt or answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from reference_server.api.health import signals
from reference_server.api.state import State
from reference_server.engine import EngineBusy, EngineDown


async def scheduler(request: Request) -> Response:
    """The snapshot as JSON. 503 when the engine does not answer, with all that is known without it."""
    state: State = request.app.state.server
    found = overview(state)
    status = 503
    if state.served is None:
        found["error"] = "the model is being loaded"
    else:
        try:
            found["scheduler"] = await state.served.engine.snapshot()
            status = 200
        except (EngineBusy, EngineDown) as error:
            found["error"] = str(error)
    return JSONResponse(found, status_code=status)


def overview(state: State) -> dict[str, Any]:
    """What is known without asking the engine's thread."""
    settings, served, now = state.settings, state.served, time.monotonic()
    found: dict[str, Any] = {
        "server": {
            "model": None if served is None else served.name, "uptime_s": round(now - state.started, 3),
            "settings": attrs.asdict(settings), "chat": served is not None and served.tokenizer.has_chat,
            "tasks": len(asyncio.all_tasks()), "context_limit": None if served is None else served.engine.context_limit,
        },
        "health": signals(state),
        "requests": {
            key: {"kind": live.kind, "prompt_tokens": live.prompt_tokens, "samples": live.samples, "stream": live.stream,
                  "tenant": live.tenant, "age_s": round(now - live.started, 3), "max_new_tokens": live.limit, "ids": live.ids}
            for key, live in state.live.items()
        },
        "vitals": None, "scheduler": None, "error": None,
    }
    if served is not None:
        vitals = attrs.asdict(served.engine.vitals)
        vitals["health"]["condition"] = vitals["health"]["condition"].value
        found["vitals"] = vitals
    return found
