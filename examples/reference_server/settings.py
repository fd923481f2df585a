"""What the server can be told: one frozen record, each key checked when it is made, with its unit and default.

What does not live here: reading flags and the environment (`reference_server.__main__`), and anything of the model, which
has a context length and a vocabulary of its own.
"""

from __future__ import annotations

import math
import re
from typing import Any

import attrs

from kvsched.config import ADMISSIONS, HEADS, MOST, ORDERS
from kvsched.errors import ConfigError

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Types of weights and of the KV pool."""
TINY = "tiny"
"""Value of `model` that means a tiny model with random weights: it answers at once, and what it says means nothing."""


def _whole(low: int, high: int = MOST, none: bool = False) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if value is None and none:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{attribute.name} must be an integer from {low} to {high}{' or None' if none else ''}, not {value!r}")

    return check


def _seconds(low: float) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < low:
            raise ConfigError(f"{attribute.name} must be a number of at least {low} seconds, not {value!r}")

    return check


def _one_of(allowed: tuple[str, ...]) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(f"{attribute.name} must be one of {', '.join(allowed)}, not {value!r}")

    return check


def _device(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", value):
        raise ConfigError(f"{attribute.name} must be cpu, cuda or cuda:N, not {value!r}")


def _flag(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be True or False, not {value!r}")


def _string(empty: bool) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, str) or not (value.strip() or (empty and not value)):
            raise ConfigError(f"{attribute.name} must be a string{'' if empty else ' of at least one character'}, not {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Settings:
    """Every knob of the server. A bad value raises `kvsched.errors.ConfigError` naming the key and what was allowed.

    host, port: where to listen; port 0 takes a free one.
    model: a directory with safetensors, or a .gguf file; "" is SmolLM2-135M-Instruct, "tiny" a tiny random model.
    dtype: of weights and of the KV pool. device: where both are: "cpu", "cuda" or "cuda:N".
    page_size: tokens per page. pool_tokens: token slots of the KV pool, rounded down to whole pages. The default model
        takes 45 KiB per slot in float32, so the default pool is 1.4 GiB.
    max_running: requests in a step at most.
    chunk_tokens: tokens of one prompt computed in one step. max_step_tokens: tokens computed in one step over all requests.
        A CPU computes a few hundred tokens of the default model a second, so longer chunks are felt as gaps by those who
        stream.
    context_limit: prompt + new tokens of one request; None: what the model was made for.
    max_queued_requests, max_queued_tokens: requests that hold no page yet, and their prompt tokens; more are refused.
    max_in_flight: plans made and not yet committed; 2 lets the next step be decided while this one is computed.
    order: who goes first. head: who may pass a request that has to wait for pages. admission: reserve the most that a
        request can write, or an estimate. All three as in `kvsched.SchedulerConfig`.
    prefix_cache: whether the KV of prompts is kept for others that begin alike.
    stall_steps: steps without progress after which the server is not live.
    max_body_bytes: largest body of a request; a longer one is refused without being read.
    step_deadline_s: a step that takes longer than this makes the server not live.
    write_deadline_s: how long a client may leave what a stream sends it unread before it is hung up on.
    drain_s: how long requests that run may go on after SIGTERM.
    threads: of torch; None: its own choice.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_string(empty=False))
    port: int = attrs.field(default=8000, validator=_whole(0, 65535))
    model: str = attrs.field(default="", validator=_string(empty=True))
    dtype: str = attrs.field(default="float32", validator=_one_of(DTYPES))
    device: str = attrs.field(default="cpu", validator=_device)
    page_size: int = attrs.field(default=16, validator=_whole(1))
    pool_tokens: int = attrs.field(default=32_768, validator=_whole(1))
    max_running: int = attrs.field(default=64, validator=_whole(1))
    chunk_tokens: int = attrs.field(default=128, validator=_whole(1))
    max_step_tokens: int = attrs.field(default=256, validator=_whole(1))
    context_limit: int | None = attrs.field(default=None, validator=_whole(1, none=True))
    max_queued_requests: int = attrs.field(default=64, validator=_whole(1))
    max_queued_tokens: int = attrs.field(default=65_536, validator=_whole(1))
    max_in_flight: int = attrs.field(default=2, validator=_whole(1, 2))
    order: str = attrs.field(default="fcfs", validator=_one_of(ORDERS))
    head: str = attrs.field(default="strict", validator=_one_of(HEADS))
    admission: str = attrs.field(default="expected", validator=_one_of(ADMISSIONS))
    prefix_cache: bool = attrs.field(default=True, validator=_flag)
    stall_steps: int = attrs.field(default=100, validator=_whole(1))
    max_body_bytes: int = attrs.field(default=4 * 1024 * 1024, validator=_whole(1))
    step_deadline_s: float = attrs.field(default=30.0, validator=_seconds(0.001))
    write_deadline_s: float = attrs.field(default=60.0, validator=_seconds(0.001))
    drain_s: float = attrs.field(default=30.0, validator=_seconds(0))
    threads: int | None = attrs.field(default=None, validator=_whole(1, 1024, none=True))

    def __attrs_post_init__(self) -> None:
        if self.pool_tokens < self.page_size:
            raise ConfigError(f"pool_tokens must be at least page_size = {self.page_size}, not {self.pool_tokens}")

    @property
    def pages(self) -> int:
        """Whole pages of the KV pool."""
        return self.pool_tokens // self.page_size
