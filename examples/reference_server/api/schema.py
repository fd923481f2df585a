"""The bodies that clients send, checked field by field before anything is done with them.

What lives here: the fields, what each may be, and the sentence for each that is not so. What does not: what needs the
model (its name, its vocabulary, its chat template), which handlers ask it.

A parameter of OpenAI's that this server cannot honour is accepted where its value changes nothing, and refused by name
otherwise: a client that asks for tools or log-probabilities must not be given an answer without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, from_json

from reference_server.api.errors import ApiError

MAX_STOPS = 4
"""Stop strings of one request, as in OpenAI's API."""
MAX_PROMPTS = 256
"""Prompts of one body: each is a request of its own to the scheduler."""
MAX_SAMPLES = 128
"""`n` at most, as in OpenAI's API."""
INT32 = 2**31 - 1
INT64 = 2**63 - 1
TEXT_ROLES = ("system", "developer", "user", "assistant")
"""Roles of a message. A developer speaks with the system's voice."""

B = TypeVar("B", bound="Body")


def _wrong(message: str, at: str = "") -> PydanticCustomError:
    """A mistake inside a field that is checked as a whole; `at` is the place in it."""
    return PydanticCustomError("wrong", "{message}", {"message": message, "at": at})


def _ids(value: list[Any], at: str) -> tuple[int, ...]:
    if not value:
        raise _wrong("must hold at least one token", at)
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= INT32:
            raise _wrong("must be a token id", f"{at}[{place}]")
    return tuple(value)


def _one_prompt(value: Any, at: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise _wrong("must not be empty", at)
        return value
    if isinstance(value, list):
        return _ids(value, at)
    raise _wrong("must be a string or a list of token ids", at)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(value, (str, list)) or value == []:
        raise _wrong("must be a string, a list of strings, a list of token ids, or a list of lists of token ids, none of them empty")
    if isinstance(value, str) or type(value[0]) is int:
        return (_one_prompt(value, ""),)
    if len(value) > MAX_PROMPTS:
        raise _wrong(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    kind = type(value[0])
    for place, item in enumerate(value):
        if type(item) is not kind:
            raise _wrong("must be of the same kind as the first prompt", f"[{place}]")
    return tuple(_one_prompt(item, f"[{place}]") for place, item in enumerate(value))


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise _wrong(f"must be a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise _wrong(f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if "" in stops:
        raise _wrong("must hold no empty string")
    return tuple(stops)


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _wrong("must be a string or a list of parts")
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong("must be a part of type 'text'; this model reads nothing else", f"[{place}]")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise _wrong("must be {'type': 'text', 'text': a string}", f"[{place}]")
        texts.append(part["text"])
    return "".join(texts)


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not by taking False for 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _take_neutral(fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], at: str = "") -> None:
    """Drop the fields that change nothing; refuse by name those that would."""
    for name in [name for name in fields if name in neutral]:
        value = fields.pop(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
            words = " or ".join(["null", *(_shown(allowed) for allowed in neutral[name])])
            message = f"{at}{name} is not supported by this server: leave it out, or send {words}."
            raise ApiError(400, message, param=f"{at}{name}", code="unsupported_parameter")


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Body(BaseModel):
    """A body, or a part of one: exact types, and no field that is not named here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Message(Body):
    """One turn of a conversation. `content` is text; parts are joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]


class Options(Body):
    """What both kinds of completion understand.

    priority: lower goes first, where the server orders by priority; always whom to keep when pages run out.
    user, safety_identifier: who asks, for the fair order. ignore_eos: go on to max_tokens whatever is sampled.
    """

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=0, le=INT32)
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-INT64 - 1, le=INT64)
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(default=None, ge=-INT32, le=INT32)
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Options):
    """POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]


class ChatBody(Options):
    """POST /v1/chat/completions.

    prompt_cache_key: OpenAI's servers route by it. Here every prompt may share cached pages with every other, so it is
    read and changes nothing.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=INT32)
    prompt_cache_key: str | None = Field(default=None, max_length=512)

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as the chat template wants them."""
        return [{"role": "system" if turn.role == "developer" else turn.role, "content": turn.content} for turn in self.messages]

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most, by either of the two names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_BOTH: dict[str, tuple[Any, ...]] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
NEUTRAL: dict[type[Body], dict[str, tuple[Any, ...]]] = {
    CompletionBody: {**_BOTH, "logprobs": (), "echo": (False,), "best_of": (1,), "suffix": ("",)},
    ChatBody: {
        **_BOTH, "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},), "tools": ([],),
        "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],), "function_call": ("none", "auto"),
        "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "moderation": (), "store": (False,),
        "metadata": ({},), "service_tier": ("auto", "default"), "reasoning_effort": ("none",), "verbosity": ("medium",),
        "prompt_cache_options": (), "prompt_cache_retention": (),
    },
}
"""Parameters of OpenAI's that this server knows and cannot honour, and the values besides null that change nothing."""
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "name": (), "refusal": (), "annotations": ([],), "audio": (), "function_call": (), "tool_calls": ([],),
}
"""The same for a message. A client sends the assistant's message back as it got it, with all of these empty."""


def parse(kind: type[B], raw: bytes) -> B:
    """The checked body. Raises `ApiError` 400 that names the field and what was allowed."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: byte {error.start} does not decode.", code="invalid_encoding") from None
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    if fields.get("best_of") is not None and _same(fields["best_of"], fields.get("n")):
        del fields["best_of"]  # the best n of n are all of them
    _take_neutral(fields, NEUTRAL.get(kind, {}))
    messages = fields.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            _take_neutral(message, MESSAGE_NEUTRAL, at=f"messages[{place}].")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_error(error) from None
    _check_together(body)
    return body


def _check_together(body: Body) -> None:
    """What no field shows by itself."""
    if isinstance(body, Options) and body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is allowed only when stream is true.", param="stream_options", code="invalid_value")
    if isinstance(body, ChatBody) and None not in (body.max_tokens, body.max_completion_tokens) and \
            body.max_tokens != body.max_completion_tokens:
        message = "max_tokens and max_completion_tokens are two names of one limit and differ; send one of them."
        raise ApiError(400, message, param="max_tokens", code="invalid_value")


def _as_error(error: ValidationError) -> ApiError:
    """The first mistake of a body, in words."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".") + context.get("at", "")
    match first["type"]:
        case "missing":
            return ApiError(400, f"{param} is required.", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            return ApiError(400, f"Unknown parameter: {param}.", param=param, code="unknown_parameter")
        case "wrong":
            return ApiError(400, f"{param} {first['msg']}.", param=param, code="invalid_value")
        case kind:
            code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
            text = first["msg"].replace("Input should", "should")
            return ApiError(400, f"{param} {text}, not {_shown(first['input'])}.", param=param, code=code)
