"""POST /v1/completions: text, or token ids, and what follows. What does not live here: how it is computed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from reference_server.api.answer import answer, encoded
from reference_server.api.errors import ApiError
from reference_server.api.schema import CompletionBody
from reference_server.api.state import Served

DEFAULT_TOKENS = 16
"""`max_tokens` where a body states none: as in OpenAI's API."""


class _Shape:
    prefix, kind, whole, chunk = "cmpl", "completion", "text_completion", "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002  # a completion has no word before its text
        return None

    def part(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    choice = part


async def completions(request: Request) -> Response:
    """Each prompt of the list is a request of its own to the scheduler; if one is refused, none of them runs."""
    return await answer(request, CompletionBody, _Shape(), tokens=_tokens, limit=_limit)


def _limit(body: CompletionBody) -> int:
    return DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens


async def _tokens(served: Served, body: CompletionBody) -> list[Sequence[int]]:
    prompts: list[Sequence[int]] = []
    for prompt in body.prompt:
        tokens = await encoded(served.tokenizer.encode, prompt, param="prompt") if isinstance(prompt, str) else prompt
        if not tokens:
            raise ApiError(400, "prompt must hold at least one token.", param="prompt", code="invalid_value")
        prompts.append(tokens)
    return prompts
