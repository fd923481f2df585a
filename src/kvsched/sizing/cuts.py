"""Cuts of a pipeline that was never booted: what each would hold under a stated reserve, and the best of all (laws G5 and G8).

What lives here: weights and state placed on stages by layer. What does not: predictions from a boot (`kvsched.sizing.forecast`), which know more.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.checks import integer
from kvsched.sizing.deployment import MAX_RUNNING, Deployment
from kvsched.sizing.geometry import Model
from kvsched.sizing.layout import Layout
from kvsched.sizing.report import Report
from kvsched.sizing.sized import size
from kvsched.sizing.stages import Stage, best_cut, check_cut


@attrs.frozen(kw_only=True)
class Placement:
    """What a stage's memory goes to besides its cache, on one rank.

    budgets: bytes by stage. layer_bytes: weights of one layer. fixed: bytes by stage that stay whatever the cut (embedding, head,
    activations, graphs). reserve: bytes by stage that a boot will keep back; it has no default, because it is read from boots and not modelled.
    """

    budgets: tuple[int, ...]
    layer_bytes: int
    fixed: tuple[int, ...]
    reserve: tuple[int, ...]
    layer_note: str = ""

    def __attrs_post_init__(self) -> None:
        integer("layer_bytes", self.layer_bytes)
        for name, values in (("fixed", self.fixed), ("reserve", self.reserve)):
            if len(values) != len(self.budgets):
                raise ConfigError(f"{name} must be of {len(self.budgets)} stages, not of {len(values)}")

    def spent(self, stage: int, layers: int) -> int:
        """Bytes that a stage with so many layers spends besides its cache and state."""
        return layers * self.layer_bytes + self.fixed[stage] + self.reserve[stage]

    def items(self, cut: Sequence[int]) -> tuple[tuple[Item, ...], ...]:
        """The line items of each stage under this cut."""
        return tuple(
            (
                Item("weights", layers * self.layer_bytes, Provenance.DERIVED, f"{layers} layers of {self.layer_bytes:,} B{self.layer_note}"),
                Item("fixed", fixed, Provenance.CONFIGURED), Item("reserve", reserve, Provenance.CONFIGURED),
            )
            for layers, fixed, reserve in zip(cut, self.fixed, self.reserve, strict=True)
        )


def sized_cut(model: Model, base: Deployment, placement: Placement, cut: Sequence[int]) -> Report:
    """What a cut holds. base: everything but the cut, its budgets and its items. Raises `ConfigError` as `size` does."""
    cut = check_cut(cut, len(model.layers))
    if len(cut) != len(placement.budgets):
        raise ConfigError(f"a cut must be of {len(placement.budgets)} stages, not of {len(cut)}")
    return size(model, attrs.evolve(
        base, pp=len(cut), cut=cut, budgets=placement.budgets, items=placement.items(cut), kv_bytes=None))


def search(model: Model, base: Deployment, placement: Placement) -> Report:
    """The cut with the largest pool, sized. O(stages x layers^2).

    Requests that keep state, windows or cross-attention must be counted by `base.max_running` or `base.state_slots`: a search cannot
    trade them against tokens. Raises `ConfigError` where they are not, or where no cut holds a page.
    """
    stages = len(placement.budgets)
    layout = Layout(model, base)
    running = base.max_running
    if layout.keeps_constants and running is None:
        if base.state_slots is None:
            raise ConfigError(
                "max_running or state_slots must be given: requests keep state besides their tokens, and a search cannot trade one for the other")
        running = MAX_RUNNING

    def stage_of(number: int, part: range) -> Stage:
        own = layout.stage(number, part, last=number == stages - 1)
        spent = placement.spent(number, len(part)) + layout.needed(own, 0, running or 0)
        return Stage(placement.budgets[number] - spent, own.token_bytes, part)

    return sized_cut(model, base, placement, best_cut(len(model.layers), stages, stage_of, base.page_size // base.cp))
