"""What an attention layer stores for a token, by the reading that `Family.attention` names.

What does not live here: which layers have attention (`kvsched.sizing.placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsched.errors import ConfigError
from kvsched.sizing.families import Family
from kvsched.sizing.fields import Fields
from kvsched.sizing.geometry import Attention
from kvsched.sizing.placement import CHUNK, WINDOW


def first_of(fields: Fields, names: str) -> str:
    """The first key of `names` (with | between them) that has a value; the first of all where none has."""
    keys = names.split("|")
    return next((key for key in keys if fields.has(key)), keys[0])


def head_dim(family: Family, fields: Fields, heads: int) -> int:
    """Elements of a head: as stated, else hidden size / heads where the type allows that."""
    key = first_of(fields, family.head_dim)
    if family.head_dim_absent == "required" or fields.has(key):
        return fields.integer(key)
    return _quotient(fields, family.hidden, fields.integer(family.hidden), heads)


def _quotient(fields: Fields, key: str, width: int, heads: int) -> int:
    if width % heads:
        raise ConfigError(f"config.json: {fields.name(key)} = {width} is no multiple of {heads} heads, and there is no head_dim")
    return width // heads


def kv_heads(family: Family, fields: Fields, heads: int) -> int:
    """Key/value heads: as stated, else as many as query heads where the type allows that."""
    if not family.kv_heads:
        return heads
    return fields.integer(family.kv_heads, heads if family.kv_heads_absent == "heads" else None)


def window(fields: Fields, kind: str) -> int | None:
    """Tokens that a layer of this kind looks back; None for all."""
    if kind == WINDOW:
        return fields.integer(first_of(fields, "sliding_window|sliding_window_size"))
    return fields.integer("attention_chunk_size") if kind == CHUNK else None


Reader = Callable[[Family, Fields, int, str, int, int], tuple[Attention, ...]]
"""(family, fields, query heads, kind of the layer, its number, layers) to what it stores."""


def _heads(family: Family, fields: Fields, heads: int, kind: str, *_: int) -> tuple[Attention, ...]:
    width = head_dim(family, fields, heads)
    value = fields.integer("v_head_dim", width) if family.attention == "window_heads" else width
    return (Attention(kv_heads(family, fields, heads), width, value, window(fields, kind)),)


def _multi_query(family: Family, fields: Fields, heads: int, kind: str, *_: int) -> tuple[Attention, ...]:
    """One head for all queries where multi_query says so; groups where new_decoder_architecture does."""
    width = head_dim(family, fields, heads)
    if fields.flag("new_decoder_architecture", False):
        return (Attention(kv_heads(family, fields, heads), width, width, window(fields, kind)),)
    return (Attention(1 if fields.flag("multi_query", True) else heads, width, width, window(fields, kind)),)


def _attn_config(family: Family, fields: Fields, heads: int, kind: str, *_: int) -> tuple[Attention, ...]:
    """The number of key/value heads stands in attn_config, and is that of the queries where it does not."""
    width = _quotient(fields, family.hidden, fields.integer(family.hidden), heads)
    count = fields.inner("attn_config").integer("kv_n_heads", heads) if fields.has("attn_config") else heads
    return (Attention(count, width, width, window(fields, kind)),)


def _latent(_: Family, fields: Fields, *__: object) -> tuple[Attention, ...]:
    """One latent vector and one rotary key for all heads (law G2)."""
    return (Attention(1, fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"), 0),)


def _two_latents(family: Family, fields: Fields, *rest: object) -> tuple[Attention, ...]:
    return _latent(family, fields, *rest) * 2


def _shared_tail(family: Family, fields: Fields, heads: int, kind: str, number: int, layers: int) -> tuple[Attention, ...]:
    """The last num_kv_shared_layers layers read what an earlier one of their kind stored."""
    shared = fields.integer("num_kv_shared_layers", 0, low=0)
    return () if number >= layers - shared else _heads(family, fields, heads, kind)


def _global_heads(family: Family, fields: Fields, heads: int, kind: str, number: int, layers: int) -> tuple[Attention, ...]:
    """Full attention has heads of its own: global_head_dim wide, num_global_key_value_heads where keys are values."""
    own = _shared_tail(family, fields, heads, kind, number, layers)
    if not own or kind == WINDOW:
        return own
    width = fields.integer("global_head_dim", own[0].key)
    count = fields.integer("num_global_key_value_heads", own[0].heads) if fields.flag("attention_k_eq_v", False) else own[0].heads
    return (Attention(count, width, width),)


def _window_heads(family: Family, fields: Fields, heads: int, kind: str, *_: int) -> tuple[Attention, ...]:
    """Layers with a window have key/value heads of their own number: as stated, else twice as many."""
    (own,) = _heads(family, fields, heads, kind)
    if kind != WINDOW:
        return (own,)
    return (Attention(
        fields.integer("swa_num_key_value_heads", 2 * own.heads), fields.integer("swa_head_dim", own.key),
        fields.integer("swa_v_head_dim", own.value), own.window,
    ),)


def _twice_hidden(family: Family, fields: Fields, heads: int, kind: str, *_: int) -> tuple[Attention, ...]:
    """Attention over the hidden state beside the embedding: twice as wide."""
    width = fields.integer("attention_head_dim", _quotient(fields, family.hidden, 2 * fields.integer(family.hidden), heads))
    return (Attention(kv_heads(family, fields, heads), width, width, window(fields, kind)),)


ATTENTIONS: Mapping[str, Reader] = {
    "heads": _heads, "multi_query": _multi_query, "attn_config": _attn_config, "latent": _latent, "two_latents": _two_latents,
    "shared_tail": _shared_tail, "global_heads": _global_heads, "window_heads": _window_heads, "twice_hidden": _twice_hidden,
}
