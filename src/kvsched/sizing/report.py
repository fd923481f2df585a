"""Sizing a deployment: from a model and what a host decides to tokens, pages and the reasons beside them.

What lives here: `size` and its result. What does not: flags and files (`kvsched.cli.size`), and the parts it is put together from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Account, Item, Overbooked, Provenance
from kvsched.sizing.amounts import gib
from kvsched.sizing.capacity import Concurrency, Resource, concurrency, max_servable_tokens, running_on, state_slots_for
from kvsched.sizing.costs import Cost, LayerCosts, speculative_bytes
from kvsched.sizing.deployment import MAX_RUNNING, Deployment
from kvsched.sizing.geometry import Model, cell_bytes
from kvsched.sizing.stages import Pool, Stage, pool, ranges
from kvsched.sizing.windows import window_peak
from kvsched.units import pages_for

LENGTHS = (1024, 4096, 16384, 65536, 262144)
"""Lengths that a report shows concurrency for, beside the longest request."""
LARGEST_POOL = 2**31 - 1
"""Pages a pool can have: page ids are int32."""


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
class StageReport:
    """One stage, seen from one of its ranks. capacity: tokens that it could hold; the agreed count may be less."""

    number: int
    layers: range
    cost: Cost
    token_bytes: int
    constants: Constants
    account: Account
    capacity: int | None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "stage": self.number, "first_layer": self.layers.start, "layers": len(self.layers), "attention_layers": self.cost.attention,
            "recurrent_layers": self.cost.recurrent, "bytes_per_token_per_rank": self.token_bytes, "capacity_tokens": self.capacity,
            "budget_bytes": self.account.budget, "items": [item.as_dict() for item in self.account.items],
        }


@attrs.frozen(kw_only=True)
class Report:
    """What a deployment holds, and why. See `as_dict` for the words; bytes are of one rank of the binding stage."""

    model: Model
    deployment: Deployment
    stages: tuple[StageReport, ...]
    pool: Pool
    context: int | None
    max_running: int
    state_slots: int
    running: Concurrency
    concurrency: tuple[Concurrency, ...]
    resources: tuple[Resource, ...]
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
        return self.binding.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank of the binding stage."""
        return self.token_bytes * (self.deployment.page_size // self.deployment.cp)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of recurrent state that one request keeps on one rank of the binding stage, without what drafts need."""
        return self.deployment.slots_per_request * self.binding.constants.slot

    @property
    def max_servable_tokens(self) -> int:
        """Largest P + N - 1 of one request."""
        return max_servable_tokens(self.usable_pages, self.deployment.page_size, self.context)

    def requests_at(self, slots: int) -> Concurrency:
        """How many requests of so many slots run at once."""
        return concurrency(slots, self.resources)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, the words of `kvsched size --json`."""
        at, own = self.deployment, self.binding.constants
        return {
            "model_type": self.model.model_type, "layers": len(self.model.layers), "tp": at.tp, "pp": at.pp, "cp": at.cp,
            "cut": [len(stage.layers) for stage in self.stages], "page_size": at.page_size, "kv_dtype": at.widths.kv.name,
            "bytes_per_token_per_rank": self.token_bytes, "bytes_per_page_per_rank": self.page_bytes,
            "window_bytes_per_token_per_rank": _window_bytes(self), "tokens": self.tokens, "pages": self.pages,
            "usable_pages": self.usable_pages, "context_limit": self.context, "max_servable_tokens": self.max_servable_tokens,
            "binding": f"stage {self.binding.number}", "binding_stage": self.binding.number,
            "max_running": self.running.requests, "max_running_binding": self.running.binding,
            "state_bytes_per_request": self.state_bytes_per_request, "state_slots": self.state_slots,
            "state_dtype": at.widths.state.name if at.widths.state is not None else None,
            "speculative_bytes_per_request": own.speculative, "cross_bytes_per_request": own.cross, "window_bytes_per_request": own.windows,
            "concurrency": [one.as_dict() for one in self.concurrency],
            "items": [item.as_dict() for item in self.binding.account.items], "budget_bytes": self.binding.account.budget,
            "stages": [stage.as_dict() for stage in self.stages], "warnings": list(self.warnings),
        }


def _window_bytes(report: Report) -> int:
    """Bytes of one token in layers with a window, wherever they are kept."""
    at = report.deployment
    windowed = (one for number in report.binding.layers for one in report.model.layers[number].attention if one.window is not None)
    return cell_bytes(windowed, at.widths.kv, at.tp, at.widths.scale_bytes)


def size(model: Model, deployment: Deployment) -> Report:
    """Size a deployment of a model.

    Raises `ConfigError` for splits that cannot be and budgets that hold nothing, naming the largest item. Deterministic. O(layers).
    """
    at = deployment
    costs = LayerCosts(model, at.widths, at.tp, recycled=at.recycle_interval is not None)
    parts = ranges(at.stages_of(model))
    context = at.context_of(model)
    extra = _extra_token_bytes(model, at)
    cost = [costs.of(part) for part in parts]
    token = [one.token + (extra if number == at.pp - 1 else 0) for number, one in enumerate(cost)]
    constants = [_constants(model, at, one, part, context) for one, part in zip(cost, parts, strict=True)]
    if not sum(token):
        raise ConfigError("no layer keeps every token, so there is no token pool to size")
    accounts = _given(at)
    max_running, slots = _running(at, constants, token, accounts, context)
    accounts = [
        account if at.kv_bytes is not None else attrs.evolve(account, items=(*account.items, *_constant_items(at, own, max_running, slots)))
        for account, own in zip(accounts, constants, strict=True)
    ]
    for account in accounts:
        _check(account, max_running, slots, constants)
    agreed = pool([Stage(*three) for three in zip((a.rest for a in accounts), token, parts, strict=True)], at.page_size // at.cp)
    _check_pages(at, agreed, accounts, token)
    stages = tuple(
        StageReport(
            number, part, one, bytes_, own, _with_kv(account, agreed.allocated(number)),
            None if capacity is None else capacity * at.cp)
        for number, (part, one, bytes_, own, account, capacity)
        in enumerate(zip(parts, cost, token, constants, accounts, agreed.capacities, strict=True))
    )
    resources = _resources(at, agreed.pages - at.reserved_pages, constants, max_running, slots, costs, context)
    longest = max_servable_tokens(agreed.pages - at.reserved_pages, at.page_size, context)
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    return Report(
        model=model, deployment=at, stages=stages, pool=agreed, context=context, max_running=max_running, state_slots=slots,
        running=concurrency(1, resources), concurrency=tuple(concurrency(length, resources) for length in lengths), resources=resources,
        warnings=_warnings(model, at, costs, constants, context, agreed),
    )


def _extra_token_bytes(model: Model, at: Deployment) -> int:
    """Bytes of one token that the last stage keeps for a draft model, and for layers that predict further tokens."""
    extra = at.extra_layers * (model.attentions[-1].cell(at.widths.kv, at.tp) + at.widths.scale_bytes)
    if at.draft is not None:
        if at.draft.recurrents:
            raise ConfigError("the draft model has recurrent layers, which a draft must not have: its state could not be taken back")
        at.draft.check_tp(at.tp)
        extra += cell_bytes(at.draft.attentions, at.widths.kv, at.tp, at.widths.scale_bytes)
    return extra


def _constants(model: Model, at: Deployment, cost: Cost, part: range, context: int | None) -> Constants:
    cross_tokens = at.cross_tokens if at.cross_tokens is not None else model.cross_tokens
    if cost.cross and cross_tokens is None:
        raise ConfigError("cross_tokens must be given: the model attends to something besides its tokens, and config.json does not say how much")
    windows = sum(_window_pages(at, window, context) * at.page_size * bytes_ for window, bytes_ in cost.windows.items())
    return Constants(
        slot=cost.slot, speculative=speculative_bytes(model, at.widths, part, at.tp, 1, at.draft_tokens),
        cross=cost.cross * (cross_tokens or 0), windows=windows,
        staging=pages_for(at.step_tokens, at.page_size) * at.page_size * cost.window_token,
    )


def _window_pages(at: Deployment, window: int, context: int | None) -> int:
    """Pages that a request holds at most in a layer with this window."""
    peak = window_peak(window, at.page_size, at.recycle_interval or 0)
    return pages_for(peak if context is None else min(peak, context), at.page_size)


def _given(at: Deployment) -> list[Account]:
    """The accounts of the stages before anything is derived."""
    if at.kv_bytes is not None:
        return [Account(size, (), f"stage {number}") for number, size in enumerate(at.kv_bytes)]
    accounts = [
        Account(budget, items, f"stage {number}" if at.pp > 1 else "")
        for number, (budget, items) in enumerate(zip(at.budgets, at.items, strict=True))
    ]
    for account in accounts:
        account.check()
    return accounts


def _running(
    at: Deployment, constants: Sequence[Constants], token: Sequence[int], accounts: Sequence[Account], context: int | None,
) -> tuple[int, int]:
    """Residents that constant-size state is kept for, and slots of recurrent state."""
    stateful = any(own.slot for own in constants)
    if at.state_slots is not None and stateful:
        most = running_on(at.state_slots, at.slots_per_request, at.transient_slots)
        if most < 1:
            raise ConfigError(
                f"state_slots must be at least {state_slots_for(1, at.slots_per_request, at.transient_slots)} for one request to run, "
                f"not {at.state_slots}")
        return min(most, at.max_running or MAX_RUNNING), at.state_slots
    running = at.max_running
    if running is None:
        running = MAX_RUNNING
        if at.kv_bytes is None and any(own.per_request(1) for own in constants):
            running = _as_many_as_fit(at, constants, token, accounts, context)
    return running, state_slots_for(running, at.slots_per_request, at.transient_slots) if stateful else 0


def _as_many_as_fit(
    at: Deployment, constants: Sequence[Constants], token: Sequence[int], accounts: Sequence[Account], context: int | None,
) -> int:
    """Requests of the full context that fit beside each other, at least one and at most the scheduler's default."""
    found = MAX_RUNNING
    pages = pages_for((context or 2) - 1, at.page_size)
    for own, bytes_, account in zip(constants, token, accounts, strict=True):
        once = own.staging + at.transient_slots * (own.slot + own.speculative) + at.reserved_pages * bytes_ * at.page_size // at.cp
        each = own.per_request(at.slots_per_request) + pages * bytes_ * at.page_size // at.cp
        found = min(found, (account.rest - once) // each if each else found)
    return max(1, found)


def _constant_items(at: Deployment, own: Constants, running: int, slots: int) -> tuple[Item, ...]:
    """What is kept whatever the tokens, as items."""
    drafting = (running + at.transient_slots) * own.speculative
    sizes = (
        ("state", slots * own.slot, f"{slots} slots of {own.slot:,} B"),
        ("speculative", drafting, f"states after each of {at.draft_tokens} drafts, {running + at.transient_slots} slots"),
        ("cross", running * own.cross, f"cross-attention of {running} requests"),
        ("windows", running * own.windows + own.staging, f"windows of {running} requests and one step's tokens"),
    )
    return tuple(Item(name, size, Provenance.DERIVED, note) for name, size, note in sizes if size)


def _check(account: Account, running: int, slots: int, constants: Sequence[Constants]) -> None:
    try:
        account.check()
    except Overbooked as error:
        if account.largest().name not in {"state", "speculative", "cross", "windows"}:
            raise
        kept = f"{slots} slots" if any(own.slot for own in constants) else f"{running} requests"
        raise Overbooked(f"{error}; it is kept for {kept}: a smaller max_running needs less", error.largest) from None


def _check_pages(at: Deployment, agreed: Pool, accounts: Sequence[Account], token: Sequence[int]) -> None:
    """Raise `ConfigError` for a pool that can hand out no page, or more than page ids can count."""
    if agreed.pages <= at.reserved_pages:
        account, page = accounts[agreed.binding], token[agreed.binding] * at.page_size // at.cp
        most = max(account.items, key=lambda item: item.bytes, default=None)
        largest = f"; the largest item is {most.name} with {gib(most.bytes)} GiB" if most is not None else ""
        place = f"stage {agreed.binding}: " if at.pp > 1 else ""
        raise ConfigError(
            f"{place}{gib(account.rest)} GiB are left for pages of {page:,} B, which is {agreed.pages} of them, and {at.reserved_pages + 1} are "
            f"needed at least{largest}")
    if agreed.pages > LARGEST_POOL:
        raise ConfigError(f"{agreed.pages:,} pages are more than page ids can count, {LARGEST_POOL:,}: a larger page_size needs fewer")


def _with_kv(account: Account, allocated: int) -> Account:
    """The account with its token pool, and what is left unused: less than a page, or what the agreed count does not need."""
    kv = Item("kv", allocated, Provenance.DERIVED, "the agreed pages")
    return attrs.evolve(account, items=(*account.items, kv, Item("unused", account.rest - allocated, Provenance.DERIVED)))


def _resources(
    at: Deployment, usable: int, constants: Sequence[Constants], running: int, slots: int, costs: LayerCosts, context: int | None,
) -> tuple[Resource, ...]:
    """Every pool that a request draws on."""
    out = [Resource("pages", usable, page_size=at.page_size)]
    if slots:
        out.append(Resource("state_slots", max(0, slots - at.transient_slots), fixed=at.slots_per_request))
    for window in costs.windows:
        pages = _window_pages(at, window, context)
        out.append(Resource("window_pages", running * pages, page_size=at.page_size, most=pages * at.page_size))
    if any(own.cross for own in constants) and at.kv_bytes is None:
        out.append(Resource("cross", running, fixed=1))
    if at.max_running is not None or len(out) > 1:
        out.append(Resource("max_running", running, fixed=1))
    return tuple(out)


def _warnings(
    model: Model, at: Deployment, costs: LayerCosts, constants: Sequence[Constants], context: int | None, agreed: Pool,
) -> tuple[str, ...]:
    out = list(model.notes)
    windowed = [one for one in model.attentions if one.window is not None]
    total = len(model.attentions)
    if windowed and not costs.windows:
        sizes = ", ".join(f"{one:,}" for one in sorted({one.window for one in windowed if one.window is not None}))
        how = (
            "no layer keeps everything, so one pool holds all tokens" if len(windowed) == total
            else "they are charged for every token, as a host with one page table keeps them; --recycle-windows sizes pools of their own"
        )
        out.append(f"{len(windowed)} of {total} attention layers look back only {sizes} tokens: {how}")
    if any(own.per_request(1) for own in constants) and at.kv_bytes is None and at.max_running is None and at.state_slots is None:
        full = f"of the full context, {context:,} tokens," if context is not None else "(config.json states no context length)"
        out.append(f"state is kept for as many requests {full} as fit beside each other, at most {MAX_RUNNING}; --max-running says otherwise")
    if at.kv_bytes is not None:
        out.append("kv_bytes is the pool itself: weights, state and everything else are not accounted for")
    spare = [number for number, capacity in enumerate(agreed.capacities) if number != agreed.binding and capacity is not None]
    if spare:
        held = ", ".join(f"stage {number} {agreed.capacities[number]:,}" for number in spare)
        out.append(f"stage {agreed.binding} binds; the others could hold {held} tokens, and allocate only the agreed count")
    return tuple(out)
