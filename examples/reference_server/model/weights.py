"""Weights by the names that Hugging Face gives them, and the reading of safetensors files into a model.

What does not live here: configs and tokenizers of a directory (`loading`), and GGUF files (`gguf`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from reference_server.model.config import ModelError
from reference_server.model.llama import FLOATS, Block, Llama

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What a directory holds: one file, or an index that names the file of each tensor."""


def targets(model: Llama) -> dict[str, torch.Tensor]:
    """Every weight of a model under its Hugging Face name, as a view: writing to it writes to the model.

    Where matrices are fused in the model, each name is a slice. A tied output matrix has no name of its own.
    """
    found = {"model.embed_tokens.weight": model.embedding.data, "model.norm.weight": model.norm.data}
    if not model.config.tie_embeddings:
        found["lm_head.weight"] = model.head.data
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        found.update({f"model.layers.{index}.{name}": view for name, view in _of_block(block)})
    return found


def _of_block(block: Block) -> Iterator[tuple[str, torch.Tensor]]:
    c = block.config
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    fused = (
        (block.qkv, "self_attn.{}_proj.weight", "qkv", (query, key, key)),
        (block.qkv_bias, "self_attn.{}_proj.bias", "qkv", (query, key, key)),
        (block.gate_up, "mlp.{}_proj.weight", ("gate", "up"), (c.intermediate_size,) * 2),
        (block.gate_up_bias, "mlp.{}_proj.bias", ("gate", "up"), (c.intermediate_size,) * 2),
    )
    for weight, pattern, parts, sizes in fused:
        if weight is not None:
            for part, view in zip(parts, torch.split(weight.data, list(sizes)), strict=True):
                yield pattern.format(part), view
    for weight, name in (
        (block.input_norm, "input_layernorm.weight"), (block.mlp_norm, "post_attention_layernorm.weight"),
        (block.q_norm, "self_attn.q_norm.weight"), (block.k_norm, "self_attn.k_norm.weight"),
        (block.output, "self_attn.o_proj.weight"), (block.output_bias, "self_attn.o_proj.bias"),
        (block.down, "mlp.down_proj.weight"), (block.down_bias, "mlp.down_proj.bias"),
    ):
        if weight is not None:
            yield name, weight.data


def check_names(wanted: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise `ModelError` that names every tensor that is missing, unknown or of another shape, all at once."""
    faults = [f"{name} is missing" for name in wanted if name not in shapes]
    faults += [f"{name} is not a weight of this model" for name in shapes if name not in wanted]
    faults += [
        f"{name} has shape {list(shapes[name])}, not {list(view.shape)}"
        for name, view in wanted.items() if name in shapes and tuple(view.shape) != shapes[name]
    ]
    if faults:
        raise ModelError(f"{where} does not fit the config: {'; '.join(faults)}")


def read_safetensors(model: Llama, directory: Path) -> None:
    """Fill a model from a directory's safetensors files. Raises `ModelError`; then the model's weights are undefined.

    Every header is checked before the first weight is read. Weights are converted to the model's type one by one.
    """
    wanted = targets(model)
    files = _files(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        for name, shape in _header(path):
            if name in shapes:
                raise ModelError(f"{name} stands in two files of {directory}")
            shapes[name] = shape
    extra = _redundant(model, shapes)
    check_names(wanted, {name: shape for name, shape in shapes.items() if name not in extra}, str(directory))
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - the opened file is no mapping
                tensor = opened.get_tensor(name)
                if tensor.dtype not in FLOATS:
                    raise ModelError(f"{name} of {path} is {tensor.dtype}; allowed: {', '.join(map(str, FLOATS))}")
                if name in wanted:
                    wanted[name].copy_(tensor)
    _check_tie(model, files, extra)


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - the opened file is no mapping
                yield name, tuple(opened.get_slice(name).get_shape())
    except (SafetensorError, OSError) as fault:
        raise ModelError(f"{path} cannot be read as safetensors: {fault}") from fault


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the one, or those that the index names."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}; other formats of weights are not read")
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ModelError(f"{index} must hold an object weight_map of tensor names to file names") from fault
    names = sorted(set(named)) if all(isinstance(name, str) for name in named) else []
    if not names or any(Path(name).name != name for name in names):
        raise ModelError(f"weight_map of {index} must name files of its own directory")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ModelError(f"{index} names files that are not there: {', '.join(absent)}")
    return [directory / name for name in names]


def _redundant(model: Llama, shapes: Iterable[str]) -> set[str]:
    """Names that say nothing of their own: a tied output matrix written out, and frequencies that follow from the config."""
    return {name for name in shapes
            if (name == "lm_head.weight" and model.config.tie_embeddings) or name.endswith(".rotary_emb.inv_freq")}


def _check_tie(model: Llama, files: Iterable[Path], extra: set[str]) -> None:
    if "lm_head.weight" not in extra:
        return
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as opened:
            if "lm_head.weight" in opened.keys():  # noqa: SIM118 - the opened file is no mapping
                head = opened.get_tensor("lm_head.weight")
                if head.shape != model.head.shape or not torch.equal(head.to(model.dtype), model.head.cpu()):
                    raise ModelError("lm_head.weight differs from the embedding, and tie_word_embeddings says they are one")
