"""Every knob is checked when the configuration is made, by name."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest

from kvsched import PagePool, RadixCache, Scheduler, SchedulerConfig
from kvsched.config import SETTABLE
from kvsched.errors import ConfigError

FROM_ONE = ("page_size", "max_running", "max_step_tokens", "decode_every", "clip_new_tokens", "max_in_flight", "stall_steps")
FROM_ONE_OR_NONE = ("chunk_tokens", "long_prefill_tokens", "prefill_grant", "context_limit", "max_adapters")
FROM_ZERO = ("aging_tokens", "max_skips", "max_bypass", "lookahead_tokens")
FROM_ZERO_OR_NONE = ("max_partial_prefills", "pin_limit_pages", "max_queued_requests", "max_queued_tokens", "max_inflight_prompt_tokens")
FLAGS = ("preempt_priority", "hold_shared_prefill", "exchange_pages")
CHOICES = {
    "admission": ("guaranteed", "expected"), "ratio_start": ("minimum", "initial"), "head": ("strict", "backfill", "skip"),
    "order": ("fcfs", "lpm", "dfs-weight", "lof", "priority", "sjf", "fair"),
}


def make(**fields: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"page_size": 16, **fields})


def refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        make(**{key: value})


def test_every_key_is_looked_at_here() -> None:
    named = {*FROM_ONE, *FROM_ONE_OR_NONE, *FROM_ZERO, *FROM_ZERO_OR_NONE, *FLAGS, *CHOICES, "conservativeness", "fair_weights"}
    assert named == {field.name for field in attrs.fields(SchedulerConfig)}


def test_integers() -> None:
    for key in (*FROM_ONE, *FROM_ONE_OR_NONE, *FROM_ZERO, *FROM_ZERO_OR_NONE):
        for value in (-1, 1.5, True, "3", 2.0):
            refused(key, value)
        least = 0 if key in (*FROM_ZERO, *FROM_ZERO_OR_NONE) else 1
        assert getattr(make(context_limit=64, **{key: least}) if key == "max_partial_prefills" else make(**{key: least}), key) == least
        if least:
            refused(key, 0)
        if key in (*FROM_ONE_OR_NONE, *FROM_ZERO_OR_NONE):
            assert getattr(make(**{key: None}), key) is None
        else:
            refused(key, None)


def test_numpy_scalars_become_plain_ones() -> None:
    """A host computes its limits from tensors; int64 and float32 are as good as int and float, and are kept as those."""
    config = make(page_size=np.int64(16), max_running=np.uint8(7), chunk_tokens=np.int32(9), conservativeness=np.float32(0.5),
                  preempt_priority=np.bool_(True), fair_weights={"a": np.float32(2), "b": np.int64(3)})
    values = [config.page_size, config.max_running, config.chunk_tokens, config.conservativeness, config.preempt_priority,
              *config.fair_weights.values()]
    assert values == [16, 7, 9, 0.5, True, 2.0, 3]
    assert [type(value) for value in values] == [int, int, int, float, bool, float, int]
    for wrong in (np.int64(0), np.float64(3.0), np.bool_(True)):
        refused("max_running", wrong)
    sched = Scheduler(config, PagePool(8, 16))
    sched.set_limits(max_running=np.int64(3))
    assert type(sched.config.max_running) is int


def test_the_weights_are_the_configs_own() -> None:
    weights = {"a": 2.0}
    config = make(fair_weights=weights)
    weights["a"] = 0.0
    assert config.fair_weights == {"a": 2.0}


def test_choices_and_flags() -> None:
    for key, allowed in CHOICES.items():
        for value in allowed:
            assert getattr(make(**{key: value}), key) == value
        for wrong in ("other", None, 1, allowed[0].upper()):
            refused(key, wrong)
    for key in FLAGS:
        for wrong in (0, 1, None, "true"):
            refused(key, wrong)


def test_numbers_and_weights() -> None:
    for value in (0, 0.5, 3):
        assert make(conservativeness=value).conservativeness == value
    for wrong in (-0.1, math.inf, math.nan, None, True, "1"):
        refused("conservativeness", wrong)
    assert make(fair_weights={"a": 2, "b": 0.5}).fair_weights == {"a": 2, "b": 0.5}
    for mapping in ({"a": 0}, {"a": -1}, {"a": math.inf}, {"a": True}, {"a": "1"}, [("a", 1)], None):
        refused("fair_weights", mapping)


def test_what_must_fit_together() -> None:
    refused("max_in_flight", 3)
    with pytest.raises(ConfigError, match="max_step_tokens must be at least 1 \\+ lookahead_tokens = 5, not 4"):
        make(max_step_tokens=4, lookahead_tokens=4)
    assert make(max_step_tokens=5, lookahead_tokens=4).max_step_tokens == 5


@pytest.mark.parametrize(("fields", "named"), [
    ({}, "context_limit must be at most max_step_tokens = 8192 where max_partial_prefills is 0, not None"),
    ({"context_limit": 8193}, "context_limit must be at most max_step_tokens = 8192 where max_partial_prefills is 0, not 8193"),
    ({"context_limit": 64, "chunk_tokens": 64}, "chunk_tokens must be None where max_partial_prefills is 0, not 64"),
    ({"context_limit": 64, "long_prefill_tokens": 9}, "long_prefill_tokens must be None where max_partial_prefills is 0, not 9"),
])
def test_whole_prefills_need_a_step_that_holds_them(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(max_partial_prefills=0, **fields)
    sched = Scheduler(make(max_partial_prefills=0, context_limit=8192), PagePool(8, 16))
    for limits in ({"max_step_tokens": 8191}, {"chunk_tokens": 100}):
        with pytest.raises(ConfigError, match="max_partial_prefills is 0"):
            sched.set_limits(**limits)


def test_defaults_are_those_of_the_scenario_files() -> None:
    config = SchedulerConfig(page_size=16)
    told = {
        "max_running": 256, "max_step_tokens": 8192, "chunk_tokens": None, "long_prefill_tokens": None, "max_partial_prefills": None,
        "decode_every": 1, "prefill_grant": None, "context_limit": None, "admission": "expected", "conservativeness": 1.0,
        "ratio_start": "minimum", "clip_new_tokens": 4096, "order": "fcfs", "aging_tokens": 0, "max_skips": 16, "head": "strict",
        "max_bypass": 16, "preempt_priority": False, "hold_shared_prefill": False, "exchange_pages": True, "pin_limit_pages": None,
        "max_queued_requests": None, "max_queued_tokens": None, "max_inflight_prompt_tokens": None, "max_adapters": None,
        "max_in_flight": 1, "lookahead_tokens": 0, "stall_steps": 100,
    }
    assert {key: getattr(config, key) for key in told} == told


def test_page_sizes_must_agree() -> None:
    with pytest.raises(ConfigError, match="page_size is 16 in the config but 8 in the pool"):
        Scheduler(make(), PagePool(4, 8))
    with pytest.raises(ConfigError, match="page_size is 16 in the config but 8 in the cache"):
        Scheduler(make(), PagePool(4, 16), RadixCache(8))


def test_what_may_change_on_a_live_scheduler() -> None:
    sched = Scheduler(make(), PagePool(4, 16))
    assert set(SETTABLE) == {"max_running", "max_step_tokens", "chunk_tokens", "max_queued_requests", "max_queued_tokens", "head", "order"}
    sched.set_limits(max_running=3, order="sjf")
    assert (sched.config.max_running, sched.config.order) == (3, "sjf")
    for wrong in ({"max_running": 0}, {"max_running": 5, "page_size": 8}, {"head": "no"}, {"max_step_tokens": 0}):
        before = sched.config
        with pytest.raises(ConfigError, match=list(wrong)[-1]):
            sched.set_limits(**wrong)
        assert sched.config == before
