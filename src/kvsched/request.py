"""The request as the host states it, and the lifecycle of a request as a table.

What does not live here: anything that changes while a request runs (see `kvsched.live`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kvsched.errors import InternalError, InvalidRequest
from kvsched.units import Tokens, plain

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are kept as int32: the largest vocabularies in use are below 2**19, and half the memory halves the cost of
comparing a prompt with the cache."""


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"


class Cause(enum.Enum):
    """What moves a request from one state to another."""

    ADMIT = "admit"
    UNDO_ADMIT = "undo_admit"
    RETRACT = "retract"
    HOLD = "hold"
    RESUME = "resume"
    FINISH = "finish"
    ABORT = "abort"


LIFECYCLE: dict[tuple[State, Cause], State] = {
    (State.WAITING, Cause.ADMIT): State.RUNNING,
    (State.RUNNING, Cause.UNDO_ADMIT): State.WAITING,
    (State.RUNNING, Cause.RETRACT): State.WAITING,
    (State.PAUSED, Cause.RETRACT): State.WAITING,
    (State.RUNNING, Cause.HOLD): State.PAUSED,
    (State.PAUSED, Cause.RESUME): State.RUNNING,
    (State.WAITING, Cause.FINISH): State.FINISHED,  # a late token of a retracted request was its last
    (State.RUNNING, Cause.FINISH): State.FINISHED,
    (State.PAUSED, Cause.FINISH): State.FINISHED,  # the step in flight when the pause came was its last
    (State.WAITING, Cause.ABORT): State.ABORTED,
    (State.RUNNING, Cause.ABORT): State.ABORTED,
    (State.PAUSED, Cause.ABORT): State.ABORTED,
    (State.PAUSED, Cause.UNDO_ADMIT): State.WAITING,
}
"""Every legal transition. `advance` is the only reader."""


def advance(state: State, cause: Cause) -> State:
    """The state after `cause`. Raises `InternalError` for a transition that the table does not have."""
    try:
        return LIFECYCLE[state, cause]
    except KeyError:
        raise InternalError(f"no transition {cause.value!r} from state {state.value!r}") from None


class Finish(enum.IntEnum):
    """Why a request ended; the finish codes of `Outcome.finish`. 0 means that it goes on."""

    NONE = 0
    LENGTH = 1
    STOP = 2
    ABORT = 3
    ERROR = 4


def as_tokens(value: Any, name: str = "prompt") -> Tokens:
    """A read-only int32 copy of a sequence of token ids. Raises `InvalidRequest` for anything else. O(tokens)."""
    try:
        array = np.asarray(value)
    except Exception:  # noqa: BLE001  # whatever a foreign array raises
        raise InvalidRequest(f"{name} must be a sequence of integers in one dimension, not {_shown(value)}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(f"{name} must be a sequence of integers in one dimension, not {_shown(value)}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > MAX_TOKEN_ID):
        raise InvalidRequest(f"{name} must hold token ids from 0 to {MAX_TOKEN_ID}, not {int(array.min())} to {int(array.max())}")
    tokens = np.array(array, dtype=np.int32)
    tokens.flags.writeable = False
    return tokens


def whole(value: Any, name: str, low: int | None, none: bool = False) -> int | None:
    """Check that `value` is an integer of at least `low` (bool and float are not), or None where that is allowed."""
    if value is None and none:
        return None
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low}"
        raise InvalidRequest(f"{name} must be an integer{bound}{' or None' if none else ''}, not {value!r}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(none: bool) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not (isinstance(value, str) or (none and value is None)):
            raise InvalidRequest(f"{attribute.name} must be a string{' or None' if none else ''}, not {value!r}")

    return check


@attrs.frozen
class Namespace:
    """What must be equal for two requests to share cached pages (law D3). Compared field by field, never joined.

    Each field is a string or None (absent); anything else raises `InvalidRequest`.
    """

    adapter: str | None = attrs.field(default=None, validator=_text(none=True))
    version: str | None = attrs.field(default=None, validator=_text(none=True))
    salt: str | None = attrs.field(default=None, validator=_text(none=True))


def _flag(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{attribute.name} must be True or False, not {value!r}")


def _whole(low: int | None, none: bool = False) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        whole(value, attribute.name, low, none)

    return check


def _named(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"id must be a string of at least one character, not {value!r}")


def _stops(value: Any) -> frozenset[int]:
    try:
        stops = frozenset(value)
    except TypeError:
        raise InvalidRequest(f"stop_token_ids must be a collection of token ids, not {value!r}") from None
    for stop in stops:
        if (whole(stop, "stop_token_ids", 0) or 0) > MAX_TOKEN_ID:
            raise InvalidRequest(f"stop_token_ids must be from 0 to {MAX_TOKEN_ID}, not {stop!r}")
    return frozenset(int(stop) for stop in stops)


def _space(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, Namespace):
        raise InvalidRequest(f"namespace must be a Namespace, not {value!r}")


@attrs.frozen(eq=False)
class Request:
    """One generation request, as the host states it. Checked when made: a malformed field raises `InvalidRequest`.

    prompt: token ids, any integer sequence; kept as a read-only int32 array. At least one.
    max_new_tokens: tokens to generate at most; 0 computes the prompt only; None means as many as context and pool allow.
    stop_token_ids: end the request when sampled (the stop token counts as generated), after `min_new_tokens`.
    ignore_eos: generate all of `max_new_tokens`, whatever is sampled; the scheduler may rely on that length.
    priority: lower goes first under the priority order, resumes first and is retracted last.
    tenant: whose share it counts against under the fair order. adapter: the LoRA (or other) adapter it runs with.
    namespace: what must be equal to share cached pages; the adapter is part of it whether or not it is stated.
    n: independent samples of one prompt; children are called id/0 ... id/n-1 when n > 1.
    cache_read, cache_write: whether cached pages may be used, and whether its pages may be kept.
    ready: False keeps it queued until mark_ready(id).
    block_tokens: tokens per block of a block-diffusion model, None for token-by-token decoding.
    pin: leading pages of the prompt to keep in the cache after the end, as far as `pin_limit_pages` allows.
    """

    id: str = attrs.field(validator=_named)
    prompt: Sequence[int] | Tokens = attrs.field(converter=as_tokens, repr=lambda p: f"<{len(p)} tokens>")
    max_new_tokens: int | None = attrs.field(default=None, converter=plain, validator=_whole(0, none=True))
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=_stops)
    min_new_tokens: int = attrs.field(default=0, converter=plain, validator=_whole(0))
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    priority: int = attrs.field(default=0, converter=plain, validator=_whole(None))
    tenant: str = attrs.field(default="", validator=_text(none=False))
    namespace: Namespace = attrs.field(default=Namespace(), validator=_space)
    adapter: str | None = attrs.field(default=None, validator=_text(none=True))
    n: int = attrs.field(default=1, converter=plain, validator=_whole(1))
    cache_read: bool = attrs.field(default=True, validator=_flag)
    cache_write: bool = attrs.field(default=True, validator=_flag)
    ready: bool = attrs.field(default=True, validator=_flag)
    block_tokens: int | None = attrs.field(default=None, converter=plain, validator=_whole(1, none=True))
    pin: int = attrs.field(default=0, converter=plain, validator=_whole(0))

    def __attrs_post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise InvalidRequest("prompt must hold at least one token")
        stated = self.namespace.adapter
        if stated is not None and stated != self.adapter:
            raise InvalidRequest(f"namespace.adapter is {stated!r} but adapter is {self.adapter!r}; state one of them")

    @property
    def tokens(self) -> Tokens:
        """The prompt as a read-only int32 array."""
        return self.prompt  # type: ignore[return-value]  # the converter made it so

    @property
    def space(self) -> Namespace:
        """The namespace with the adapter in it (law D3)."""
        if self.adapter is None or self.namespace.adapter == self.adapter:
            return self.namespace
        return attrs.evolve(self.namespace, adapter=self.adapter)
