"""What a step costs in simulated seconds.

What lives here: the protocol, and the one model that ships. A better model (of a roofline, of measured steps) is a class
with the same method; `Plan` has the starts and lengths of every row for it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import attrs

from kvsched.errors import ConfigError
from kvsched.plan import Plan

LONGEST = 1e9
"""Seconds of a step, or of a token in it, at most: with it every sum of them is a finite number."""


@runtime_checkable
class CostModel(Protocol):
    """Says how long the host would take for a plan."""

    def step_seconds(self, plan: Plan) -> float:
        """Seconds that `plan`, which has rows, takes. The same plan must always cost the same."""


def _seconds(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST:
        raise ConfigError(f"{attribute.name} must be a number of seconds from 0 to {LONGEST:g}, not {value!r}")


@attrs.frozen
class LinearCost:
    """A step of n tokens takes t_base + t_tok * n seconds.

    The defaults are those of the peer measurements: 8 ms for a step that reads the weights once, 25 us per token.
    """

    t_base: float = attrs.field(default=0.008, validator=_seconds)
    t_tok: float = attrs.field(default=2.5e-5, validator=_seconds)

    def step_seconds(self, plan: Plan) -> float:
        return self.t_base + self.t_tok * plan.tokens
