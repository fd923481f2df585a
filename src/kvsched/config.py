"""The scheduler's configuration: one frozen record, checked when made, each key with its unit and default.

What does not live here: anything of the pool or the cache, which are objects of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvsched.errors import ConfigError
from kvsched.units import plain

ORDERS = ("fcfs", "lpm", "dfs-weight", "lof", "priority", "sjf", "fair")
HEADS = ("strict", "backfill", "skip")
ADMISSIONS = ("guaranteed", "expected")
RATIO_STARTS = ("minimum", "initial")
MOST = 2**31 - 1
"""Largest integer of any key: token and page ids are int32, and sums of a few of them stay exact in int64."""


def _integer(low: int, none: bool = False) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if value is None and none:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{attribute.name} must be an integer of at least {low}{' or None' if none else ''}, not {value!r}")
        if value > MOST:
            raise ConfigError(f"{attribute.name} must be at most {MOST}, not {value!r}")

    return check


def _one_of(allowed: tuple[str, ...]) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(f"{attribute.name} must be one of {', '.join(allowed)}, not {value!r}")

    return check


def _flag(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be True or False, not {value!r}")


def _number(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{attribute.name} must be a number of at least 0, not {value!r}")


def _weights(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{attribute.name} must map tenants to weights, not {value!r}")
    for tenant, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ConfigError(f"{attribute.name}[{tenant!r}] must be a number above 0, not {weight!r}")


def _plain_weights(value: Any) -> Any:
    """A copy of the host's mapping, numpy scalars as Python ones."""
    return {tenant: plain(weight) for tenant, weight in value.items()} if isinstance(value, Mapping) else value


def _with_converters(_: type, fields: list[Any]) -> list[Any]:
    """Every key takes numpy scalars; by a transformer, so that a type checker still sees each key's own type."""
    return [field.evolve(converter=field.converter or plain) for field in fields]


@attrs.frozen(kw_only=True, field_transformer=_with_converters)
class SchedulerConfig:
    """Every knob of a `Scheduler`. A bad value raises `ConfigError` naming the key and what was allowed.

    page_size: tokens per page; must equal the pool's.
    max_running: residents at most, those in the middle of their prefill included.
    max_step_tokens: tokens computed in one step over all requests.
    chunk_tokens: tokens of one request's prefill in one step; None: bounded by the step alone.
    long_prefill_tokens: the same, but only while another request wants prefill.
    max_partial_prefills: residents that may be between two chunks at once; None: any number; 0: every prefill is computed
        whole, in one step, so the step must hold the longest request there can be, and one for which it has too few tokens
        left stops the pass for those behind it.
    decode_every: decodes go first at least once in this many steps while prefill is pending; in the steps between, prefill goes first.
    prefill_grant: a pending prefill gets a chunk at least once in this many steps; None: decodes always go first.
    context_limit: prompt + new tokens of one request; None: bounded by the pool alone.
    admission: "guaranteed" reserves the most a request can write, so nothing is ever retracted for memory; "expected"
        reserves an estimate (`conservativeness`, `ratio_start`, `clip_new_tokens`) and retracts when it was too low.
    order: who goes first. aging_tokens: credit per step waited (lpm). max_skips: admissions that may pass one request (sjf).
    fair_weights: share of each tenant (fair); a tenant that is not named weighs 1.
    head: who may pass a deferred head. max_bypass: how many may (skip).
    preempt_priority: whether a strictly better priority may displace running requests.
    hold_shared_prefill: whether cold requests with one prefix wait for its first computation.
    exchange_pages: whether a running row's pages may be exchanged for the cache's own of the same content, so that two
        requests that computed one prefix side by side share it from then on. False for a host whose rows are only ever
        appended to: the copy is given back, and what the row computed after it is cached, when the request leaves.
    pin_limit_pages: pages that pins may keep; None: pins are refused.
    max_queued_requests, max_queued_tokens: requests, and their prompt tokens, that hold nothing yet.
    max_inflight_prompt_tokens: prompt tokens submitted and not yet computed, waiting or resident.
    max_adapters: distinct adapters in one step.
    max_in_flight: plans made and not yet committed, 1 or 2.
    lookahead_tokens: speculative slots per decode besides the sampled token.
    stall_steps: steps without progress after which work counts as stalled.
    """

    page_size: int = attrs.field(validator=_integer(1))
    max_running: int = attrs.field(default=256, validator=_integer(1))
    max_step_tokens: int = attrs.field(default=8192, validator=_integer(1))
    chunk_tokens: int | None = attrs.field(default=None, validator=_integer(1, none=True))
    long_prefill_tokens: int | None = attrs.field(default=None, validator=_integer(1, none=True))
    max_partial_prefills: int | None = attrs.field(default=None, validator=_integer(0, none=True))
    decode_every: int = attrs.field(default=1, validator=_integer(1))
    prefill_grant: int | None = attrs.field(default=None, validator=_integer(1, none=True))
    context_limit: int | None = attrs.field(default=None, validator=_integer(1, none=True))
    admission: str = attrs.field(default="expected", validator=_one_of(ADMISSIONS))
    conservativeness: float = attrs.field(default=1.0, validator=_number)
    ratio_start: str = attrs.field(default="minimum", validator=_one_of(RATIO_STARTS))
    clip_new_tokens: int = attrs.field(default=4096, validator=_integer(1))
    order: str = attrs.field(default="fcfs", validator=_one_of(ORDERS))
    aging_tokens: int = attrs.field(default=0, validator=_integer(0))
    max_skips: int = attrs.field(default=16, validator=_integer(0))
    fair_weights: Mapping[str, float] = attrs.field(factory=dict, converter=_plain_weights, validator=_weights)
    head: str = attrs.field(default="strict", validator=_one_of(HEADS))
    max_bypass: int = attrs.field(default=16, validator=_integer(0))
    preempt_priority: bool = attrs.field(default=False, validator=_flag)
    hold_shared_prefill: bool = attrs.field(default=False, validator=_flag)
    exchange_pages: bool = attrs.field(default=True, validator=_flag)
    pin_limit_pages: int | None = attrs.field(default=None, validator=_integer(0, none=True))
    max_queued_requests: int | None = attrs.field(default=None, validator=_integer(0, none=True))
    max_queued_tokens: int | None = attrs.field(default=None, validator=_integer(0, none=True))
    max_inflight_prompt_tokens: int | None = attrs.field(default=None, validator=_integer(0, none=True))
    max_adapters: int | None = attrs.field(default=None, validator=_integer(1, none=True))
    max_in_flight: int = attrs.field(default=1, validator=_integer(1))
    lookahead_tokens: int = attrs.field(default=0, validator=_integer(0))
    stall_steps: int = attrs.field(default=100, validator=_integer(1))

    def __attrs_post_init__(self) -> None:
        if self.max_in_flight > 2:
            raise ConfigError(f"max_in_flight must be 1 or 2, not {self.max_in_flight}")
        if self.max_partial_prefills == 0:
            self._check_whole()
        if 1 + self.lookahead_tokens > self.max_step_tokens:
            raise ConfigError(
                f"max_step_tokens must be at least 1 + lookahead_tokens = {1 + self.lookahead_tokens}, not {self.max_step_tokens}"
            )

    def _check_whole(self) -> None:
        """Prefills are computed whole: nothing may cut one, and a step must hold any of them, a resuming one included."""
        for key in ("chunk_tokens", "long_prefill_tokens"):
            if getattr(self, key) is not None:
                raise ConfigError(f"{key} must be None where max_partial_prefills is 0, not {getattr(self, key)}")
        if self.context_limit is None or self.context_limit > self.max_step_tokens:
            raise ConfigError(f"context_limit must be at most max_step_tokens = {self.max_step_tokens} where max_partial_prefills is 0, "
                              f"not {self.context_limit}")


SETTABLE = ("max_running", "max_step_tokens", "chunk_tokens", "max_queued_requests", "max_queued_tokens", "head", "order")
"""Keys that set_limits() may change on a live scheduler: none of them changes what was promised."""
