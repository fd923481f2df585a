"""The installed vLLM against what the adapter relies on; and that the guard would see a change."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make test-hosts")

from rig import configure, ours
from vllm.v1.core.sched import interface, output
from vllm.v1.request import Request

from kvsched.errors import ConfigError
from kvsched.hosts.drift import differences
from kvsched.hosts.vllm import KvschedScheduler
from kvsched.hosts.vllm.contract import ABSTRACT, CONTRACT, ENGINE_READS


def test_vllm_is_what_the_adapter_was_written_for() -> None:
    found = differences(CONTRACT)
    assert not found, "\n" + "\n".join(found)


def test_the_adapter_has_everything_that_the_engine_reads(model: Path) -> None:
    scheduler = ours(configure(model, blocks=100))
    assert [name for name in sorted(ENGINE_READS | ABSTRACT) if not hasattr(scheduler, name)] == []
    assert KvschedScheduler.__abstractmethods__ == frozenset()


def test_planted_changes_are_all_named_and_stop_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, blocks=100)

    def schedule(self, throttle_prefills=False, budget=None): ...  # type: ignore[no-untyped-def]  # a foreign signature

    def take_events(self): ...  # type: ignore[no-untyped-def]  # another one

    monkeypatch.setattr(interface.SchedulerInterface, "schedule", schedule)
    monkeypatch.delattr(Request, "take_events")
    monkeypatch.setattr(Request, "take_notes", take_events, raising=False)
    monkeypatch.setattr(output, "CachedRequestData", attrs.make_class("CachedRequestData", ["req_ids"]))
    monkeypatch.delattr(output, "NewRequestData")
    with pytest.raises(ConfigError) as caught:
        ours(config)
    text = str(caught.value)
    assert "SchedulerInterface.schedule: takes (self, throttle_prefills=False, budget=None) and not (self, throttle_prefills=False)" in text
    assert "vllm.v1.request.Request: has no take_events" in text
    assert "vllm.v1.core.sched.output.NewRequestData: is gone" in text
    assert "vllm.v1.core.sched.output.CachedRequestData: is no record with fields" in text
