"""From the fields of a config.json to a `Model`. What does not live here: opening the file, and names of models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvsched.errors import ConfigError
from kvsched.sizing.attention import ATTENTIONS, first_of
from kvsched.sizing.dtypes import Dtype, dtype
from kvsched.sizing.families import ARCHITECTURES, FAMILIES, WRAPPERS, Family
from kvsched.sizing.fields import Fields
from kvsched.sizing.geometry import Attention, Layer, Model, Recurrent
from kvsched.sizing.placement import BOTH, CHUNK, CROSS, FULL, FULL_AND_CROSS, RECURRENT, WINDOW, kinds
from kvsched.sizing.recurrent import RECURRENTS

MOST_LAYERS = 10_000
"""No model comes near it; a number beyond is a slip that would only cost time."""
MOST_STRETCH = 10_000
"""Likewise for the factor by which positions are stretched."""
LAYER_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
"""Keys that describe every layer, one after the other."""
STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
"""Keys under which a config states the type of its recurrent states."""


def read_model(raw: object) -> Model:
    """The geometry of the model that a config.json describes.

    Raises `ConfigError`, naming the key and what was allowed, for a type that is not in the tables and for fields that are
    missing, malformed or at odds with each other. Nothing is guessed. O(layers).

    >>> read_model({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    ...             "max_position_embeddings": 512, "torch_dtype": "bfloat16"}).attentions[0]
    Attention(heads=4, key=16, value=16, window=None)
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config.json must be an object, not {type(raw).__name__}")
    name, fields = _text_part(raw)
    family = FAMILIES[name]
    heads = fields.integer(first_of(fields, family.heads))
    count = _layer_count(family, fields)
    if count > MOST_LAYERS:
        raise ConfigError(f"config.json: {fields.name(first_of(fields, family.layers))} must be at most {MOST_LAYERS}, not {count}")
    recurrent = RECURRENTS[family.recurrent](family, fields, heads) if family.recurrent else None
    layers = tuple(
        _layer(family, fields, heads, recurrent, kind, number, count) for number, kind in enumerate(kinds(family.placement, fields, count))
    )
    if not any(layer.attention for layer in layers):
        raise ConfigError("config.json describes no attention layer, so there is no token pool to size")
    own, note = _dtype(raw, fields)
    return Model(
        model_type=name, layers=layers, query_heads=heads, context=_context(family, fields), dtype=own, dtype_note=note,
        state_dtype=_state_dtype(fields), cross_tokens=_cross_tokens(family, fields, raw), notes=_notes(name, fields),
    )


def _text_part(raw: Mapping[str, Any]) -> tuple[str, Fields]:
    """The model type and the fields of the part that generates text."""
    own = raw.get("model_type")
    wrapper = WRAPPERS.get(own) if isinstance(own, str) else None
    if wrapper is not None and isinstance(raw.get(wrapper.key), Mapping):
        inner = raw[wrapper.key]
        named = inner.get("model_type")
        name = wrapper.inner if wrapper.inner and named in (None, own) else _known(inner, wrapper.key + ".")
        return name, Fields(inner, wrapper.key + ".", FAMILIES[name].defaults)
    if wrapper is not None and own not in FAMILIES:
        raise ConfigError(f"config.json: {wrapper.key} must be an object: model type {own!r} keeps the text part there")
    return _known(raw, ""), Fields(raw)


def _known(raw: Mapping[str, Any], where: str) -> str:
    name = raw.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name
    classes = raw.get("architectures")
    for one in classes if isinstance(classes, list) else []:
        if isinstance(one, str) and one in ARCHITECTURES:
            return ARCHITECTURES[one]
    allowed = sorted({*FAMILIES, *WRAPPERS})
    close = difflib.get_close_matches(name, allowed, 3) if isinstance(name, str) else []
    near = f", which is near {', '.join(close)}" if close else ""
    raise ConfigError(f"config.json: {where}model_type {name!r}{near}, is none that can be sized; allowed: {', '.join(allowed)}")


def _layer_count(family: Family, fields: Fields) -> int:
    """As stated, or as many as the file describes one by one."""
    key = first_of(fields, family.layers)
    if not fields.has(key):
        for described in LAYER_LISTS:
            if isinstance(fields.get(described), (list, str)):
                return len(fields.get(described))
    return fields.integer(key)


def _layer(
    family: Family, fields: Fields, heads: int, recurrent: Recurrent | None, kind: str, number: int, count: int,
) -> Layer:
    if kind in {RECURRENT, BOTH} and recurrent is None:
        raise ConfigError(f"config.json: layer {number} is recurrent, and this model type has no recurrent layers")
    stored: tuple[Attention, ...] = ()
    if kind in {FULL, WINDOW, CHUNK, BOTH, FULL_AND_CROSS}:
        stored = ATTENTIONS[family.attention](family, fields, heads, FULL if kind in {BOTH, FULL_AND_CROSS} else kind, number, count)
    cross = None
    if kind in {CROSS, FULL_AND_CROSS}:
        (cross,) = ATTENTIONS[family.attention](family, fields, heads, FULL, number, count)
    return Layer(stored, recurrent if kind in {RECURRENT, BOTH} else None, cross)


def _dtype(raw: Mapping[str, Any], fields: Fields) -> tuple[Dtype | None, str]:
    """The type of weights and activations, and where it stands. Quantised KV that the file speaks of makes it None."""
    found = {
        f"{where}{key}": value for part, where in ((raw, ""), (fields.raw, fields.where)) for key in ("dtype", "torch_dtype")
        if (value := part.get(key)) is not None
    }
    if not found:
        return None, "config.json has no torch_dtype"
    read = {key: dtype(value, f"config.json: {key}") for key, value in found.items()}
    if len(set(read.values())) > 1:
        return None, f"config.json states several types: {', '.join(f'{key} {value}' for key, value in read.items())}"
    quantised = raw.get("quantization_config")
    if isinstance(quantised, Mapping):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if quantised.get(key) is not None:
                return None, f"config.json: quantization_config.{key} speaks of a KV cache of another type than the weights"
    key, value = next(iter(read.items()))
    return value, f"{key} of config.json"


def _state_dtype(fields: Fields) -> Dtype | None:
    for key in STATE_DTYPES:
        if fields.has(key):
            return dtype(fields.get(key), f"config.json: {fields.name(key)}")
    return None


def _context(family: Family, fields: Fields) -> int | None:
    """Tokens that the model was made for: as stated, and longer where the file stretches positions by yarn."""
    if not family.context:
        return None
    stated = fields.optional(family.context)
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
        if isinstance(rope, Mapping) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            inner = fields.inner(key)
            factor, original = inner.get("factor"), inner.optional("original_max_position_embeddings")
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor <= MOST_STRETCH:
                raise ConfigError(f"config.json: {inner.name('factor')} must be a number from 1 to {MOST_STRETCH}, not {factor!r}")
            return stated if original is None else max(stated or 0, int(factor * original))
    return stated


def _cross_tokens(family: Family, fields: Fields, raw: Mapping[str, Any]) -> int | None:
    """Tokens that cross-attention keeps for a request at most, where the file says; else somebody has to."""
    if family.cross == "source":
        return fields.integer("max_source_positions")
    if family.cross == "tiles" and isinstance(raw.get("vision_config"), Mapping):
        vision = Fields(raw["vision_config"], "vision_config.")
        side = vision.integer("image_size") // vision.integer("patch_size")
        return vision.integer("max_num_tiles", 4) * (side * side + 1)  # a tile is its patches and a class token
    return None


def _notes(name: str, fields: Fields) -> tuple[str, ...]:
    used = {key: value for key, value in fields.used.items() if value is not None}
    if not used:
        return ()
    listed = ", ".join(f"{key} {value}" for key, value in used.items())
    return (f"{fields.where.rstrip('.')} leaves out what {name} has by default: {listed}",)
