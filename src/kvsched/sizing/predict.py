"""What may be said of a pool that was never booted, and how loudly.

What lives here: the caps and floors that predictions stand under (laws G8 to G10). What does not: the prediction of a cut, which needs a
boot (`kvsched.sizing.boot`).
"""

from __future__ import annotations

from fractions import Fraction

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import MIB
from kvsched.sizing.checks import integer

RESERVE_BAND = 500 * MIB
"""How far a reserve was off from one boot to the next: predictions are printed with that much either way (law G8)."""
NOISE_FLOOR = 0.141
"""Relative difference that was measured between equal set-ups: a smaller predicted gain is no finding (law G10)."""


def band_tokens(token_bytes: int, band: int = RESERVE_BAND) -> int:
    """The band in tokens of a stage where a token costs so many bytes.

    >>> band_tokens(8 * 2048)
    32000
    """
    if integer("token_bytes", token_bytes, 1) and band < 0:
        raise ConfigError(f"band must be at least 0 bytes, not {band}")
    return band // token_bytes


def micro_batch_cap(running: int, stages: int, *, decode_in_stages: bool = True) -> int:
    """Most requests in one micro-batch: an even share of the running ones, or all where decode runs in another layout (law G9).

    Never below 1, and the full count where there are no stages to share between.

    >>> micro_batch_cap(4, 3), micro_batch_cap(12, 3), micro_batch_cap(8, 2), micro_batch_cap(7, 2)
    (1, 4, 4, 3)
    >>> micro_batch_cap(4, 3, decode_in_stages=False), micro_batch_cap(4, 0), micro_batch_cap(0, 3)
    (4, 4, 1)
    """
    return max(1, running // stages if decode_in_stages and stages > 0 else running)


@attrs.frozen
class Comparison:
    """A predicted pool beside the present one. change: relative. finding: whether it is beyond the noise floor."""

    present: int
    predicted: int
    noise_floor: float

    @property
    def change(self) -> float:
        """Relative change, 0.12 for 12 % more."""
        return self.predicted / self.present - 1

    @property
    def finding(self) -> bool:
        """Whether the change is larger than what equal set-ups differ by."""
        return abs(self.predicted - self.present) > Fraction(str(self.noise_floor)) * self.present  # exact at the floor itself

    def __str__(self) -> str:
        verdict = "" if self.finding else f", below the noise floor of {self.noise_floor:.1%}: no finding"
        return f"{self.change:+.1%}{verdict}"


def compare(present: int, predicted: int, noise_floor: float = NOISE_FLOOR) -> Comparison:
    """Hold a predicted pool against the present one, both in tokens.

    >>> str(compare(1000, 1120)), compare(1000, 1818).finding
    ('+12.0%, below the noise floor of 14.1%: no finding', True)
    """
    if integer("present", present, 1) and not 0 <= noise_floor < float("inf"):
        raise ConfigError(f"noise_floor must be a share of at least 0, not {noise_floor!r}")
    return Comparison(present, integer("predicted", predicted), noise_floor)
