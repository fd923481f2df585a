"""What vLLM was started with becomes kvsched's configuration; what the adapter does not do is refused by name, all of it at once."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make test-hosts")

import torch
from rig import configure, layout, make_scheduler, ours
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvsched.errors import ConfigError
from kvsched.hosts.vllm import KvschedScheduler
from kvsched.hosts.vllm.settings import ELSEWHERE, OWN_KEYS, SCHEDULER_KEYS, settings


def read(config: Any, environ: dict[str, str] | None = None, size: int = 16) -> Any:
    return settings(config, layout(100, size), size, size, environ or {})


def test_vllms_options_reach_kvsched(model: Path) -> None:
    config = configure(model, blocks=100, seqs=12, budget=96, longest=700, long_prefill_token_threshold=50, scheduling_policy="priority")
    scheduler = ours(config)
    now = scheduler.core.config
    assert (now.page_size, now.max_running, now.max_step_tokens, now.context_limit) == (16, 12, 96, 700)
    assert (now.long_prefill_tokens, now.order, now.max_in_flight, now.exchange_pages) == (50, "priority", 1, False)
    assert scheduler.core.ceiling == 99, "block 0 is vLLM's null block"
    assert ours(configure(model, blocks=100, asynchronous=True)).core.config.max_in_flight == 2


def test_lower_limits_of_the_scheduler_win(model: Path) -> None:
    config = configure(model, blocks=100, seqs=12, budget=96)
    config.scheduler_config.max_num_active_seqs = 5
    config.scheduler_config.max_num_scheduled_tokens = 40
    now = read(config).scheduler
    assert (now.max_running, now.max_step_tokens) == (5, 40)


def test_no_chunked_prefill_computes_prompts_whole(model: Path) -> None:
    config = configure(model, blocks=100, budget=1024, longest=700, enable_chunked_prefill=False)
    assert read(config).scheduler.max_partial_prefills == 0
    config.additional_config = {"kvsched": {"max_partial_prefills": 2}}
    with pytest.raises(ConfigError, match="max_partial_prefills is 2, and vLLM was started with --no-enable-chunked-prefill"):
        read(config)


def test_settings_come_from_the_additional_config_and_from_the_environment(model: Path) -> None:
    config = configure(model, blocks=100, additional_config={"kvsched": {"admission": "guaranteed", "head": "skip", "eviction": "slru"}})
    found = read(config, {"KVSCHED_VLLM_MAX_BYPASS": "3", "KVSCHED_VLLM_HOLD_SHARED_PREFILL": "1", "KVSCHED_VLLM_HEAD": "skip",
                          "KVSCHED_VLLM_CONSERVATIVENESS": "0.5", "KVSCHED_VLLM_PREFILL_GRANT": "none", "PATH": "/bin"})
    now = found.scheduler
    assert (now.admission, now.head, now.max_bypass, now.hold_shared_prefill) == ("guaranteed", "skip", 3, True)
    assert (now.conservativeness, now.prefill_grant, found.eviction, found.refusals) == (0.5, None, "slru", "length")


@pytest.mark.parametrize(("section", "environ", "message"), [
    ({"heads": "skip"}, {}, "heads is no setting of kvsched inside vLLM; allowed are admission, aging_tokens"),
    ({"head": "skip"}, {"KVSCHED_VLLM_HEAD": "strict"}, "head is 'skip' in additional_config and 'strict' in KVSCHED_VLLM_HEAD"),
    ({}, {"KVSCHED_VLLM_MAX_BYPASS": "many"}, "max_bypass must be an integer, not 'many'"),
    ({}, {"KVSCHED_VLLM_CONSERVATIVENESS": "x"}, "conservativeness must be a number, not 'x'"),
    ({}, {"KVSCHED_VLLM_PREEMPT_PRIORITY": "perhaps"}, "preempt_priority must be 0, 1, false or true, not 'perhaps'"),
    ({"head": "other"}, {}, "head must be one of strict, backfill, skip, not 'other'"),
    ({"refusals": "shrug"}, {}, "refusals must be one of length, error, not 'shrug'"),
    ({"order": "fair"}, {}, "order cannot be 'fair': vLLM's requests carry no tenant"),
    *[({key: 1}, {}, f"{key} cannot be set for kvsched inside vLLM: {why}") for key, why in ELSEWHERE.items()],
])
def test_a_wrong_setting_is_named(model: Path, section: dict[str, Any], environ: dict[str, str], message: str) -> None:
    config = configure(model, blocks=100, additional_config={"kvsched": section})
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(config, environ)


def test_every_key_of_kvsched_is_accounted_for() -> None:
    from kvsched import SchedulerConfig

    keys = {field.name for field in attrs.fields(SchedulerConfig)}
    assert keys == SCHEDULER_KEYS | ELSEWHERE.keys()
    assert not keys & OWN_KEYS


def test_an_order_that_contradicts_vllms_policy(model: Path) -> None:
    config = configure(model, blocks=100, scheduling_policy="priority", additional_config={"kvsched": {"order": "lpm"}})
    with pytest.raises(ConfigError, match="order is 'lpm', and vLLM was started with --scheduling-policy priority"):
        read(config)


SWITCHES: dict[str, tuple[str, str, Any]] = {
    "the pooling runner": ("model_config", "runner_type", "pooling"),
    "speculative decoding": ("", "speculative_config", SimpleNamespace()),
    "KV connectors": ("", "kv_transfer_config", SimpleNamespace()),
    "encoder-cache connectors": ("", "ec_transfer_config", SimpleNamespace()),
    "auxiliary outputs": ("", "aux_output_config", SimpleNamespace(enabled=True)),
    "pipeline parallelism": ("parallel_config", "pipeline_parallel_size", 2),
    "context parallelism": ("parallel_config", "decode_context_parallel_size", 2),
    "prompt embeddings": ("model_config", "enable_prompt_embeds", True),
    "adaptive thresholds": ("scheduler_config", "long_prefill_token_threshold_adaptive", True),
    "a watermark": ("scheduler_config", "watermark", 0.1),
    "admission by the first chunk alone": ("scheduler_config", "scheduler_reserve_full_isl", False),
    "block residency metrics": ("observability_config", "kv_cache_metrics", True),
}
PROPERTIES = {
    "encoder-decoder models": (ModelConfig, "is_encoder_decoder"),
    "diffusion language models": (ModelConfig, "is_diffusion"),
    "multimodal inputs": (ModelConfig, "supports_multimodal_inputs"),
    "instances that only encode": (VllmConfig, "is_mm_encoder_only"),
}


def switch(config: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PROPERTIES:
        kind, attribute = PROPERTIES[name]
        monkeypatch.setattr(kind, attribute, property(lambda _: True))
        return
    owner, attribute, value = SWITCHES[name]
    setattr(getattr(config, owner) if owner else config, attribute, value)


@pytest.mark.parametrize("name", [*SWITCHES, *PROPERTIES])
def test_what_is_not_done_is_refused_by_name(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, blocks=100)
    switch(config, name, monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(f"kvsched does not do this inside vLLM: {name}")):
        read(config)


def test_all_of_it_is_named_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, blocks=100)
    for name in (*SWITCHES, *PROPERTIES):
        switch(config, name, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        make_scheduler(KvschedScheduler, config)
    assert [name for name in (*SWITCHES, *PROPERTIES) if name not in str(caught.value)] == []


def test_other_layouts_of_the_cache_are_refused_by_name(model: Path) -> None:
    config = configure(model, blocks=100)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64)
    for groups, kinds in (([window], "SlidingWindowSpec"), ([], "none"), ([layout(100, 16).kv_cache_groups[0].kv_cache_spec, window], "FullAttentionSpec + SlidingWindowSpec")):
        cache = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec) for spec in groups])
        with pytest.raises(ConfigError, match=re.escape(f"KV caches of the kind {kinds} (one group of")):
            settings(config, cache, 16, 16, {})
    with pytest.raises(ConfigError, match="different block sizes"):
        settings(config, layout(100, 16), 16, 8, {})
