"""Settings: every key is checked when the record is made, and the command line reads flags and the environment."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvsched import SchedulerConfig
from kvsched.errors import ConfigError
from reference_server.settings import Settings

BAD: dict[str, tuple[Any, ...]] = {
    "host": ("", "  ", None, 1),
    "port": (-1, 65536, "8000", 80.0, True, None),
    "model": (None, 3, "  "),
    "dtype": ("auto", "fp8", "", None),
    "device": ("gpu", "cuda:", "cuda:x", "CPU", "", None, 0),
    "page_size": (0, -16, 1.5, "16", True, None, 2**31),
    "pool_tokens": (0, 15, None, 2**31),
    "max_running": (0, None, "many"),
    "chunk_tokens": (0, None, 0.5),
    "max_step_tokens": (0, None),
    "context_limit": (0, -1, "none", False),
    "max_queued_requests": (0, None),
    "max_queued_tokens": (0, None),
    "max_in_flight": (0, 3, None, True),
    "order": ("lifo", "", None, 1),
    "head": ("loose", None),
    "admission": ("hopeful", None),
    "prefix_cache": (1, "yes", None),
    "stall_steps": (0, None),
    "max_body_bytes": (0, None, 1e6),
    "step_deadline_s": (0, -1, float("inf"), float("nan"), "1", True, None),
    "drain_s": (-0.1, float("inf"), "1", None),
    "threads": (0, 2000, 1.0, True),
}


def test_every_key_has_a_bad_value_here() -> None:
    assert set(BAD) == {field.name for field in attrs.fields(Settings)}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} must be .*, not "):
        Settings(**{key: value})


def test_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'pool'"):
        Settings(pool=1)  # type: ignore[call-arg]  # this is the mistake


def test_settings_do_not_change() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]  # this is the mistake


def test_a_pool_holds_whole_pages_and_at_least_one() -> None:
    assert Settings(page_size=16, pool_tokens=100).pages == 6
    assert Settings(page_size=16, pool_tokens=16).pages == 1
    with pytest.raises(ConfigError, match="pool_tokens must be at least page_size = 64, not 63"):
        Settings(page_size=64, pool_tokens=63)


def test_what_the_scheduler_is_told_is_what_it_knows() -> None:
    shared = {"page_size", "max_running", "chunk_tokens", "max_step_tokens", "context_limit", "max_queued_requests",
              "max_queued_tokens", "max_in_flight", "order", "head", "admission", "stall_steps"}
    settings = Settings()
    config = SchedulerConfig(**{key: getattr(settings, key) for key in shared})
    assert config.max_in_flight == 2
