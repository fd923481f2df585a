"""What a deployment costs on every stage, before anybody asks how much memory there is.

What lives here: bytes of a token and of what does not grow with tokens, by stage, and their sum for so many pages and requests. What does
not: budgets and the pool (`kvsched.sizing.report`).
"""

from __future__ import annotations

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.capacity import state_slots_for
from kvsched.sizing.costs import Cost, LayerCosts
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.geometry import Model, cell_bytes
from kvsched.sizing.stages import ranges
from kvsched.sizing.windows import window_peak
from kvsched.units import pages_for

CONSTANT = ("state", "speculative", "cross", "windows")
"""Items for what does not grow with tokens."""


@attrs.frozen
class Constants:
    """Bytes of one stage that do not grow with tokens, on one rank: for each running request, and once.

    state: of one slot. The others per request.
    """

    slot: int = 0
    speculative: int = 0
    cross: int = 0
    windows: int = 0
    staging: int = 0

    def per_request(self, slots_per_request: int) -> int:
        """What one more running request takes."""
        return slots_per_request * self.slot + self.speculative + self.cross + self.windows


@attrs.frozen
class StageCost:
    """One stage: its layers, what they cost, bytes of a token with what drafts keep, and what does not grow."""

    number: int
    layers: range
    cost: Cost
    token_bytes: int
    constants: Constants


class Layout:
    """A model under a deployment. Raises `ConfigError` for splits that cannot be. Asking for the cost of a stage is O(1)."""

    def __init__(self, model: Model, at: Deployment) -> None:
        self.model, self.at = model, at
        self.costs = LayerCosts(model, at.widths, at.tp, recycled=at.recycle_interval is not None, draft_tokens=at.draft_tokens)
        self.context = at.context_of(model)
        self.extra = _extra_token_bytes(model, at)
        self.cross_tokens = at.cross_tokens if at.cross_tokens is not None else model.cross_tokens
        if self.costs.all().cross and self.cross_tokens is None:
            raise ConfigError(
                "cross_tokens must be given: the model attends to something besides its tokens, and config.json does not say how much")
        if not self.costs.all().token:
            raise ConfigError("no layer keeps every token, so there is no token pool to size")

    @property
    def stages(self) -> tuple[StageCost, ...]:
        """The stages of the deployment's own cut."""
        parts = ranges(self.at.stages_of(self.model))
        return tuple(self.stage(number, part, last=number == self.at.pp - 1) for number, part in enumerate(parts))

    def stage(self, number: int, part: range, *, last: bool) -> StageCost:
        """A stage with these layers. What drafts keep stands on the last one."""
        cost = self.costs.of(part)
        windows = sum(self.window_pages(window) * self.at.page_size * bytes_ for window, bytes_ in cost.windows.items())
        own = Constants(
            slot=cost.slot, speculative=cost.speculative, cross=cost.cross * (self.cross_tokens or 0), windows=windows,
            staging=pages_for(self.at.step_tokens, self.at.page_size) * self.at.page_size * cost.window_token,
        )
        return StageCost(number, part, cost, cost.token + (self.extra if last else 0), own)

    def window_pages(self, window: int) -> int:
        """Pages that a request holds at most in a layer with this window."""
        peak = window_peak(window, self.at.page_size, self.at.recycle_interval or 0)
        return pages_for(peak if self.context is None else min(peak, self.context), self.at.page_size)

    def page_bytes(self, stage: StageCost) -> int:
        """Bytes of one page on one rank of a stage."""
        return stage.token_bytes * (self.at.page_size // self.at.cp)

    def slots(self, running: int) -> int:
        """Slots of recurrent state for so many running requests; 0 where the model has none."""
        if not self.costs.all().slot:
            return 0
        return self.at.state_slots or state_slots_for(running, self.at.slots_per_request, self.at.transient_slots)

    def constant_items(self, stage: StageCost, running: int) -> tuple[Item, ...]:
        """What so many running requests keep whatever their tokens, as items."""
        own, slots, drafting = stage.constants, self.slots(running), running + self.at.transient_slots
        sizes = (
            ("state", slots * own.slot, f"{slots} slots of {own.slot:,} B"),
            ("speculative", drafting * own.speculative, f"states after each of {self.at.draft_tokens} drafts, {drafting} slots"),
            ("cross", running * own.cross, f"cross-attention of {running} requests"),
            ("windows", running * own.windows + own.staging, f"windows of {running} requests and one step's tokens"),
        )
        return tuple(Item(name, size, Provenance.DERIVED, note) for name, size, note in sizes if size)

    def needed(self, stage: StageCost, pages: int, running: int) -> int:
        """Bytes that one rank of a stage needs for so many pages and running requests, without other items."""
        return pages * self.page_bytes(stage) + sum(item.bytes for item in self.constant_items(stage, running))

    @property
    def keeps_constants(self) -> bool:
        """Whether running requests take room that does not grow with their tokens."""
        whole = self.stage(0, range(len(self.model.layers)), last=True)
        return whole.constants.per_request(1) > 0


def _extra_token_bytes(model: Model, at: Deployment) -> int:
    """Bytes of one token that the last stage keeps for a draft model, and for layers that predict further tokens."""
    extra = at.extra_layers * (model.attentions[-1].cell(at.widths.kv, at.tp) + at.widths.scale_bytes)
    if at.draft is not None:
        if at.draft.recurrents:
            raise ConfigError("the draft model has recurrent layers, which a draft must not have: its state could not be taken back")
        at.draft.check_tp(at.tp)
        extra += cell_bytes(at.draft.attentions, at.widths.kv, at.tp, at.widths.scale_bytes)
    return extra
