"""POST /v1/chat/completions: a conversation, and its next turn. What does not live here: how it is computed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from reference_server.api.answer import answer, encoded
from reference_server.api.schema import ChatBody
from reference_server.api.state import Served


class _Shape:
    prefix, kind, whole, chunk = "chatcmpl", "chat", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish}

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


async def chat(request: Request) -> Response:
    """The conversation goes through the model's chat template. No limit given means as much as context and pool allow."""
    return await answer(request, ChatBody, _Shape(), tokens=_tokens, limit=_limit)


def _limit(body: ChatBody) -> int | None:
    return body.limit


async def _tokens(served: Served, body: ChatBody) -> list[Sequence[int]]:
    return [await encoded(served.tokenizer.chat, body.conversation, param="messages")]
