"""From a path to a model that answers: a directory in Hugging Face form, or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch

from reference_server.model.config import ModelConfig, ModelError
from reference_server.model.gguf import GgufFile
from reference_server.model.llama import Llama
from reference_server.model.weights import read_safetensors
from reference_server.text.metadata import end_tokens, from_metadata
from reference_server.text.tokenizer import Tokenizer


@attrs.frozen(eq=False)
class Loaded:
    """A model with its tokenizer, the name of its directory or file, and the ids of tokens that end an answer."""

    model: Llama
    tokenizer: Tokenizer
    name: str
    eos: frozenset[int]


def load(path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Loaded:
    """Load a model.

    path: a directory with config.json, safetensors files and tokenizer.json, or a GGUF file. dtype: what it is computed
    in; weights are converted. Raises `ModelError` or `reference_server.text.TokenizerError`, which name what is wrong.
    """
    path = Path(path)
    if path.is_dir():
        loaded = _directory(path, dtype, device)
    elif path.is_file() and path.suffix == ".gguf":
        loaded = _file(path, dtype, device)
    else:
        state = "is neither" if path.exists() else "does not exist"
        raise ModelError(f"a model is a directory with config.json and safetensors, or a .gguf file; {path} {state}")
    if loaded.tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise ModelError(f"the tokenizer has ids up to {loaded.tokenizer.vocab_size - 1}, and the model {loaded.model.config.vocab_size} tokens")
    return loaded


def _file(path: Path, dtype: torch.dtype, device: torch.device | str) -> Loaded:
    file = GgufFile(path)
    config, tokenizer = file.config(), from_metadata(file.meta)
    eos = end_tokens(file.meta, config.vocab_size)
    model = Llama(config, dtype=dtype, device=device)
    file.fill(model)
    return Loaded(model, tokenizer, path.stem, eos)


def _directory(path: Path, dtype: torch.dtype, device: torch.device | str) -> Loaded:
    raw = _object(path / "config.json")
    config, tokenizer = ModelConfig.from_hf(raw), Tokenizer.from_directory(path)
    eos = _end_tokens(raw, "config.json", config.vocab_size)
    if (path / "generation_config.json").is_file():
        eos |= _end_tokens(_object(path / "generation_config.json"), "generation_config.json", config.vocab_size)
    model = Llama(config, dtype=dtype, device=device)
    read_safetensors(model, path)
    return Loaded(model, tokenizer, path.resolve().name, eos)


def _end_tokens(raw: dict[str, Any], where: str, vocab_size: int) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
            raise ModelError(f"eos_token_id of {where} must be integers from 0 to {vocab_size - 1}, or null, not {value!r}")
    return frozenset(ids)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ModelError(f"{path} cannot be read: {fault}") from fault
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold an object, not {type(value).__name__}")
    return value
