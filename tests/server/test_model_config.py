"""Reading a config.json: both spellings, the defaults of transformers, and everything that is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import peers
import pytest

from reference_server.model import ModelConfig, ModelError, Rope, tiny

SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}


def raw(name: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    found = {"architectures": [name], **SMALL, **changes}
    return {key: value for key, value in found.items() if value != "absent"}


def test_a_llama() -> None:
    assert ModelConfig.from_hf(raw()) == ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=100, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2,
        head_dim=16, rms_norm_eps=1e-5, context_length=512, rope=Rope(theta=10_000.0),
    )


def test_what_each_architecture_adds() -> None:
    qwen2 = ModelConfig.from_hf(raw("Qwen2ForCausalLM", attention_bias=False))  # a key that it does not read
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = ModelConfig.from_hf(raw("Qwen3ForCausalLM", attention_bias=True))
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)
    llama = ModelConfig.from_hf(raw(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24))
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias, llama.tie_embeddings, llama.head_dim) == (True, True, True, True, 24)
    mistral = ModelConfig.from_hf(raw("MistralForCausalLM", sliding_window=None, attention_bias=True))
    assert (mistral.attention_bias, mistral.output_bias) == (False, False)


@pytest.mark.parametrize("changes", [
    {}, {"tie_embeddings": True}, {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    {"rope": Rope(theta=500_000.0, kind="llama3", factor=8.0, original_context=128)}, {"rope": Rope(kind="linear", factor=4.0)},
    {"architecture": "Qwen2ForCausalLM", "attention_bias": True}, {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
    {"architecture": "MistralForCausalLM", "head_dim": 8},
])
def test_what_transformers_writes_is_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    config = attrs.evolve(tiny().config, **changes)
    peers.hf_config(config).save_pretrained(tmp_path)
    assert ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text())) == config


def test_rope_in_the_old_and_in_the_new_spelling() -> None:
    assert ModelConfig.from_hf(raw(rope_theta=500_000)).rope == Rope(theta=500_000.0)
    assert ModelConfig.from_hf(raw(rope_theta=5e5, rope_scaling=None, rope_parameters=None)).rope == Rope(theta=500_000.0)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    wanted = Rope(theta=500.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256)
    old: dict[str, Any] = {"rope_theta": 500, "rope_scaling": {"rope_type": "llama3", **llama3}}
    new: dict[str, Any] = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500, **llama3}}
    assert ModelConfig.from_hf(raw(**old)).rope == wanted
    assert ModelConfig.from_hf(raw(**new)).rope == wanted
    assert ModelConfig.from_hf(raw(**old, **new)).rope == wanted
    assert ModelConfig.from_hf(raw(rope_theta=500, rope_parameters={"rope_type": "default"})).rope == Rope(theta=500.0)
    assert ModelConfig.from_hf(raw(rope_scaling={"type": "linear", "factor": 2})).rope == Rope(kind="linear", factor=2.0)
    without = {key: value for key, value in llama3.items() if not key.startswith("original")}
    assert ModelConfig.from_hf(raw(rope_scaling={"rope_type": "llama3", **without})).rope.original_context == 512


def test_a_window_that_has_no_effect_is_fine() -> None:
    for config in (
        raw("MistralForCausalLM", sliding_window=512),
        raw("MistralForCausalLM"),  # 4096 by default, and the context is 512
        raw("Qwen2ForCausalLM", sliding_window=16, use_sliding_window=False),
        raw("LlamaForCausalLM", sliding_window=16),  # Llama has none, whatever the file says
    ):
        assert ModelConfig.from_hf(config).context_length == 512


REFUSED = [
    (raw("MixtralForCausalLM"), "architectures: 'MixtralForCausalLM' is not supported; allowed: LlamaForCausalLM, Mistral"),
    (raw(architectures=None), "architectures must be a list of one name"),
    (raw(architectures=["LlamaForCausalLM"] * 2), "architectures must be a list of one name"),
    (raw(quantization_config={"quant_method": "awq"}), "quantization_config is not supported; allowed: safetensors"),
    (raw(num_local_experts=8), "num_local_experts = 8: mixtures of experts"),
    (raw(hidden_act="gelu"), "hidden_act must be 'silu', not 'gelu'"),
    (raw("MistralForCausalLM", sliding_window=256), "sliding_window = 256 is not supported; allowed: null, or at least .* = 512"),
    (raw("MistralForCausalLM", max_position_embeddings=8192), "sliding_window = 4096 is not supported"),
    (raw("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=256), "sliding_window = 256 is not supported"),
    (raw("Qwen3ForCausalLM", layer_types=["full_attention", "sliding_attention"]), "layer_types may hold 'full_attention' alone"),
    (raw(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling.rope_type must be one of default, linear, llama3, not 'yarn'"),
    (raw(rope_parameters={"rope_type": "longrope"}), "rope_parameters.rope_type must be one of .*, not 'longrope'"),
    (raw(rope_scaling={"type": "linear", "rope_type": "llama3"}), "rope_scaling.rope_type and rope_scaling.type disagree"),
    (raw(rope_scaling={"type": "linear"}), "factor must be a number above 0, not absent"),
    (raw(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_type": "linear", "factor": 4}), "rope_parameters and rope_scaling disagree"),
    (raw(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "rope_theta = .* and rope_parameters.rope_theta = .* disagree"),
    (raw(rope_scaling="linear"), "rope_scaling must be an object or null"),
    (raw(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor must be 1, not 0.5"),
    (raw(partial_rotary_factor=0.5), "partial_rotary_factor must be 1, not 0.5"),
    (raw(rope_theta="big"), "rope_theta must be a number above 0, not 'big'"),
    (raw(rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}), "high_freq_factor must be above low_freq_factor"),
    (raw(vocab_size="absent"), "vocab_size must be an integer of at least 1, not absent"),
    (raw(hidden_size=0), "hidden_size must be an integer of at least 1, not 0"),
    (raw(num_hidden_layers=2.0), "num_hidden_layers must be an integer of at least 1, not 2.0"),
    (raw(num_attention_heads=True), "num_attention_heads must be an integer of at least 1, not True"),
    (raw("Qwen2ForCausalLM", num_key_value_heads="absent"), "num_key_value_heads must be an integer of at least 1, not absent"),
    (raw(num_key_value_heads=3), "heads must be a multiple of kv_heads = 3, not 4"),
    (raw(hidden_size=66), "hidden_size = 66 is no multiple of num_attention_heads = 4"),
    (raw(head_dim=15), "head_dim must be even, not 15"),
    (raw(rms_norm_eps=float("nan")), "rms_norm_eps must be a number above 0, not nan"),
    (raw(attention_bias="yes"), "attention_bias must be true or false, not 'yes'"),
    (raw(tie_word_embeddings=1), "tie_word_embeddings must be true or false, not 1"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(config)


def test_fields_are_checked_when_the_config_is_made() -> None:
    config = tiny().config
    for changes, message in (
        ({"architecture": "GPT2LMHeadModel"}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"layers": 0}, "layers must be an integer of at least 1"), ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number above 0"),
        ({"rope": Rope(kind="divided", divisors=(1.0,) * 7)}, r"rope divisors must be 8 numbers \(head_dim / 2\), not 7"),
    ):
        with pytest.raises(ModelError, match=message):
            attrs.evolve(config, **changes)
    with pytest.raises(ModelError, match="rope kind must be one of"):
        Rope(kind="yarn")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ModelError, match="divisors belong to rope kind divided, not to default"):
        Rope(divisors=(1.0,))
