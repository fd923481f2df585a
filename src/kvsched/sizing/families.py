"""Which fields of a config.json mean what, by model type: data, and the only place that knows names of models.

What lives here: tables. What does not: code that reads a file (`kvsched.sizing.reading`), which goes by the readings named
here and never by a model's name.

The facts are those of the model types' configuration classes in transformers (checked against release 5.24 by
`tests/sizing/test_families.py`, which builds a tiny model of each type and counts what its cache holds) and of the config.json
files that are published with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Family:
    """How the fields of one model type are read.

    attention: the reading of an attention layer (`kvsched.sizing.attention`). placement: which layer has what
    (`kvsched.sizing.placement`). recurrent: the reading of a recurrent layer (`kvsched.sizing.recurrent`), "" where there is none.
    cross: the reading of cross-attention, "" for none. layers, heads, kv_heads, head_dim, hidden, context: names of keys; of
    several after one another, with | between them, the first that is there. keys: names of keys of the recurrent part.
    kv_heads_absent: what an absent number of key/value heads means: "heads", as many as query heads, or "required".
    head_dim_absent: likewise, "hidden": hidden size / heads.
    defaults: what an absent key stands for in a nested text_config, which such files write down only where it differs from
    the class. A config.json of the type itself states its fields, and one that lacks them is incomplete.
    """

    attention: str = "heads"
    placement: str = "full"
    recurrent: str = ""
    cross: str = ""
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    kv_heads_absent: str = "required"
    head_dim: str = "head_dim"
    head_dim_absent: str = "hidden"
    hidden: str = "hidden_size"
    context: str = "max_position_embeddings"
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}


@attrs.frozen
class Wrapper:
    """A model type whose text part is an object of its own. key: where. inner: its type where the object names none of its own."""

    key: str
    inner: str = ""


_DENSE = Family()
_GROUPED = Family(kv_heads_absent="heads")
_PLAIN = Family(kv_heads="", kv_heads_absent="heads")
_LATENT = Family(attention="latent", kv_heads_absent="heads")
_GPT = Family(kv_heads="", kv_heads_absent="heads", layers="n_layer", heads="n_head", hidden="n_embd", context="n_positions")
_WINDOW = Family(placement="window_all")
_TAIL = Family(placement="window_from", kv_heads_absent="heads")
_STATED = Family(placement="stated", kv_heads_absent="heads")
_MIXED = Family(placement="full_or_stated", kv_heads_absent="heads")
_FIXED = Family(head_dim_absent="required")
_DELTA = Family(placement="interval", recurrent="delta_net", head_dim_absent="required")
_MAMBA2 = {
    "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state", "taps": "mamba_d_conv",
    "expand": "mamba_expand", "width": "mamba_d_ssm",
}
_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 2048}
_QWEN2 = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
    "max_position_embeddings": 32768, "max_window_layers": 28,
}
_QWEN3_5 = {
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

FAMILIES: Mapping[str, Family] = {
    # every layer attends to everything
    "llama": attrs.evolve(_GROUPED, defaults=_LLAMA),
    "arcee": _DENSE, "apertus": _DENSE, "baichuan": attrs.evolve(_PLAIN, context="model_max_length"), "cohere": _GROUPED, "deepseek": _GROUPED,
    "dots1": _GROUPED, "ernie4_5": _FIXED, "ernie4_5_moe": _GROUPED, "exaone": attrs.evolve(_GROUPED, layers="num_layers|num_hidden_layers"),
    "glm": _FIXED, "glm4": _FIXED, "glm4_moe": _FIXED, "granite": _GROUPED, "granitemoe": _GROUPED, "granitemoeshared": _GROUPED,
    "helium": _FIXED, "hunyuan_v1_dense": _GROUPED, "hunyuan_v1_moe": _GROUPED, "internlm2": _GROUPED, "internlm3": _DENSE,
    "minimax_m2": _FIXED, "mixtral": _WINDOW, "nemotron": _GROUPED, "olmo": _GROUPED, "olmo2": _GROUPED, "olmoe": _GROUPED,
    "phi": _GROUPED, "persimmon": _PLAIN, "seed_oss": _FIXED, "smollm3": _GROUPED, "solar_open": _FIXED, "stablelm": _GROUPED,
    "gemma": attrs.evolve(_FIXED, defaults={
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    }),
    "gpt2": _GPT, "gptj": _GPT, "bloom": attrs.evolve(_GPT, hidden="hidden_size", context="seq_length"),
    "gpt_neox": _PLAIN, "opt": _PLAIN, "gpt_bigcode": attrs.evolve(_GPT, attention="multi_query"),
    "falcon": attrs.evolve(_PLAIN, attention="multi_query", kv_heads="num_kv_heads"),
    "mpt": Family(attention="attn_config", layers="n_layers", heads="n_heads", hidden="d_model", context="max_seq_len"),
    "dbrx": Family(attention="attn_config", layers="n_layers", heads="n_heads", hidden="d_model", context="max_seq_len"),
    "chatglm": Family(
        layers="num_layers", kv_heads="multi_query_group_num", head_dim="kv_channels", head_dim_absent="required", context="seq_length",
    ),
    # windows: in all layers, from some layer on, or alternating with full attention
    "mistral": attrs.evolve(_WINDOW, defaults={
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }),
    "phi3": attrs.evolve(_WINDOW, kv_heads_absent="heads"), "phimoe": _WINDOW, "starcoder2": _WINDOW,
    "ministral": attrs.evolve(_WINDOW, head_dim_absent="required"), "ministral3": attrs.evolve(_WINDOW, head_dim_absent="required"),
    "qwen2": attrs.evolve(_TAIL, defaults=_QWEN2), "qwen2_moe": _TAIL, "qwen2_vl": _TAIL, "qwen2_5_vl": _TAIL,
    "qwen2_vl_text": _TAIL, "qwen2_5_vl_text": _TAIL,
    "qwen3": attrs.evolve(_TAIL, head_dim_absent="required"), "qwen3_moe": attrs.evolve(_TAIL, head_dim_absent="required"),
    "qwen3_vl_text": attrs.evolve(_TAIL, head_dim_absent="required"), "qwen3_vl_moe_text": attrs.evolve(_TAIL, head_dim_absent="required"),
    "gemma2": attrs.evolve(_FIXED, placement="window_even", defaults={
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "max_position_embeddings": 8192,
    }),
    "gemma3_text": attrs.evolve(_FIXED, placement="window_but_every_6th", defaults={
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }),
    "gemma3n_text": attrs.evolve(_FIXED, attention="shared_tail", placement="window_but_every_5th", defaults={
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "max_position_embeddings": 32768, "num_kv_shared_layers": 15,
    }),
    "gemma4_text": attrs.evolve(_FIXED, attention="global_heads", placement="stated"),
    "cohere2": attrs.evolve(_GROUPED, placement="window_but_every_4th", defaults={
        "num_hidden_layers": 40, "num_attention_heads": 64, "hidden_size": 8192, "sliding_window": 4096, "max_position_embeddings": 8192,
    }),
    "exaone4": _MIXED, "gpt_oss": attrs.evolve(_MIXED, head_dim_absent="required"), "olmo3": _MIXED,
    "llama4_text": attrs.evolve(_FIXED, placement="chunked", kv_heads_absent="heads"),
    "mimo_v2_flash": attrs.evolve(_FIXED, attention="window_heads", placement="hybrid_pattern"),
    # one latent vector for all heads
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "kimi_k2": _LATENT, "glm4_moe_lite": _LATENT, "youtu": _LATENT,
    "longcat_flash": attrs.evolve(_LATENT, attention="two_latents", layers="num_layers"),
    # recurrent or linear-attention layers beside attention
    "bamba": attrs.evolve(_GROUPED, placement="attention_indices", recurrent="mamba2", keys=_MAMBA2),
    "granitemoehybrid": attrs.evolve(_STATED, recurrent="mamba2", keys=_MAMBA2),
    "falcon_h1": attrs.evolve(_GROUPED, placement="both", recurrent="mamba2", keys=_MAMBA2),
    "zamba2": attrs.evolve(_GROUPED, attention="twice_hidden", placement="hybrid_ids", recurrent="mamba2", keys={
        "heads": "n_mamba_heads", "groups": "mamba_ngroups", "state": "mamba_d_state", "taps": "mamba_d_conv", "expand": "mamba_expand",
    }),
    "nemotron_h": attrs.evolve(
        _DENSE, placement="letters", recurrent="mamba2", head_dim="head_dim|attention_head_dim", head_dim_absent="required", keys={
            "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size", "taps": "conv_kernel",
        }),
    "jamba": attrs.evolve(_GROUPED, placement="period", recurrent="mamba1"),
    "qwen3_next": _DELTA, "qwen3_5": _DELTA, "qwen3_5_moe": _DELTA,
    "qwen3_5_text": attrs.evolve(_DELTA, defaults=_QWEN3_5), "qwen3_5_moe_text": _DELTA,
    "olmo_hybrid": attrs.evolve(_DELTA, placement="stated", kv_heads_absent="heads", head_dim_absent="hidden"),
    "kimi_linear": attrs.evolve(_LATENT, placement="numbered_from_one", recurrent="kda"),
    "lfm2": attrs.evolve(_DENSE, placement="conv", recurrent="short_conv"), "lfm2_moe": attrs.evolve(_DENSE, placement="conv", recurrent="short_conv"),
    "minimax": attrs.evolve(_STATED, recurrent="lightning"),
    "minimax_text_01": attrs.evolve(_DENSE, placement="type_list", recurrent="lightning"),
    "minimax_m1": attrs.evolve(_DENSE, placement="type_list", recurrent="lightning"),
    # keys and values of something else than tokens
    "mllama_text_model": attrs.evolve(_DENSE, placement="cross_layers", cross="tiles", defaults={
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "max_position_embeddings": 131072, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    }),
    "whisper": attrs.evolve(
        _PLAIN, placement="cross_all", cross="source", layers="decoder_layers", heads="decoder_attention_heads", hidden="d_model",
        context="max_target_positions",
    ),
    "bart": attrs.evolve(
        _PLAIN, placement="cross_all", cross="stated", layers="decoder_layers", heads="decoder_attention_heads", hidden="d_model",
    ),
    "t5": attrs.evolve(
        _PLAIN, placement="cross_all", cross="stated", layers="num_decoder_layers", heads="num_heads", head_dim="d_kv",
        head_dim_absent="required", hidden="d_model", context="",
    ),
}
"""Model types that can be sized, each with its reading."""

WRAPPERS: Mapping[str, Wrapper] = {
    **dict.fromkeys((
        "aya_vision", "cohere2_vision", "fuyu", "glm4v", "glm4v_moe", "got_ocr2", "idefics2", "idefics3", "internvl", "llava_next",
        "llava_next_video", "llava_onevision", "mistral3", "ovis2", "perception_lm", "qwen2_audio", "qwen2_vl", "qwen2_5_vl", "smolvlm",
        "vipllava", "voxtral",
    ), Wrapper("text_config")),
    "llava": Wrapper("text_config", "llama"), "paligemma": Wrapper("text_config", "gemma"), "gemma3": Wrapper("text_config", "gemma3_text"),
    "gemma3n": Wrapper("text_config", "gemma3n_text"), "gemma4": Wrapper("text_config", "gemma4_text"),
    "llama4": Wrapper("text_config", "llama4_text"), "mllama": Wrapper("text_config", "mllama_text_model"),
    "qwen3_vl": Wrapper("text_config", "qwen3_vl_text"), "qwen3_vl_moe": Wrapper("text_config", "qwen3_vl_moe_text"),
    "qwen3_5": Wrapper("text_config", "qwen3_5_text"), "qwen3_5_moe": Wrapper("text_config", "qwen3_5_moe_text"),
    "kimi_k25": Wrapper("text_config", "kimi_k2"), "kimi_vl": Wrapper("text_config", "deepseek_v3"),
    "internvl_chat": Wrapper("llm_config"), "deepseek_vl_v2": Wrapper("language_config", "deepseek_v2"),
}
"""Model types whose text part is nested. One that also stands in FAMILIES is read flat where the object is absent."""

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Gemma2ForCausalLM": "gemma2", "DeepseekV3ForCausalLM": "deepseek_v3", "Phi3ForCausalLM": "phi3",
}
"""Model types by the class that a file names, for files whose own model_type is missing or not in the tables."""
