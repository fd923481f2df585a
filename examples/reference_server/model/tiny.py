"""A tiny random model and a tokenizer of bytes, for tests and trials that need no sense in the text."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from reference_server.model.config import ModelConfig, Rope
from reference_server.model.llama import Llama
from reference_server.model.weights import targets
from reference_server.text.tokenizer import Tokenizer, byte_alphabet

EOS, START = 256, 257
"""Ids past the bytes: the end of a sequence or message, and the start of a message."""

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny(*, seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", **changes: Any) -> Llama:
    """A random model of two layers over bytes: the same for the same seed, in every type up to rounding.

    changes: fields of `ModelConfig` that are to be other than here; `ModelError` names one that cannot be. The scale
    of the weights makes greedy text that varies; two tokens are hardly ever within 1e-6 of each other in logits.
    """
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "layers": 2,
        "heads": 4, "kv_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "context_length": 4096, "rope": Rope(theta=100.0),
    }
    model = Llama(ModelConfig(**{**fields, **changes}), dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, view in targets(model).items():
        values = torch.randn(view.shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif "embed" not in name or model.config.tie_embeddings:
            values *= 2.0 * view.shape[-1] ** -0.5
        view.copy_(values)
    return model


def tiny_tokenizer() -> Tokenizer:
    """Token ids 0 to 255 are bytes; `EOS` and `START` are special. Its chat template puts the two around each message."""
    vocab = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False), AddedToken("<|start|>", normalized=False)])
    return Tokenizer(backend, template=TEMPLATE)
