"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from reference_server.api.errors import ApiError
from reference_server.api.state import State


def _served(state: State) -> list[dict[str, Any]]:
    served = state.served
    if served is None:
        return []
    return [{"id": served.name, "object": "model", "created": served.created, "owned_by": "kvsched",
             "max_model_len": served.engine.context_limit}]


async def models(request: Request) -> Response:
    """The list; empty while the model is loaded."""
    return JSONResponse({"object": "list", "data": _served(request.app.state.server)})


async def model(request: Request) -> Response:
    """One model by its id. Raises `ApiError` 404 for another."""
    name = request.path_params["name"]
    for found in _served(request.app.state.server):
        if found["id"] == name:
            return JSONResponse(found)
    raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
