"""The token ratio: which share of its remaining new tokens a request is expected to write (law C1)."""

from __future__ import annotations

INITIAL = 0.7
"""Start of the estimate at conservativeness 1 (DESIGN C1; SGLang's default)."""
MINIMUM_SHARE = 0.14
"""The minimum as a share of the initial value (DESIGN C1)."""
DECAY_STEPS = 600
"""Decode steps without retraction from the initial value to the minimum (DESIGN C1)."""
GRACE_TOKENS = 20
"""Tokens per survivor that are taken as generated beyond the truth after a retraction (DESIGN C1)."""


class TokenRatio:
    """The estimate and its three movements: decay, jump after a retraction, reset when idle.

    >>> ratio = TokenRatio(1.0, "initial")
    >>> for _ in range(601):
    ...     ratio.decay()
    >>> round(ratio.value, 12)
    0.098
    >>> TokenRatio(2.0, "initial").value, TokenRatio(0.0, "initial").value
    (1.0, 0.0)
    """

    __slots__ = ("initial", "minimum", "start", "step", "value")

    def __init__(self, conservativeness: float, start: str) -> None:
        self.initial = min(INITIAL * conservativeness, 1.0)
        self.minimum = MINIMUM_SHARE * self.initial
        self.step = (self.initial - self.minimum) / DECAY_STEPS
        self.start = self.minimum if start == "minimum" else self.initial
        self.value = self.start

    def decay(self) -> None:
        """One decode step went by without a retraction."""
        value = self.value - self.step
        self.value = value if value > self.minimum else self.minimum

    def retracted(self, generated: int, survivors: int, max_new: int) -> None:
        """Estimate anew from those who stay: tokens they generated and may generate. No survivor: unchanged."""
        if survivors and max_new:
            self.value = max(self.minimum, min(1.0, (generated + GRACE_TOKENS * survivors) / max_new))

    def reset(self) -> None:
        """Nothing is left to do: back to the start value."""
        self.value = self.start
