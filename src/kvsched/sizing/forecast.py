"""The pool of a cut that was never booted, from a boot of another cut and a reserve that somebody states (law G8).

What lives here: how bytes move with layers, and the bound that a stage sets which stays as it is. What does not: the boot's own figures
(`kvsched.sizing.boot`), and any guess of a reserve.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import MIB, gib
from kvsched.sizing.boot import Boot
from kvsched.sizing.predict import RESERVE_BAND, Comparison, band_tokens, compare
from kvsched.sizing.stages import Cap, Pool, Stage, best_cut, caps, check_cut, pool, ranges


@attrs.frozen
class Layers:
    """Which layers have attention and which are recurrent: one flag each for every layer of the model, in order."""

    attention: tuple[int, ...]
    recurrent: tuple[int, ...]

    def count(self, part: range) -> tuple[int, int]:
        """(attention, recurrent) layers among these."""
        return sum(self.attention[part.start : part.stop]), sum(self.recurrent[part.start : part.stop])


@attrs.frozen(kw_only=True)
class Forecast:
    """A predicted pool. band: bytes by which the stated reserve may be off. caps: bounds from stages that the cut keeps, tightest first.

    tokens: the minimum of the prediction and the caps. binding: number of the stage that sets it. measured: whether that stage was booted
    as it is, so that the bound is no prediction.
    """

    boot: Boot
    cut: tuple[int, ...]
    reserve: tuple[int, ...]
    predicted: Pool
    caps: tuple[Cap, ...]
    band: int
    comparison: Comparison

    @property
    def tokens(self) -> int:
        """The pool, in tokens."""
        return min(self.predicted.tokens, *(cap.tokens for cap in self.caps)) if self.caps else self.predicted.tokens

    @property
    def measured(self) -> bool:
        """Whether the binding stage is one that the boot measured."""
        return bool(self.caps) and self.caps[0].tokens <= self.predicted.tokens

    @property
    def binding(self) -> int:
        """Number of the binding stage."""
        return self.caps[0].stage if self.measured else self.predicted.binding

    @property
    def band_tokens(self) -> int:
        """The band in tokens: of the binding stage, and none where that one was measured."""
        return 0 if self.measured else band_tokens(self.predicted.stages[self.predicted.binding].token_bytes, self.band)

    def __str__(self) -> str:
        cut = ", ".join(map(str, self.cut))
        if self.measured:
            kept = {cap.stage for cap in self.caps}
            others = [tokens for number, tokens in enumerate(self.predicted.capacities) if number not in kept and tokens is not None]
            allowed = f" (the stages that change are predicted to allow {min(others):,})" if others else ""
            return f"[{cut}]: {self.tokens:,} tokens at most: stage {self.binding} keeps its layers, and held that many when booted{allowed}"
        return (
            f"[{cut}]: {self.tokens:,} tokens, +-{self.band_tokens:,} ({self.band_tokens / max(1, self.tokens):.0%}, for +-{self.band // MIB} MiB of "
            f"reserve), bound by stage {self.binding}; predicted, never booted; {self.comparison} against the boot")


def forecast(
    boot: Boot, layers: Layers, cut: Sequence[int], *, reserve: Sequence[int] | None, layer_bytes: int, band: int = RESERVE_BAND,
    noise_floor: float | None = None,
) -> Forecast:
    """Predict the pool of another cut.

    reserve: bytes that each stage will keep back. It has no default and no model: without it, `ConfigError`. layer_bytes: weights of one
    layer on one rank, which move with it; state moves with recurrent layers, as allocated and not as budgeted; everything else stays.
    The boot must verify first. Raises `BrokenChain` where it does not.
    """
    cut = check_cut(cut, len(layers.attention))
    boot.verify()
    check_layers(boot, layers)
    if reserve is None:
        raise ConfigError(
            "reserve must be given for a cut that was never booted: bytes for each stage. It is read from boots and not modelled; this "
            f"one kept back {', '.join(f'{one // MIB:,}' for one in boot.reserves)} MiB")
    if len(cut) != len(boot.stages) or len(reserve) != len(cut):
        raise ConfigError(f"cut and reserve must be of {len(boot.stages)} stages, as the boot is, not of {len(cut)} and {len(reserve)}")
    stages = [_moved(boot, layers, number, part, reserve[number], layer_bytes) for number, part in enumerate(ranges(cut))]
    predicted = pool(stages, boot.page_size)
    known = caps(boot.pool(), cut)
    tokens = min(predicted.tokens, *(cap.tokens for cap in known)) if known else predicted.tokens
    against = compare(boot.tokens, tokens) if noise_floor is None else compare(boot.tokens, tokens, noise_floor)
    return Forecast(
        boot=boot, cut=cut, reserve=tuple(reserve), predicted=predicted, caps=known, band=band, comparison=against,
    )


def best_forecast(
    boot: Boot, layers: Layers, *, reserve: Sequence[int] | None, layer_bytes: int, band: int = RESERVE_BAND, noise_floor: float | None = None,
) -> Forecast:
    """The forecast of the cut that is predicted to hold most. Arguments and errors as for `forecast`."""
    if reserve is None:
        return forecast(boot, layers, boot.cut, reserve=None, layer_bytes=layer_bytes)  # says what is missing

    def stage_of(number: int, part: range) -> Stage:
        return _moved(boot, layers, number, part, reserve[number], layer_bytes)

    cut = best_cut(len(layers.attention), len(boot.stages), stage_of, boot.page_size)
    return forecast(boot, layers, cut, reserve=reserve, layer_bytes=layer_bytes, band=band, noise_floor=noise_floor)


def check_layers(boot: Boot, layers: Layers) -> None:
    """Raise `ConfigError` unless the boot's stages have the layers that the model has there."""
    for number, (part, stage) in enumerate(zip(ranges(boot.cut), boot.stages, strict=True)):
        if sum(boot.cut) != len(layers.attention) or layers.count(part) != (stage.attention_layers, stage.recurrent_layers):
            found = layers.count(part) if part.stop <= len(layers.attention) else "none"
            raise ConfigError(
                f"boot {boot.name!r}: stage {number} has {stage.attention_layers} attention and {stage.recurrent_layers} recurrent layers, and "
                f"layers {part.start} to {part.stop - 1} of the model have {found}")


def _moved(boot: Boot, layers: Layers, number: int, part: range, reserve: int, layer_bytes: int) -> Stage:
    """A stage of the boot with other layers on it.

    Layers that come or go take their weights along, and their state as allocated. What the boot booked for state too low is inside the
    reserve that it kept back, so that with the same layers and the same reserve the stage is what it was.
    """
    old = boot.stages[number]
    attention, recurrent = layers.count(part)
    own = [one.allocated_state // one.recurrent_layers for one in (old, *boot.stages) if one.recurrent_layers]
    moved = (len(part) - old.layers) * layer_bytes + (recurrent - old.recurrent_layers) * (own[0] if own else 0)
    return Stage(old.rest - moved - reserve, boot.cell * attention, part)


def describe_reserve(boot: Boot) -> str:
    """What the boot kept back, stage by stage."""
    return ", ".join(f"stage {number} {gib(one)} GiB" for number, one in enumerate(boot.reserves))
