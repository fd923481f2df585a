"""What a model is: sizes, rotary embedding, biases and norms; and the reading of it from a Hugging Face config.json.

What does not live here: weights, and the forward pass. A file that asks for something this model cannot do is refused by
the name of what it asks for; nothing is guessed and nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs


class ModelError(ValueError):
    """A model, or its files, cannot be served. The message names the key, tensor or file, and what is allowed."""


RopeKind = Literal["default", "linear", "llama3", "divided"]


def _positive(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{attribute.name} must be a number above 0, not {value!r}")


def _whole(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{attribute.name} must be an integer of at least 1, not {value!r}")


def _flag(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise ModelError(f"{attribute.name} must be true or false, not {value!r}")


def _kind(_: Any, attribute: Any, value: Any) -> None:
    if value not in get_args(RopeKind):
        raise ModelError(f"rope {attribute.name} must be one of {', '.join(get_args(RopeKind))}, not {value!r}")


@attrs.frozen
class Rope:
    """The frequencies of the rotary embedding.

    theta: base. kind: what is done to the frequencies theta ** (-2i / head_dim).
    - default: nothing.
    - linear: divided by `factor`.
    - llama3: those with wavelengths above original_context / low_freq_factor are divided by `factor`, those below
      original_context / high_freq_factor stay, those between go over smoothly (Llama 3.1).
    - divided: each by its own of `divisors`, head_dim / 2 of them (what a GGUF file carries instead of the llama3 factors).
    """

    theta: float = attrs.field(default=10_000.0, validator=_positive)
    kind: RopeKind = attrs.field(default="default", validator=_kind)
    factor: float = attrs.field(default=1.0, validator=_positive)
    low_freq_factor: float = attrs.field(default=1.0, validator=_positive)
    high_freq_factor: float = attrs.field(default=4.0, validator=_positive)
    original_context: int = attrs.field(default=8192, validator=_whole)
    divisors: tuple[float, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(f"high_freq_factor must be above low_freq_factor = {self.low_freq_factor}, not {self.high_freq_factor}")
        if (self.kind == "divided") != bool(self.divisors):
            raise ModelError(f"divisors belong to rope kind divided, not to {self.kind}")


@attrs.frozen
class ModelConfig:
    """Everything the forward pass depends on, apart from the weights.

    architecture: the Hugging Face class that computes the same. heads: query heads; kv_heads divides them. context_length:
    most positions. tie_embeddings: the output matrix is the embedding. attention_bias: of q, k and v. output_bias: of the
    projection after attention. mlp_bias: of all three of the MLP. qk_norm: RMS norm over each head of q and k.
    Raises `ModelError` naming the field.
    """

    architecture: str
    vocab_size: int = attrs.field(validator=_whole)
    hidden_size: int = attrs.field(validator=_whole)
    intermediate_size: int = attrs.field(validator=_whole)
    layers: int = attrs.field(validator=_whole)
    heads: int = attrs.field(validator=_whole)
    kv_heads: int = attrs.field(validator=_whole)
    head_dim: int = attrs.field(validator=_whole)
    rms_norm_eps: float = attrs.field(validator=_positive)
    context_length: int = attrs.field(validator=_whole)
    rope: Rope = Rope()
    tie_embeddings: bool = attrs.field(default=False, validator=_flag)
    attention_bias: bool = attrs.field(default=False, validator=_flag)
    output_bias: bool = attrs.field(default=False, validator=_flag)
    mlp_bias: bool = attrs.field(default=False, validator=_flag)
    qk_norm: bool = attrs.field(default=False, validator=_flag)

    def __attrs_post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {self.architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}")
        if self.heads % self.kv_heads:
            raise ModelError(f"heads must be a multiple of kv_heads = {self.kv_heads}, not {self.heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even, not {self.head_dim}")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ModelError(f"rope divisors must be {self.head_dim // 2} numbers (head_dim / 2), not {len(self.rope.divisors)}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json, in the spelling of transformers 4 or 5. Raises `ModelError` naming the key.

        A key that is absent has the default that transformers gives it. Keys that none of the allowed architectures reads
        are not looked at.
        """
        return _read(raw)


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What is served: one decoder with full causal attention and a SwiGLU; they differ in biases, norms and defaults."""


def _read(raw: Mapping[str, Any]) -> ModelConfig:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelError(f"architectures must be a list of one name, of {', '.join(ARCHITECTURES)}, not {named!r}")
    name = named[0]
    if name not in ARCHITECTURES:
        raise ModelError(f"architectures: {name!r} is not supported; allowed: {', '.join(ARCHITECTURES)}")
    context = _number(raw, "max_position_embeddings")
    _refuse_others(raw, name, context)
    hidden, heads = _number(raw, "hidden_size"), _number(raw, "num_attention_heads")
    kv_heads = _number(raw, "num_key_value_heads", heads if name == "LlamaForCausalLM" else None)
    if raw.get("head_dim") is None and name != "Qwen3ForCausalLM" and hidden % heads:
        raise ModelError(f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}, and there is no head_dim")
    head_dim = _number(raw, "head_dim", 128 if name == "Qwen3ForCausalLM" else hidden // heads)
    bias = name in ("LlamaForCausalLM", "Qwen3ForCausalLM") and _flagged(raw, "attention_bias")
    return ModelConfig(
        architecture=name, vocab_size=_number(raw, "vocab_size"), hidden_size=hidden,
        intermediate_size=_number(raw, "intermediate_size"), layers=_number(raw, "num_hidden_layers"), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=_real(raw, "rms_norm_eps", 1e-6), context_length=context,
        rope=_rope(raw), tie_embeddings=_flagged(raw, "tie_word_embeddings"),
        attention_bias=bias or name == "Qwen2ForCausalLM", output_bias=bias,
        mlp_bias=name == "LlamaForCausalLM" and _flagged(raw, "mlp_bias"), qk_norm=name == "Qwen3ForCausalLM",
    )


def _refuse_others(raw: Mapping[str, Any], name: str, context: int) -> None:
    """Raise `ModelError` for what changes the computation in a way that is not implemented."""
    if raw.get("quantization_config") is not None:
        raise ModelError("quantization_config is not supported; allowed: safetensors in a floating-point type, or a GGUF file")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise ModelError(f"{key} = {raw[key]!r}: mixtures of experts are not supported")
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise ModelError(f"hidden_act must be 'silu', not {act!r}")
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ModelError(f"layer_types may hold 'full_attention' alone, not {kinds!r}")
    # Mistral has a window unless it is null, of 4096 where the key is absent; Qwen has one where a second key says so.
    window = raw.get("sliding_window", 4096) if name == "MistralForCausalLM" else None
    if name.startswith("Qwen") and _flagged(raw, "use_sliding_window"):
        window = raw.get("sliding_window", 4096)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < context):
        raise ModelError(
            f"sliding_window = {window!r} is not supported; allowed: null, or at least max_position_embeddings = {context}, where it has no effect"
        )


def _rope(raw: Mapping[str, Any]) -> Rope:
    """The rotary embedding in either spelling: rope_theta and rope_scaling, or rope_parameters with all in it."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{key} must be an object or null, not {value!r}")
    outer = {"rope_theta": raw["rope_theta"]} if raw.get("rope_theta") is not None else {}
    if raw.get("partial_rotary_factor") is not None:
        outer["partial_rotary_factor"] = raw["partial_rotary_factor"]
    found = [_rope_of(key, {**outer, **value}, raw) for key, value in (("rope_parameters", new), ("rope_scaling", old)) if value]
    if len(found) == 2 and found[0] != found[1]:
        raise ModelError(f"rope_parameters and rope_scaling disagree: {new!r} and {old!r}")
    if new and "rope_theta" in new and outer.get("rope_theta", new["rope_theta"]) != new["rope_theta"]:
        raise ModelError(f"rope_theta = {outer['rope_theta']!r} and rope_parameters.rope_theta = {new['rope_theta']!r} disagree")
    return found[0] if found else _rope_of("rope_parameters", outer, raw)


def _rope_of(where: str, keys: Mapping[str, Any], raw: Mapping[str, Any]) -> Rope:
    spelled = {key: keys[key] for key in ("rope_type", "type") if keys.get(key) is not None}
    if len(set(spelled.values())) > 1:
        raise ModelError(f"{where}.rope_type and {where}.type disagree: {spelled!r}")
    kind = next(iter(spelled.values()), "default")
    allowed = ("default", "linear", "llama3")
    if kind not in allowed:
        raise ModelError(f"{where}.rope_type must be one of {', '.join(allowed)}, not {kind!r}")
    if keys.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor must be 1, not {keys['partial_rotary_factor']!r}")
    theta = _real(keys, "rope_theta", 10_000.0)
    if kind == "default":
        return Rope(theta=theta)
    factor = _real(keys, "factor")
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    original = _number(keys, "original_max_position_embeddings", _number(raw, "max_position_embeddings"))
    return Rope(theta=theta, kind="llama3", factor=factor, low_freq_factor=_real(keys, "low_freq_factor"),
                high_freq_factor=_real(keys, "high_freq_factor"), original_context=original)


def _number(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be an integer of at least 1, not {'absent' if value is None else repr(value)}")
    return value


def _real(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{key} must be a number above 0, not {'absent' if value is None else repr(value)}")
    return float(value)


def _flagged(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelError(f"{key} must be true or false, not {value!r}")
    return value
