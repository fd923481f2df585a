"""What a recurrent or linear-attention layer stores for a request, by the reading that `Family.recurrent` names.

What does not live here: which layers are recurrent (`kvsched.sizing.placement`), and how many slots there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsched.errors import ConfigError
from kvsched.sizing.attention import head_dim
from kvsched.sizing.families import Family
from kvsched.sizing.fields import Fields
from kvsched.sizing.geometry import Channels, Recurrent


def _mamba2(family: Family, fields: Fields, _: int) -> Recurrent:
    """A state of head_dim x state size for each head; the convolution runs over the heads and over B and C of each group.

    The groups are replicated where there are fewer of them than ranks. A head_dim of "auto" is the inner width / heads.
    """
    keys = family.keys
    heads, state = fields.integer(keys["heads"]), fields.integer(keys["state"])
    width = _inner_width(family, fields)
    stated = fields.get(keys["head_dim"]) if "head_dim" in keys else None
    if stated is None or stated == "auto":
        if width is None or width % heads:
            raise ConfigError(f"config.json: {fields.name(keys['heads'])} = {heads} must divide the inner width, {width}")
        one = width // heads
    else:
        one = fields.integer(keys["head_dim"])
    if width is not None and one * heads != width:
        raise ConfigError(f"config.json: {fields.name(keys['heads'])} x head dim = {heads} x {one} must be the inner width, {width}")
    groups = Channels(fields.integer(keys["groups"]), 2 * state, replicated=True)
    return Recurrent(heads, one * state, (Channels(heads, one), groups), fields.integer(keys["taps"], low=2) - 1)


def _inner_width(family: Family, fields: Fields) -> int | None:
    keys = family.keys
    if "width" in keys and fields.has(keys["width"]):
        return fields.integer(keys["width"])
    return fields.integer(keys["expand"]) * fields.integer(family.hidden) if "expand" in keys else None


def _mamba1(family: Family, fields: Fields, _: int) -> Recurrent:
    """A state of mamba_d_state for each channel of the inner width, and a convolution over those channels."""
    width = fields.integer("mamba_expand") * fields.integer(family.hidden)
    return Recurrent(width, fields.integer("mamba_d_state"), (Channels(width, 1),), fields.integer("mamba_d_conv", low=2) - 1)


def _delta_net(_: Family, fields: Fields, __: int) -> Recurrent:
    """A state of value dim x key dim for each value head; the convolution runs over queries, keys and values (law G3)."""
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    taps = fields.integer("linear_conv_kernel_dim", low=2) - 1
    return Recurrent(values, value * key, (Channels(keys, 2 * key), Channels(values, value)), taps)


def _kda(_: Family, fields: Fields, __: int) -> Recurrent:
    """A square state for each head; one convolution each over queries, keys and values."""
    stated = fields.inner("linear_attn_config")
    heads, one = stated.integer("num_heads"), stated.integer("head_dim")
    return Recurrent(heads, one * one, (Channels(heads, 3 * one),), stated.integer("short_conv_kernel_size", low=2) - 1)


def _short_conv(family: Family, fields: Fields, _: int) -> Recurrent:
    """A convolution over the hidden state, and no other memory."""
    return Recurrent(0, 0, (Channels(fields.integer(family.hidden), 1),), fields.integer("conv_L_cache", low=2) - 1)


def _lightning(family: Family, fields: Fields, heads: int) -> Recurrent:
    """A square state for each query head, and no convolution."""
    one = head_dim(family, fields, heads)
    return Recurrent(heads, one * one)


RECURRENTS: Mapping[str, Callable[[Family, Fields, int], Recurrent]] = {
    "mamba2": _mamba2, "mamba1": _mamba1, "delta_net": _delta_net, "kda": _kda, "short_conv": _short_conv, "lightning": _lightning,
}
