"""The tables of model types against transformers: what a tiny model's cache really holds, and what absent keys stand for.

A model of each type is built with random weights and run on a few tokens; its cache is then counted. Types whose latent vectors
transformers stores expanded to heads are left out of that, and types that it does not have; each says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.attention import ATTENTIONS
from kvsched.sizing.dtypes import dtype
from kvsched.sizing.families import ARCHITECTURES, FAMILIES, WRAPPERS
from kvsched.sizing.geometry import cell_bytes
from kvsched.sizing.placement import PLACEMENTS
from kvsched.sizing.reading import read_model
from kvsched.sizing.recurrent import RECURRENTS

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = 6
BASE: dict[str, Any] = {
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 128, "sliding_window": 100, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_chunk_size": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
GPT = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 64}
NO_HEAD_DIM = {**BASE, "head_dim": None}
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2, 5], **MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4, "shared_intermediate_size": 32, **MAMBA},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 96, "mamba_n_heads": 6},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 32, "chunk_size": 8},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-MM*-E", "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    "lfm2": {"full_attn_idxs": [2, 5], "head_dim": None}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4}, "minimax": {"head_dim": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "num_hidden_layers": 10, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64},
    "gemma4_text": {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16},
    "llama4_text": {"attention_chunk_size": 100, "intermediate_size_mlp": 64}, "mimo_v2_flash": {"v_head_dim": 8},
    "falcon": {"multi_query": True, "head_dim": None}, "qwen2": {"use_sliding_window": True, "max_window_layers": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64}, "dots1": {"n_shared_experts": 1, "routed_scaling_factor": 1.0},
}
INSTEAD: dict[str, dict[str, Any]] = {
    "gpt2": GPT, "gpt_bigcode": {**GPT, "multi_query": True}, "gptj": {**GPT, "rotary_dim": 8},
    "bloom": {"n_layer": 4, "n_head": 4, "hidden_size": 64, "vocab_size": 64},
    "mpt": {"n_layers": 4, "n_heads": 4, "d_model": 64, "vocab_size": 64},
    "whisper": {
        "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 64,
        "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "max_source_positions": 10, "max_target_positions": 32, "num_mel_bins": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "bart": {
        "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 64,
        "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        "forced_eos_token_id": 2},
    "t5": {
        "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 24, "d_model": 64, "d_ff": 64, "vocab_size": 64,
        "decoder_start_token_id": 0},
}
"""Settings of types whose keys are others."""
ABSENT = {"baichuan", "chatglm", "deepseek", "internlm2", "kimi_k2", "minimax_text_01", "minimax_m1"}
"""Types of files that bring their own code: transformers does not have them."""
EXPANDED = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "youtu"}
"""transformers keeps keys and values of every head where a server keeps the latent vector."""
WITHIN = {"qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_5", "qwen3_5_moe", "mllama_text_model"}
"""Text parts that transformers builds only within their wrapper, or with positions in three parts; their keys are those of a sibling."""
DIFFERENT = {"dbrx"}
"""Its configuration class of this release cannot be built from a dictionary."""
COUNTED = sorted(set(FAMILIES) - ABSENT - EXPANDED - WITHIN - DIFFERENT)
QUICK = {
    "llama", "gemma2", "gemma3n_text", "gemma4_text", "mimo_v2_flash", "falcon", "qwen2", "bamba", "falcon_h1", "zamba2", "nemotron_h", "jamba",
    "qwen3_next", "lfm2", "minimax", "whisper",
}
"""Types whose readings between them are most of all there are; the others are left to `make soak`."""


def build(name: str) -> tuple[dict[str, Any], Any]:
    """The config.json of a tiny model of this type, and the model."""
    settings = INSTEAD[name] if name in INSTEAD else {**BASE, **EXTRA.get(name, {})}
    config = transformers.CONFIG_MAPPING[name](**{key: value for key, value in settings.items() if value is not None})
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key in ("hybrid_override_pattern", "linear_attn_config"):
        if key in settings:
            raw[key] = settings[key]
    raw["torch_dtype"] = raw["dtype"] = "float32"
    for kind in (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq, transformers.AutoModelForCausalLM):
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                parameters = sum(one.numel() for one in kind.from_config(config).parameters())
            assert parameters < 5_000_000, "a setting is missing: that model is not tiny"
            return raw, kind.from_config(config).eval()
    return raw, transformers.AutoModel.from_config(config).eval()


def held(layer: Any) -> tuple[int, int, int]:
    """Elements of (keys and values, recurrent states, convolutions) in a layer of a cache."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    tokens = keys.numel() + values.numel() if keys is not None and values is not None else 0
    states = [
        sum(one.numel() for one in (getattr(layer, name, None) or {}).values() if one is not None) for name in ("recurrent_states", "conv_states")
    ]
    return tokens, states[0], states[1]


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.soak) for one in COUNTED])
def test_a_cache_holds_what_the_reading_says(name: str) -> None:
    torch.set_num_threads(1)
    raw, tiny = build(name)
    read = read_model(raw)
    own, crossing = torch.ones(1, TOKENS, dtype=torch.long), 0
    with torch.no_grad():
        if name == "whisper":
            crossing = 10
            out = tiny(input_features=torch.zeros(1, 8, 20), decoder_input_ids=own, use_cache=True)
        elif name in {"bart", "t5"}:
            crossing = 9
            out = tiny(input_ids=torch.ones(1, crossing, dtype=torch.long), decoder_input_ids=own, use_cache=True)
        else:
            out = tiny(own, use_cache=True)
    cache = out.past_key_values
    main = cache.self_attention_cache if crossing else cache
    tokens, states, convolutions = (sum(column) for column in zip(*map(held, main.layers), strict=True))
    states += sum(one.numel() for one in getattr(main, "linear_cache", []) if torch.is_tensor(one))
    f32 = dtype("float32")
    assert cell_bytes(read.attentions, f32) // 4 * TOKENS == tokens
    assert sum(part.state_elements() for part in read.recurrents) == states
    channels = [(part.conv_channels(), part.taps) for part in read.recurrents]
    # a server keeps the past of the convolution; some models here keep the present position besides
    assert convolutions in {sum(n * taps for n, taps in channels), sum(n * (taps + 1) for n, taps in channels if taps)}
    if crossing:
        assert cell_bytes(read.crosses, f32) // 4 * crossing == sum(held(layer)[0] for layer in cache.cross_attention_cache.layers)


def test_every_type_is_counted_or_says_why_not() -> None:
    assert set(FAMILIES) >= ABSENT | EXPANDED | WITHIN | DIFFERENT
    known = set(transformers.CONFIG_MAPPING.keys())
    assert sorted(set(FAMILIES) - known) == sorted(ABSENT)
    assert set(WRAPPERS) - known <= {"internvl_chat", "deepseek_vl_v2", "kimi_vl"}
    assert set(QUICK) <= set(COUNTED)


def test_the_tables_name_readings_that_there_are() -> None:
    for name, family in FAMILIES.items():
        assert family.attention in ATTENTIONS, name
        assert family.placement in PLACEMENTS, name
        assert not family.recurrent or family.recurrent in RECURRENTS, name
        assert family.cross in {"", "tiles", "source", "stated"}, name
    assert {wrapper.inner for wrapper in WRAPPERS.values()} <= {*FAMILIES, ""}
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)
    used = {family.attention for family in FAMILIES.values()}, {family.recurrent for family in FAMILIES.values()} - {""}
    assert used == (set(ATTENTIONS), set(RECURRENTS))
    assert {family.placement for family in FAMILIES.values()} == set(PLACEMENTS)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.defaults])
def test_what_absent_keys_stand_for(name: str) -> None:
    """The defaults of the tables are those of the configuration class."""
    config = transformers.CONFIG_MAPPING[name]()
    for key, value in FAMILIES[name].defaults.items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", sorted(set(WRAPPERS) & set(transformers.CONFIG_MAPPING.keys())))
def test_a_wrapper_keeps_its_text_part_where_the_table_says(name: str) -> None:
    config = transformers.CONFIG_MAPPING[name]()
    raw = json.loads(config.to_json_string(use_diff=False))
    wrapper = WRAPPERS[name]
    assert wrapper.key in raw
    if wrapper.inner and wrapper.inner in transformers.CONFIG_MAPPING:
        assert raw[wrapper.key]["model_type"] == wrapper.inner


def test_a_wrapper_of_a_text_part_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_config\.model_type 'rwkv', is none that can be sized"):
        read_model({"model_type": "llava_next", "text_config": {"model_type": "rwkv"}})
    with pytest.raises(ConfigError, match=r"text_config\.model_type 'rwkv', is none"):
        read_model({"model_type": "llava", "text_config": {"model_type": "rwkv"}})


def test_a_text_part_that_names_no_type_of_its_own() -> None:
    for named in ({}, {"model_type": "mllama"}):
        assert read_model({"model_type": "mllama", "text_config": named, "torch_dtype": "bfloat16"}).model_type == "mllama_text_model"
