"""Every "no" of the HTTP side, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` and sometimes more.

What lives here: the exception that handlers raise, and the words for each refusal of the scheduler. What does not: when it
is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from starlette.responses import JSONResponse

from kvsched import Refused
from kvsched.verdict import RefusalReason

UNITS = {
    RefusalReason.NEVER_FITS: "pages",
    RefusalReason.CONTEXT_LIMIT: "tokens",
    RefusalReason.QUEUE_REQUESTS: "requests",
    RefusalReason.QUEUE_TOKENS: "tokens",
    RefusalReason.INFLIGHT_TOKENS: "tokens",
}
"""Unit of `needed` and `available` for each reason (`kvsched.verdict.RefusalReason`)."""
TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error", 408: "invalid_request_error",
         413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 499: "client_closed_request",
         500: "server_error", 503: "service_unavailable"}
"""`error.type` by status. `openai` picks its exception by the status alone."""


@attrs.frozen(eq=False)
class ApiError(Exception):
    """An answer that is no success. Raised by handlers; made into a response in one place (`reference_server.api.app`).

    status: of the response. message: a sentence for the person who wrote the client. param: the field it is about, None
    where it is about no field. code: a word for programs. retry_after: seconds after which it may work, None where trying
    again is no use. extra: further fields of `error`. headers: further headers.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    headers: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    def body(self) -> dict[str, Any]:
        """The body of the response, or of the event in a stream that had begun."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.extra}}

    def response(self) -> JSONResponse:
        """The response, with Retry-After where trying again may work."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def refused(answer: Refused, retry_after: int) -> ApiError:
    """What a refusal of the scheduler means to a client.

    A full queue is 429 with Retry-After. What can never be taken, however long one waits, is 400: more than the pool or
    the context can hold, or more by itself than the queue may ever hold.
    """
    unit = UNITS[answer.reason]
    extra = {"reason": answer.reason.value, "needed": answer.needed, "available": answer.available, "unit": unit}
    numbers = f"needed {answer.needed} {unit}, available {answer.available}"
    match answer.reason:
        case RefusalReason.NEVER_FITS:
            text = f"The request can never fit into the KV pool: {numbers}. Shorten the prompt or max_tokens."
            return ApiError(400, text, code=answer.reason.value, extra=extra)
        case RefusalReason.CONTEXT_LIMIT:
            text = f"Prompt and max_tokens exceed the context limit: {numbers}. Shorten the prompt or max_tokens."
            return ApiError(400, text, code="context_length_exceeded", extra=extra)
        case _:
            what = "The queue is full" if answer.retryable else "The request alone exceeds what the queue may hold"
            text = f"{what} ({answer.reason.value}): {numbers}."
            if not answer.retryable:
                return ApiError(400, text, code=answer.reason.value, extra=extra)
            return ApiError(429, f"{text} Try again in {retry_after} s.", code=answer.reason.value, retry_after=retry_after, extra=extra)
