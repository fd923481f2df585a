"""The result of sizing a deployment, and its words. What does not live here: how it is worked out (`kvsched.sizing.sized`)."""

from __future__ import annotations

from typing import Any

import attrs

from kvsched.sizing.account import Account
from kvsched.sizing.capacity import Concurrency, Resource, concurrency, max_servable_tokens
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.geometry import Model, cell_bytes
from kvsched.sizing.layout import StageCost
from kvsched.sizing.stages import Pool


@attrs.frozen
class StageReport:
    """One stage, seen from one of its ranks. capacity: tokens that it could hold, None for any number; the agreed count may be less."""

    own: StageCost
    account: Account
    capacity: int | None

    def item(self, name: str) -> int:
        """Bytes of the item of that name, 0 where there is none."""
        return sum(item.bytes for item in self.account.items if item.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        own = self.own
        return {
            "stage": own.number, "first_layer": own.layers.start, "layers": len(own.layers), "attention_layers": own.cost.attention,
            "recurrent_layers": own.cost.recurrent, "bytes_per_token_per_rank": own.token_bytes, "capacity_tokens": self.capacity,
            "budget_bytes": self.account.budget, "items": [item.as_dict() for item in self.account.items],
        }


@attrs.frozen(kw_only=True)
class Report:
    """What a deployment holds, and why. See `as_dict` for the words; bytes are of one rank of the binding stage.

    pool: the agreed pages; none where no memory was given. context: bound on P + N. max_running: requests that constant-size state is
    kept for. resources: every pool that a request draws on. concurrency: requests at once, by length.
    """

    model: Model
    deployment: Deployment
    stages: tuple[StageReport, ...]
    pool: Pool
    context: int | None
    max_running: int
    state_slots: int
    resources: tuple[Resource, ...]
    concurrency: tuple[Concurrency, ...]
    keeps_constants: bool
    warnings: tuple[str, ...]

    @property
    def pages(self) -> int:
        """Pages that every rank allocates."""
        return self.pool.pages

    @property
    def usable_pages(self) -> int:
        """Pages less those reserved: what a page pool can hand out."""
        return self.pages - self.deployment.reserved_pages

    @property
    def tokens(self) -> int:
        """Slots of the usable pages."""
        return self.usable_pages * self.deployment.page_size

    @property
    def binding(self) -> StageReport:
        """The stage that holds least."""
        return self.stages[self.pool.binding]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on one rank of the binding stage."""
        return self.binding.own.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank of the binding stage."""
        return self.token_bytes * (self.deployment.page_size // self.deployment.cp)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of recurrent state that one request keeps on one rank of the binding stage, without what drafts need."""
        return self.deployment.slots_per_request * self.binding.own.constants.slot

    @property
    def max_servable_tokens(self) -> int:
        """Largest P + N - 1 of one request."""
        return max_servable_tokens(self.usable_pages, self.deployment.page_size, self.context)

    @property
    def running(self) -> Concurrency:
        """How many requests run at once however short they are, and what says so."""
        return self.requests_at(1)

    def requests_at(self, slots: int) -> Concurrency:
        """How many requests of so many slots run at once."""
        return concurrency(slots, self.resources)

    def _pool_as_dict(self) -> dict[str, Any]:
        """What there is to say of the pool."""
        return {
            "tokens": self.tokens, "pages": self.pages, "usable_pages": self.usable_pages, "max_servable_tokens": self.max_servable_tokens,
            "binding": f"stage {self.pool.binding}", "binding_stage": self.pool.binding, "state_slots": self.state_slots,
            "max_running": self.running.requests, "max_running_binding": self.running.binding,
            "concurrency": [one.as_dict() for one in self.concurrency],
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, the words of `kvsched size --json`. Without memory, what concerns the pool is None."""
        at, own = self.deployment, self.binding.own.constants
        windowed = (one for number in self.binding.own.layers for one in self.model.layers[number].attention if one.window is not None)
        return {
            "model_type": self.model.model_type, "layers": len(self.model.layers), "tp": at.tp, "pp": at.pp, "cp": at.cp,
            "cut": [len(stage.own.layers) for stage in self.stages], "page_size": at.page_size, "kv_dtype": at.widths.kv.name,
            "bytes_per_token_per_rank": self.token_bytes, "bytes_per_page_per_rank": self.page_bytes,
            "window_bytes_per_token_per_rank": cell_bytes(windowed, at.widths.kv, at.tp, at.widths.scale_bytes), "context_limit": self.context,
            **(self._pool_as_dict() if self.pages else dict.fromkeys(POOL_KEYS)),
            "state_bytes_per_request": self.state_bytes_per_request,
            "state_dtype": at.widths.state.name if at.widths.state is not None else None,
            "speculative_bytes_per_request": own.speculative, "cross_bytes_per_request": own.cross, "window_bytes_per_request": own.windows,
            "items": [item.as_dict() for item in self.binding.account.items], "budget_bytes": self.binding.account.budget,
            "stages": [stage.as_dict() for stage in self.stages], "warnings": list(self.warnings),
        }


POOL_KEYS = (
    "tokens", "pages", "usable_pages", "max_servable_tokens", "binding", "binding_stage", "state_slots", "max_running", "max_running_binding",
    "concurrency",
)
"""Keys of a report that there is nothing to say of without memory."""
