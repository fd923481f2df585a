"""What a model stores for each token and for each request: layers as records, and their cost on one rank.

What lives here: the records, and the rules by which tensor parallelism divides them (laws G1 to G3). What does not: how they
are read from a config.json (`kvsched.sizing.reading`), and how much memory there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.checks import at_least, at_least_or_none
from kvsched.sizing.dtypes import Dtype


def divisors(number: int) -> list[int]:
    """All divisors, in order. O(square root).

    >>> divisors(24)
    [1, 2, 3, 4, 6, 8, 12, 24]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def heads_per_rank(heads: int, tp: int, what: str = "key/value heads") -> int:
    """Heads that one of `tp` ranks holds: heads / tp, and one, replicated, where there are fewer heads than ranks (law G2).

    Raises `ConfigError` where neither divides the other.

    >>> heads_per_rank(8, 4), heads_per_rank(8, 32), heads_per_rank(2, 4), heads_per_rank(1, 8)
    (2, 1, 1, 1)
    """
    if heads % tp and tp % heads:
        allowed = divisors(heads)
        raise ConfigError(f"tp = {tp} does not divide {heads} {what}: it must be one of {', '.join(map(str, allowed))}, or a multiple of {heads}")
    return max(1, heads // tp)


@attrs.frozen
class Attention:
    """What one attention layer stores for one token: `heads` keys of `key` elements and as many values of `value`.

    window: tokens that it looks back, None for all. One latent vector that keys and values are worked out from (MLA) is one
    head with a key and no value: it is then replicated on every rank by the rule that holds for heads.
    """

    heads: int = attrs.field(validator=at_least(1))
    key: int = attrs.field(validator=at_least(1))
    value: int = attrs.field(validator=at_least(0))
    window: int | None = attrs.field(default=None, validator=at_least_or_none(1))

    def key_bytes(self, kv: Dtype, tp: int = 1) -> int:
        """Bytes of the keys of one token on one rank."""
        return heads_per_rank(self.heads, tp) * self.key * kv.width

    def value_bytes(self, kv: Dtype, tp: int = 1) -> int:
        """Bytes of the values of one token on one rank."""
        return heads_per_rank(self.heads, tp) * self.value * kv.width

    def cell(self, kv: Dtype, tp: int = 1) -> int:
        """Bytes that one token takes in this layer on one rank (law G1).

        >>> from kvsched.sizing.dtypes import dtype
        >>> Attention(heads=4, key=256, value=256).cell(dtype("fp8"))
        2048
        """
        return self.key_bytes(kv, tp) + self.value_bytes(kv, tp)


@attrs.frozen
class Channels:
    """Channels of a convolution that are split over ranks: `count` groups of `width`.

    replicated: whether a group may stand on several ranks, as heads of keys and values do.
    """

    count: int = attrs.field(validator=at_least(1))
    width: int = attrs.field(validator=at_least(1))
    replicated: bool = False

    def per_rank(self, tp: int) -> int:
        """Channels on one rank. Raises `ConfigError` where the groups cannot be split."""
        if self.replicated:
            return heads_per_rank(self.count, tp, "groups of the recurrent layers") * self.width
        if self.count % tp:
            raise ConfigError(f"tp = {tp} does not divide {self.count} heads or channels of the recurrent layers: it must divide them")
        return self.count // tp * self.width


@attrs.frozen
class Sites:
    """Bytes of one recurrent layer on one rank, by the place that allocates them (law G3)."""

    recurrent: int
    conv: int
    speculative_recurrent: int
    speculative_conv: int

    @property
    def state(self) -> int:
        """What requests keep between steps."""
        return self.recurrent + self.conv

    @property
    def speculative(self) -> int:
        """What drafts need besides: a state after each, so that those rejected can be taken back."""
        return self.speculative_recurrent + self.speculative_conv

    @property
    def total(self) -> int:
        """All four."""
        return self.state + self.speculative


@attrs.frozen
class Recurrent:
    """What one recurrent or linear-attention layer stores for one request, however long it is.

    heads: heads with a state of `head_elements` each, 0 for none. channels, taps: the convolution's channels, and how many
    past positions of each are kept (its width less one); no channels: no convolution.
    """

    heads: int = attrs.field(validator=at_least(0))
    head_elements: int = attrs.field(validator=at_least(0))
    channels: tuple[Channels, ...] = ()
    taps: int = attrs.field(default=0, validator=at_least(0))

    def state_elements(self, tp: int = 1) -> int:
        """Elements of one state on one rank."""
        return Channels(self.heads, self.head_elements).per_rank(tp) if self.heads else 0

    def conv_channels(self, tp: int = 1) -> int:
        """Channels of the convolution on one rank."""
        return sum(part.per_rank(tp) for part in self.channels)

    def slot(self, state: Dtype, conv: Dtype, tp: int = 1) -> int:
        """Bytes of one slot on one rank: a state, and the past of the convolution."""
        return self.sites(1, state, conv, tp).state

    def sites(
        self, slots: int, state: Dtype, conv: Dtype, tp: int = 1, *, speculative_slots: int = 0, draft_tokens: int = 0,
    ) -> Sites:
        """Bytes by allocation site. slots: as allocated, padding included (law G8: as allocated, not as budgeted).

        speculative_slots: requests that draft at once, padding included. draft_tokens: tokens verified in one step; the state
        is kept after each, and the convolution's window grows by one less than there are drafts.
        """
        one, channels = self.state_elements(tp) * state.width, self.conv_channels(tp)
        window = self.taps + draft_tokens - 1 if draft_tokens and channels else 0
        return Sites(
            recurrent=slots * one, conv=slots * channels * self.taps * conv.width,
            speculative_recurrent=speculative_slots * draft_tokens * one,
            speculative_conv=speculative_slots * channels * window * conv.width,
        )


@attrs.frozen
class Layer:
    """One layer, by what it stores. Most have one attention; some none, two, or a recurrent part beside it.

    cross: keys and values of what the request brings besides its tokens (an image, audio), kept once for each request.
    """

    attention: tuple[Attention, ...] = ()
    recurrent: Recurrent | None = None
    cross: Attention | None = None


@attrs.frozen(kw_only=True)
class Model:
    """What of a model decides how large its caches are.

    layers: in their order. query_heads: of attention; tensor parallelism must divide them. context: tokens that it was
    trained for, None where the config does not say. dtype: of weights and activations, and so of a KV cache that nobody says
    otherwise about. state_dtype: of recurrent states where the config says. cross_tokens: tokens of an image or of audio that
    cross-attention keeps for each request. notes: what a reader of the result should know about the reading.
    """

    model_type: str
    layers: tuple[Layer, ...]
    query_heads: int = attrs.field(validator=at_least(1))
    context: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    dtype: Dtype | None = None
    dtype_note: str = ""
    state_dtype: Dtype | None = None
    cross_tokens: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    notes: tuple[str, ...] = ()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Every attention of every layer, in order."""
        return tuple(one for layer in self.layers for one in layer.attention)

    @property
    def recurrents(self) -> tuple[Recurrent, ...]:
        """Every recurrent part, in order."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def crosses(self) -> tuple[Attention, ...]:
        """Every cross-attention, in order."""
        return tuple(layer.cross for layer in self.layers if layer.cross is not None)

    def check_tp(self, tp: int) -> None:
        """Raise `ConfigError` where the model cannot be split over `tp` ranks, naming what could."""
        fault = _fault(self, tp)
        if fault is not None:
            allowed = [n for n in divisors(self.query_heads) if _fault(self, n) is None]
            raise ConfigError(f"{fault}; tp may be {', '.join(map(str, allowed))}")


def _fault(model: Model, tp: int) -> str | None:
    """Why the model cannot be split over `tp` ranks, or None. O(distinct layers)."""
    if model.query_heads % tp:
        return f"tp = {tp} does not divide {model.query_heads} attention heads"
    try:
        for one in {*model.attentions, *model.crosses}:
            heads_per_rank(one.heads, tp)
        for part in set(model.recurrents):
            part.state_elements(tp)
            part.conv_channels(tp)
    except ConfigError as error:
        return str(error).split(":")[0]
    return None


def cell_bytes(attentions: Iterable[Attention], kv: Dtype, tp: int = 1, scale_bytes: int = 0) -> int:
    """Bytes of one token over several attentions on one rank.

    scale_bytes: what a quantised cache keeps for each token and attention besides the elements, as declared by its kernels.
    """
    return sum(one.cell(kv, tp) + scale_bytes for one in attentions)
