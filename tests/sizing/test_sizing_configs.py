"""Bytes per token and per request of public models, from the fields of their config.json (tests/sizing/configs/).

The right values are those of the issue, or worked out here from the fields: layers x 2 x heads x width x bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.amounts import GIB
from kvsched.sizing.costs import LayerCosts, Widths
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.dtypes import dtype
from kvsched.sizing.geometry import Model, cell_bytes
from kvsched.sizing.reading import read_model
from kvsched.sizing.report import Report
from kvsched.sizing.sized import size

CONFIGS = Path(__file__).parent / "configs"


def raw(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def model(name: str) -> Model:
    return read_model(raw(name))


def widths(kv: str = "bfloat16", state: str = "bfloat16") -> Widths:
    return Widths(kv=dtype(kv), state=dtype(state), conv=dtype("bfloat16"))


def sized(name: str, budget: int, **changes: Any) -> Report:
    pp = changes.get("pp", 1)
    given: dict[str, Any] = {
        "widths": widths(), "budgets": (budget,) * pp, "items": ((Item("weights", 16 * GIB, Provenance.MEASURED),),) * pp, **changes,
    }
    return size(model(name), Deployment(**given))


@pytest.mark.parametrize(("name", "kv", "tp", "expected"), [
    ("llama-3-8b", "bfloat16", 1, 131_072), ("llama-3-8b", "fp8", 1, 65_536), ("llama-3-8b", "bfloat16", 8, 16_384),
    ("llama-3-8b", "bfloat16", 16, 16_384), ("llama-3-8b", "float32", 2, 131_072),
    ("llama-3-70b", "bfloat16", 1, 327_680), ("llama-3-70b", "bfloat16", 8, 40_960),
    ("qwen3-32b", "bfloat16", 1, 262_144), ("qwen3-32b", "bfloat16", 4, 65_536), ("qwen3-32b", "fp8", 4, 32_768), ("qwen3-32b", "bfloat16", 32, 32_768),
    ("deepseek-v3", "bfloat16", 1, 70_272), ("deepseek-v3", "bfloat16", 8, 70_272), ("deepseek-v3", "bfloat16", 128, 70_272),
    ("deepseek-v3", "fp8", 16, 35_136),
    ("mixtral-8x7b", "bfloat16", 1, 131_072), ("mixtral-8x7b", "bfloat16", 2, 65_536),
    ("gemma-2-9b", "bfloat16", 1, 42 * 2 * 8 * 256 * 2), ("gemma-2-9b", "bfloat16", 2, 42 * 2 * 4 * 256 * 2),
    ("gemma-3-27b-it", "bfloat16", 1, 62 * 2 * 16 * 128 * 2), ("gemma-3-4b-it", "bfloat16", 1, 34 * 2 * 4 * 256 * 2),
    ("bamba-9b", "bfloat16", 1, 3 * 2 * 8 * 128 * 2), ("qwen3-next-80b-a3b", "bfloat16", 1, 12 * 2 * 2 * 256 * 2),
    ("qwen3-next-80b-a3b", "bfloat16", 4, 12 * 2 * 1 * 256 * 2), ("qwen3.5-27b", "fp8", 1, 16 * 2048),
    ("llava-1.5-7b", "float16", 1, 32 * 2 * 32 * 128 * 2), ("llama-3.2-11b-vision", "bfloat16", 1, 32 * 2 * 8 * 128 * 2),
    ("gpt-oss-20b", "bfloat16", 1, 24 * 2 * 8 * 64 * 2), ("qwen2.5-vl-7b", "bfloat16", 1, 28 * 2 * 4 * 128 * 2),
    ("whisper-large-v3", "float16", 1, 32 * 2 * 20 * 64 * 2), ("mistral-7b-v0.1", "bfloat16", 1, 131_072),
    ("eagle-llama-3-8b", "bfloat16", 1, 4096),
])
def test_bytes_per_token_per_rank(name: str, kv: str, tp: int, expected: int) -> None:
    one = model(name)
    one.check_tp(tp)
    assert cell_bytes(one.attentions, dtype(kv), tp) == expected
    assert LayerCosts(one, widths(kv), tp).all().token == expected


def test_every_config_is_read() -> None:
    for path in CONFIGS.glob("*.json"):
        assert read_model(json.loads(path.read_text(encoding="utf-8"))).attentions, path.name


@pytest.mark.parametrize(("name", "tp", "per_layer", "layers"), [
    ("bamba-9b", 1, 128 * 64 * 128 * 2 + (8192 + 2 * 128) * 3 * 2, 29), ("bamba-9b", 4, 32 * 64 * 128 * 2 + (2048 + 2 * 128) * 3 * 2, 29),
    ("qwen3-next-80b-a3b", 1, 32 * 128 * 128 * 2 + 8192 * 3 * 2, 36), ("qwen3-next-80b-a3b", 4, 8 * 128 * 128 * 2 + 2048 * 3 * 2, 36),
    ("qwen3.5-27b", 1, 48 * 128 * 128 * 2 + 10_240 * 3 * 2, 48),
])
def test_state_bytes_per_request(name: str, tp: int, per_layer: int, layers: int) -> None:
    found = sized(name, 80 * GIB, tp=tp)
    assert found.state_bytes_per_request == per_layer * layers
    assert found.as_dict()["state_bytes_per_request"] == per_layer * layers


def test_the_kv_type_is_not_that_of_the_state() -> None:
    """Reading the state as fp8 because the KV cache is would halve what requests keep."""
    fp8 = sized("qwen3-next-80b-a3b", 80 * GIB, widths=widths("fp8"))
    assert fp8.state_bytes_per_request == 39_518_208
    assert fp8.token_bytes == 12_288
    assert sized("qwen3-next-80b-a3b", 80 * GIB, widths=widths("fp8", "float32")).state_bytes_per_request == 36 * (2_097_152 + 49_152)


def test_a_config_may_state_the_type_of_its_states() -> None:
    assert model("qwen3.5-27b").state_dtype == dtype("float32")
    assert model("qwen3-next-80b-a3b").state_dtype is None


def test_windows_alternate_with_full_attention() -> None:
    one = model("gemma-2-9b")
    windows = [attention.window for attention in one.attentions]
    assert windows == [4096, None] * 21
    full = LayerCosts(one, widths(), recycled=True).all()
    assert (full.token, full.windows) == (21 * 8192, {4096: 21 * 8192})
    assert [model("gemma-3-27b-it").attentions[layer].window for layer in (4, 5, 6, 61)] == [1024, None, 1024, 1024]


def test_windows_are_charged_for_every_token_unless_the_host_recycles() -> None:
    """One pool: a token costs all 42 layers. Pools of their own: 21 layers, and so much per request that does not grow."""
    plain = sized("gemma-2-9b", 80 * GIB)
    assert (plain.token_bytes, plain.tokens) == (344_064, 64 * GIB // (344_064 * 16) * 16)
    assert plain.binding.own.constants.windows == 0
    assert any("21 of 42 attention layers look back only 4,096 tokens" in line for line in plain.warnings)
    own = sized("gemma-2-9b", 80 * GIB, recycle_interval=16, max_running=32, step_tokens=8192)
    per_request = (4096 + 16 + 2 * 16) * 21 * 8192
    assert (own.token_bytes, own.binding.own.constants.windows) == (172_032, per_request)
    left = 64 * GIB - 32 * per_request - 8192 * 172_032
    assert own.tokens == left // (172_032 * 16) * 16
    assert own.requests_at(8191).requests == min(32, own.pages // 512)


def test_windows_without_full_layers_are_one_pool() -> None:
    own = sized("mistral-7b-v0.1", 80 * GIB, recycle_interval=16)
    assert (own.token_bytes, own.binding.own.constants.windows) == (131_072, 0)
    assert any("no layer keeps everything, so one pool holds all tokens" in line for line in own.warnings)


def test_cross_attention_is_kept_once_per_request() -> None:
    one = model("llama-3.2-11b-vision")
    assert one.cross_tokens == 4 * ((560 // 14) ** 2 + 1) == 6404
    found = sized("llama-3.2-11b-vision", 80 * GIB, max_running=8)
    assert found.binding.own.constants.cross == 6404 * 8 * 4096
    assert next(item.bytes for item in found.binding.account.items if item.name == "cross") == 8 * 6404 * 8 * 4096
    assert found.tokens == (64 * GIB - 8 * 6404 * 8 * 4096) // (131_072 * 16) * 16
    assert found.requests_at(16).requests == 8
    assert model("whisper-large-v3").cross_tokens == 1500


def test_a_draft_model_has_slots_beside_those_of_the_target() -> None:
    """Case C67: every slot carries the draft's cell too, so that the draft pool is never smaller than the target's."""
    with_draft = sized("llama-3-8b", 80 * GIB, draft=model("eagle-llama-3-8b"))
    assert with_draft.token_bytes == 131_072 + 4096
    assert with_draft.tokens == 64 * GIB // (135_168 * 16) * 16
    mtp = sized("deepseek-v3", 80 * GIB, extra_layers=1)
    assert mtp.token_bytes == 70_272 + 1152
    halves = sized("llama-3-8b", 80 * GIB, draft=model("eagle-llama-3-8b"), pp=2)
    assert [stage.own.token_bytes for stage in halves.stages] == [65_536, 65_536 + 4096]
    assert halves.pool.binding == 1
    with pytest.raises(ConfigError, match="draft model has recurrent layers"):
        sized("llama-3-8b", 80 * GIB, draft=model("bamba-9b"))


@pytest.mark.parametrize(("name", "context"), [
    ("llama-3-8b", 8192), ("llama-3.1-8b", 131_072), ("qwen3-32b", 40_960), ("deepseek-v3", 163_840), ("gpt-oss-20b", 131_072),
    ("gemma-3-27b-it", 131_072), ("whisper-large-v3", 448),
])
def test_the_trained_length_is_read(name: str, context: int) -> None:
    assert model(name).context == context


def test_yarn_stretches_the_trained_length() -> None:
    stretched = {**raw("qwen3-32b"), "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}
    assert read_model(stretched).context == 131_072


def test_only_an_explicit_cap_clips_the_trained_length() -> None:
    assert sized("llama-3.1-8b", 80 * GIB).max_servable_tokens == 131_071
    assert sized("llama-3.1-8b", 80 * GIB, context_limit=4096).max_servable_tokens == 4095
    assert sized("llama-3.1-8b", 80 * GIB, context_limit=1_000_000).max_servable_tokens == 131_071
    small = sized("llama-3.1-8b", 18 * GIB)
    assert small.max_servable_tokens == small.tokens == 2 * GIB // 131_072


def test_c62_ten_gib_of_latent_vectors() -> None:
    for tp in (1, 8):
        found = size(model("deepseek-v3"), Deployment(widths=widths(), page_size=64, tp=tp, kv_bytes=(10 * GIB,)))
        assert (10 * GIB // 70_272, found.pages, found.tokens) == (152_797, 2387, 152_768)


def test_types_in_the_config() -> None:
    assert model("llama-3-8b").dtype == dtype("bfloat16")
    assert model("qwen3.5-27b").dtype == dtype("bfloat16")
    assert model("gpt-oss-20b").dtype is None
    assert model("gpt-oss-20b").dtype_note == "config.json has no torch_dtype"
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        quantised = read_model({**raw("llama-3-8b"), "quantization_config": {key: {"num_bits": 8}}})
        assert quantised.dtype is None
        assert key in quantised.dtype_note
    differing = read_model({**raw("llava-1.5-7b"), "torch_dtype": "float32"})
    assert (differing.dtype, "several types" in differing.dtype_note) == (None, True)


def test_defaults_of_a_nested_text_part_are_noted() -> None:
    (note,) = model("gemma-3-4b-it").notes
    assert note.startswith("text_config leaves out what gemma3_text has by default: num_attention_heads 8")
    assert model("gemma-3-4b-it").context == 131_072
    assert model("llama-3-8b").notes == ()


BAD = {
    "no object": ([], "config.json must be an object, not list"),
    "no type": ({}, r"config.json: model_type None, is none that can be sized; allowed: .*llama.*qwen3"),
    "an unknown type": ({"model_type": "lama"}, "model_type 'lama', which is near llama, mllama, .*, is none that can be sized; allowed:"),
    "no layers": ({"model_type": "llama", "num_attention_heads": 4}, "config.json has no num_hidden_layers, which must be an integer of at least 1"),
    "layers in words": ({**raw("llama-3-8b"), "num_hidden_layers": "32"}, "num_hidden_layers must be an integer of at least 1, not '32'"),
    "no heads": ({**raw("llama-3-8b"), "num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, not 0"),
    "layers beyond reason": ({**raw("llama-3-8b"), "num_hidden_layers": 10**6}, "num_hidden_layers must be at most 10000, not 1000000"),
    "heads beyond reason": ({**raw("llama-3-8b"), "num_attention_heads": 10**12}, "num_attention_heads must be at most 2147483647"),
    "half a head": ({**raw("llama-3-8b"), "num_key_value_heads": 7.5}, "num_key_value_heads must be an integer of at least 1, not 7.5"),
    "no head of a mixture": (
        {k: v for k, v in raw("mixtral-8x7b").items() if k != "num_key_value_heads"}, "config.json has no num_key_value_heads"),
    "a width that is no multiple": ({**raw("llama-3-8b"), "hidden_size": 4097}, "hidden_size = 4097 is no multiple of 32 heads"),
    "a head without its width": ({k: v for k, v in raw("qwen3-32b").items() if k != "head_dim"}, "config.json has no head_dim"),
    "no latent": ({k: v for k, v in raw("deepseek-v3").items() if k != "kv_lora_rank"}, "config.json has no kv_lora_rank"),
    "an unknown dtype": ({**raw("llama-3-8b"), "torch_dtype": "auto"}, "config.json: torch_dtype must be one of float32, .*, not 'auto'"),
    "an unknown kind of layer": (
        {**raw("gpt-oss-20b"), "layer_types": ["magic"] * 24}, "layer_types may hold full_attention, .*, not 'magic'"),
    "layers that are not counted": (
        {**raw("gpt-oss-20b"), "layer_types": ["full_attention"]}, "layer_types must be of 24 layers, not of 1"),
    "a window without a size": (
        {k: v for k, v in raw("gpt-oss-20b").items() if k != "sliding_window"}, "config.json has no sliding_window"),
    "layers beyond the last": ({**raw("bamba-9b"), "attn_layer_indices": [32]}, "attn_layer_indices must be a list of integers from 0 to 31"),
    "heads that do not make the width": ({**raw("bamba-9b"), "mamba_d_head": 32}, "head dim = 128 x 32 must be the inner width, 8192"),
    "only recurrent layers": ({**raw("bamba-9b"), "attn_layer_indices": []}, "describes no attention layer, so there is no token pool"),
    "recurrent layers of a type without them": (
        {**raw("llama-3-8b"), "layer_types": ["linear_attention"] * 32}, "layer 0 is recurrent, and this model type has no recurrent layers"),
    "positions stretched by nothing": (
        {**raw("qwen3-32b"), "rope_scaling": {"type": "yarn", "factor": float("nan")}}, r"rope_scaling\.factor must be a number from 1 to 10000, not nan"),
    "no text part": ({"model_type": "gemma3"}, "text_config must be an object: model type 'gemma3' keeps the text part there"),
    "an unknown text part": (
        {"model_type": "internvl_chat", "llm_config": {"model_type": "x"}}, r"config.json: llm_config.model_type 'x', is none that can be sized"),
    "a nested key": (
        {**raw("gemma-3-27b-it"), "text_config": {**raw("gemma-3-27b-it")["text_config"], "head_dim": -1}},
        "text_config.head_dim must be an integer of at least 1, not -1"),
    "a convolution of one": ({**raw("qwen3-next-80b-a3b"), "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2, not 1"),
    "a state of an unknown type": (
        {**raw("bamba-9b"), "mamba_ssm_cache_dtype": "auto"}, "config.json: mamba_ssm_cache_dtype must be one of float32, .*, not 'auto'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_raise_with_the_key_and_what_is_allowed(name: str) -> None:
    config, match = BAD[name]
    with pytest.raises(ConfigError, match=match) as info:
        read_model(config)
    assert "\n" not in str(info.value)


def test_a_class_name_stands_in_for_an_unknown_type() -> None:
    assert read_model({**raw("llama-3-8b"), "model_type": "my_llama"}).model_type == "llama"
