"""Which layer has what: full attention, a window, a recurrent part, both, or nothing that is kept.

What lives here: the readings that `Family.placement` names. What does not: what a layer of each kind stores.
A file that states the kind of each layer (layer_types, layers_block_type) is taken at its word, whatever its reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsched.errors import ConfigError
from kvsched.sizing.fields import Fields

FULL, WINDOW, CHUNK, RECURRENT, BOTH, NONE, CROSS, FULL_AND_CROSS = (
    "full", "window", "chunk", "recurrent", "both", "none", "cross", "full and cross",
)
STATED_AS: Mapping[str, str] = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW, "chunked_attention": CHUNK, "linear_attention": RECURRENT,
    "mamba": RECURRENT, "conv": RECURRENT, "hybrid": BOTH, "moe": NONE, "mlp": NONE,
}
"""Kinds by the words that files use."""
LETTERS: Mapping[str, str] = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE}
"""Kinds by the letters of a hybrid_override_pattern."""


def kinds(placement: str, fields: Fields, layers: int) -> tuple[str, ...]:
    """The kind of each of `layers` layers. Raises `ConfigError` naming the key that does not fit."""
    for key in ("layer_types", "layers_block_type"):
        if isinstance(fields.get(key), (list, tuple)):
            return tuple(_stated(fields, key, word) for word in _as_many(fields, key, fields.words(key), layers))
    return PLACEMENTS[placement](fields, layers)


def _stated(fields: Fields, key: str, word: str) -> str:
    if word not in STATED_AS:
        raise ConfigError(f"config.json: {fields.name(key)} may hold {', '.join(STATED_AS)}, not {word!r}")
    return STATED_AS[word]


def _as_many(fields: Fields, key: str, found: tuple[str, ...], layers: int) -> tuple[str, ...]:
    if len(found) != layers:
        raise ConfigError(f"config.json: {fields.name(key)} must be of {layers} layers, not of {len(found)}")
    return found


def _full(_: Fields, layers: int) -> tuple[str, ...]:
    return (FULL,) * layers


def _needs_layer_types(fields: Fields, _: int) -> tuple[str, ...]:
    raise ConfigError(f"config.json has no {fields.name('layer_types')}, which must say of each layer what it is: one of {', '.join(STATED_AS)}")


def _full_or_stated(fields: Fields, layers: int) -> tuple[str, ...]:
    """Full attention where there is no window; where there is one, the file must say which layers have it."""
    return _needs_layer_types(fields, layers) if fields.has("sliding_window") else (FULL,) * layers


def _window_all(fields: Fields, layers: int) -> tuple[str, ...]:
    return (WINDOW if fields.has("sliding_window") else FULL,) * layers


def _window_from(fields: Fields, layers: int) -> tuple[str, ...]:
    """Windows from layer max_window_layers on, where use_sliding_window says so."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return (FULL,) * layers
    first = fields.integer("max_window_layers", low=0)
    return tuple(WINDOW if i >= first else FULL for i in range(layers))


def _window_even(_: Fields, layers: int) -> tuple[str, ...]:
    return tuple(FULL if i % 2 else WINDOW for i in range(layers))


def _window_but_every(default: int) -> Callable[[Fields, int], tuple[str, ...]]:
    """Windows, and full attention in every n-th layer; n is sliding_window_pattern where the file has it."""

    def place(fields: Fields, layers: int) -> tuple[str, ...]:
        every = fields.integer("sliding_window_pattern", fields.optional("_sliding_window_pattern") or default)
        return tuple(WINDOW if (i + 1) % every else FULL for i in range(layers)) if fields.has("sliding_window") else (FULL,) * layers

    return place


def _chunked(fields: Fields, layers: int) -> tuple[str, ...]:
    """Chunks in layers with rotary positions (no_rope_layers: 1), full attention in those without."""
    if not fields.has("attention_chunk_size"):
        return (FULL,) * layers
    if fields.get("no_rope_layers"):
        stated = fields.integers("no_rope_layers", 2)
        if len(stated) != layers:
            raise ConfigError(f"config.json: {fields.name('no_rope_layers')} must be of {layers} layers, not of {len(stated)}")
        return tuple(CHUNK if one else FULL for one in stated)
    every = fields.integer("no_rope_layer_interval", 4)
    return tuple(CHUNK if (i + 1) % every else FULL for i in range(layers))


def _hybrid_pattern(fields: Fields, layers: int) -> tuple[str, ...]:
    """1 for a window, 0 for full attention; without the list, full attention in the first and in every sixth layer."""
    if fields.has("hybrid_layer_pattern"):
        stated = fields.integers("hybrid_layer_pattern", 2)
        if len(stated) != layers:
            raise ConfigError(f"config.json: {fields.name('hybrid_layer_pattern')} must be of {layers} layers, not of {len(stated)}")
        return tuple(WINDOW if one else FULL for one in stated)
    return tuple(WINDOW if i and (i + 1) % 6 else FULL for i in range(layers))


def _interval(fields: Fields, layers: int) -> tuple[str, ...]:
    every = fields.integer("full_attention_interval", 4)
    return tuple(RECURRENT if (i + 1) % every else FULL for i in range(layers))


def _attention_indices(fields: Fields, layers: int) -> tuple[str, ...]:
    full = fields.integers("attn_layer_indices", layers)
    return tuple(FULL if i in full else RECURRENT for i in range(layers))


def _both(_: Fields, layers: int) -> tuple[str, ...]:
    return (BOTH,) * layers


def _hybrid_ids(fields: Fields, layers: int) -> tuple[str, ...]:
    both = fields.integers("hybrid_layer_ids", layers)
    return tuple(BOTH if i in both else RECURRENT for i in range(layers))


def _letters(fields: Fields, layers: int) -> tuple[str, ...]:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
        raise ConfigError(f"config.json: {fields.name('hybrid_override_pattern')} must be a string of {' '.join(LETTERS)}, not {pattern!r}")
    return tuple(LETTERS[letter] for letter in _as_many(fields, "hybrid_override_pattern", tuple(pattern), layers))


def _period(fields: Fields, layers: int) -> tuple[str, ...]:
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", low=0)
    return tuple(FULL if i % period == offset else RECURRENT for i in range(layers))


def _numbered_from_one(fields: Fields, layers: int) -> tuple[str, ...]:
    stated = fields.inner("linear_attn_config")
    full, linear = (stated.integers(key, layers + 1) for key in ("full_attn_layers", "kda_layers"))
    if sorted((*full, *linear)) != list(range(1, layers + 1)):
        raise ConfigError(f"config.json: {stated.name('full_attn_layers')} and kda_layers must name each of the layers 1 to {layers} once")
    return tuple(FULL if i + 1 in full else RECURRENT for i in range(layers))


def _conv(fields: Fields, layers: int) -> tuple[str, ...]:
    full = fields.integers("full_attn_idxs", layers)
    return tuple(FULL if i in full else RECURRENT for i in range(layers))


def _type_list(fields: Fields, layers: int) -> tuple[str, ...]:
    stated = fields.integers("attn_type_list", 2)
    if len(stated) != layers:
        raise ConfigError(f"config.json: {fields.name('attn_type_list')} must be of {layers} layers, not of {len(stated)}")
    return tuple(FULL if one else RECURRENT for one in stated)


def _cross_layers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Layers that attend to an image instead of to the text."""
    cross = fields.integers("cross_attention_layers", layers)
    return tuple(CROSS if i in cross else FULL for i in range(layers))


def _cross_all(_: Fields, layers: int) -> tuple[str, ...]:
    return (FULL_AND_CROSS,) * layers


PLACEMENTS: Mapping[str, Callable[[Fields, int], tuple[str, ...]]] = {
    "full": _full, "stated": _needs_layer_types, "full_or_stated": _full_or_stated, "window_all": _window_all, "window_from": _window_from, "window_even": _window_even,
    "window_but_every_4th": _window_but_every(4), "window_but_every_5th": _window_but_every(5), "window_but_every_6th": _window_but_every(6),
    "chunked": _chunked, "hybrid_pattern": _hybrid_pattern, "interval": _interval, "attention_indices": _attention_indices, "both": _both,
    "hybrid_ids": _hybrid_ids, "letters": _letters, "period": _period, "numbered_from_one": _numbered_from_one, "conv": _conv,
    "type_list": _type_list, "cross_layers": _cross_layers, "cross_all": _cross_all,
}
