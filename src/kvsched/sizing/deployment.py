"""What a host decides about a deployment, checked: splits, budgets, items, and what each request keeps besides its tokens.

What lives here: the record and its checks against a model. What does not: the sizing itself (`kvsched.sizing.report`).
"""

from __future__ import annotations

from typing import Any

import attrs

from kvsched.config import SchedulerConfig
from kvsched.errors import ConfigError
from kvsched.sizing.account import Item
from kvsched.sizing.checks import at_least, at_least_or_none
from kvsched.sizing.costs import Widths
from kvsched.sizing.geometry import Model
from kvsched.sizing.stages import check_cut, even_cut

_DEFAULT = SchedulerConfig(page_size=1)
MAX_RUNNING = _DEFAULT.max_running
"""Residents at most where nobody says: the scheduler's own default."""
STEP_TOKENS = _DEFAULT.max_step_tokens
"""Tokens of one step where nobody says, likewise."""


def _tuple(value: Any) -> Any:
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class Deployment:
    """One deployment. Bytes are of one rank; lists have an entry for each pipeline stage.

    page_size: tokens per page. tp: ranks that split the heads. pp: pipeline stages. cut: layers of each; None: `even_cut`. cp: ranks
    that split each page by tokens.
    widths: element types. budgets: bytes that the server may use. items: what is already spoken for, weights first. kv_bytes:
    instead of both, the bytes of the token pool itself; then nothing else is accounted for.
    context_limit: bound on P + N beside what the model was trained for. reserved_pages: pages never handed out.
    max_running: residents that constant-size state is kept for; None: as many as fit at the full context, at most the scheduler's
    default. state_slots: slots of recurrent state as allocated; None: slots_per_request for each of max_running, and transient_slots.
    draft_tokens: tokens verified per step by speculative decoding, whose states are kept too.
    recycle_interval: tokens after which layers with a window give pages back; None: they never do, and keep everything.
    step_tokens: tokens of one step, which such layers must stage. cross_tokens: tokens that cross-attention keeps per request.
    draft: a draft model with slots of its own beside every slot, on the last stage. extra_layers: further attention layers there, like the
    model's last (multi-token prediction).
    """

    widths: Widths
    page_size: int = attrs.field(default=16, validator=at_least(1))
    tp: int = attrs.field(default=1, validator=at_least(1))
    pp: int = attrs.field(default=1, validator=at_least(1))
    cp: int = attrs.field(default=1, validator=at_least(1))
    cut: tuple[int, ...] | None = attrs.field(default=None, converter=_tuple)
    budgets: tuple[int, ...] = attrs.field(default=(), converter=_tuple)
    items: tuple[tuple[Item, ...], ...] = attrs.field(default=(), converter=_tuple)
    kv_bytes: tuple[int, ...] | None = attrs.field(default=None, converter=_tuple)
    context_limit: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    reserved_pages: int = attrs.field(default=0, validator=at_least(0))
    max_running: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    state_slots: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    slots_per_request: int = attrs.field(default=1, validator=at_least(1))
    transient_slots: int = attrs.field(default=0, validator=at_least(0))
    draft_tokens: int = attrs.field(default=0, validator=at_least(0))
    recycle_interval: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    step_tokens: int = attrs.field(default=STEP_TOKENS, validator=at_least(1))
    cross_tokens: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    draft: Model | None = None
    extra_layers: int = attrs.field(default=0, validator=at_least(0))

    def __attrs_post_init__(self) -> None:
        if self.page_size % self.cp:
            raise ConfigError(f"page_size = {self.page_size} must be a multiple of cp = {self.cp}, which splits every page by tokens")
        if self.cut is not None and len(self.cut) != self.pp:
            raise ConfigError(f"cut must be of pp = {self.pp} stages, not of {len(self.cut)}")
        for name, values in (("budgets", self.budgets), ("kv_bytes", self.kv_bytes)):
            if values and len(values) != self.pp:
                raise ConfigError(f"{name} must be of pp = {self.pp} stages, not of {len(values)}")
            for value in values or ():
                at_least(0)(self, attrs.fields(Deployment).budgets if name == "budgets" else attrs.fields(Deployment).kv_bytes, value)
        if self.kv_bytes is None and (not self.budgets or len(self.items) != self.pp):
            raise ConfigError("budgets and items must be given for every stage, or kv_bytes instead")

    def stages_of(self, model: Model) -> tuple[int, ...]:
        """The cut of this model. Raises `ConfigError` for one that does not have every layer once."""
        layers = len(model.layers)
        return even_cut(layers, self.pp) if self.cut is None else check_cut(self.cut, layers)

    def context_of(self, model: Model) -> int | None:
        """The bound on P + N: what the model was trained for, and a cap of the host where there is one (case C87)."""
        known = [limit for limit in (model.context, self.context_limit) if limit is not None]
        return min(known) if known else None
