"""Sizing a deployment: from a model and what a host decides to tokens, pages and the reasons beside them.

What lives here: `size`, and `layer_report` for where no memory is given. What does not: flags and files (`kvsched.cli.size`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Account, Item, Overbooked, Provenance
from kvsched.sizing.amounts import gib
from kvsched.sizing.capacity import Concurrency, Resource, concurrency, max_servable_tokens, running_on, state_slots_for
from kvsched.sizing.deployment import MAX_RUNNING, Deployment
from kvsched.sizing.geometry import Model
from kvsched.sizing.layout import CONSTANT, Layout, StageCost
from kvsched.sizing.report import Report, StageReport
from kvsched.sizing.stages import Pool, Stage, pool
from kvsched.units import pages_for

LENGTHS = (1024, 4096, 16384, 65536, 262144)
"""Lengths that a report shows concurrency for, beside the longest request."""
LARGEST_POOL = 2**31 - 1
"""Pages a pool can have: page ids are int32."""


def size(model: Model, deployment: Deployment) -> Report:
    """Size a deployment of a model.

    Raises `ConfigError` for splits that cannot be and budgets that hold nothing, naming the largest item. Deterministic. O(layers).
    """
    at, layout = deployment, Layout(model, deployment)
    stages = layout.stages
    given = _given(at)
    for account in given:
        account.check()
    running = _running(layout, stages, given)
    accounts = given
    if at.kv_bytes is None:
        accounts = [
            attrs.evolve(account, items=(*account.items, *layout.constant_items(stage, running)))
            for account, stage in zip(given, stages, strict=True)
        ]
    for account in accounts:
        _check(account, running)  # those given were checked before, so this is of what requests keep
    agreed = pool(
        [Stage(account.rest, stage.token_bytes, stage.layers) for account, stage in zip(accounts, stages, strict=True)], at.page_size // at.cp)
    _check_pages(layout, agreed, accounts[agreed.binding], stages[agreed.binding])
    resources = _resources(layout, agreed.pages - at.reserved_pages, running)
    longest = max_servable_tokens(agreed.pages - at.reserved_pages, at.page_size, layout.context)
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    free = _chosen_freely(layout)
    return Report(
        model=model, deployment=at, pool=agreed, context=layout.context, max_running=running, state_slots=layout.slots(running),
        stages=tuple(
            StageReport(stage, _with_kv(account, agreed.allocated(stage.number)), None if capacity is None else capacity * at.cp)
            for stage, account, capacity in zip(stages, accounts, agreed.capacities, strict=True)),
        resources=resources, keeps_constants=layout.keeps_constants, warnings=_warnings(layout, agreed),
        concurrency=tuple(
            Concurrency(length, _beside_each_other(layout, stages, given, length), "memory") if free else concurrency(length, resources)
            for length in lengths),
    )


def layer_report(model: Model, deployment: Deployment) -> Report:
    """What a token and a request cost, where no memory is given: a report without a pool. Its stage is that where a token costs most."""
    layout = Layout(model, deployment)
    stages = layout.stages
    token = [stage.token_bytes for stage in stages]
    return Report(
        model=model, deployment=deployment, stages=tuple(StageReport(stage, Account(0), None) for stage in stages),
        pool=Pool(0, deployment.page_size, token.index(max(token)), (None,) * len(stages), ()), context=layout.context, max_running=0,
        state_slots=0, resources=(), concurrency=(), keeps_constants=layout.keeps_constants, warnings=_warnings(layout, None),
    )


def _given(at: Deployment) -> list[Account]:
    """The accounts of the stages before anything is derived."""
    names = [f"stage {number}" if at.pp > 1 else "" for number in range(at.pp)]
    if at.kv_bytes is not None:
        return [Account(size, (), name) for size, name in zip(at.kv_bytes, names, strict=True)]
    return [Account(budget, items, name) for budget, items, name in zip(at.budgets, at.items, names, strict=True)]


def _chosen_freely(layout: Layout) -> bool:
    """Whether nobody said how many requests state is kept for, and it matters."""
    at = layout.at
    return at.max_running is None and at.state_slots is None and at.kv_bytes is None and layout.keeps_constants


def _running(layout: Layout, stages: Sequence[StageCost], given: Sequence[Account]) -> int:
    """Requests that constant-size state is kept for: as stated, as slots allow, or as many as fit at the full context."""
    at = layout.at
    if at.state_slots is not None and layout.costs.all().slot:
        most = running_on(at.state_slots, at.slots_per_request, at.transient_slots)
        if most < 1:
            least = state_slots_for(1, at.slots_per_request, at.transient_slots)
            raise ConfigError(f"state_slots must be at least {least} for one request to run, not {at.state_slots}")
        return min(most, at.max_running or MAX_RUNNING)
    if _chosen_freely(layout):
        return max(1, min(MAX_RUNNING, _beside_each_other(layout, stages, given, (layout.context or 2) - 1)))
    return at.max_running or MAX_RUNNING


def _beside_each_other(layout: Layout, stages: Sequence[StageCost], given: Sequence[Account], slots: int) -> int:
    """Requests of so many slots that fit with what each keeps besides, if that is kept for exactly that many."""
    at, found = layout.at, []
    for stage, account in zip(stages, given, strict=True):
        own, page = stage.constants, layout.page_bytes(stage)
        once = own.staging + at.transient_slots * (own.slot + own.speculative) + at.reserved_pages * page
        each = own.per_request(at.slots_per_request) + pages_for(slots, at.page_size) * page
        if each:
            found.append(max(0, account.rest - once) // each)
    return min(found)


def _check(account: Account, running: int) -> None:
    """Raise `Overbooked` where what requests keep does not fit beside what was given, which did."""
    try:
        account.check()
    except Overbooked as error:
        kept = sum(item.bytes for item in account.items if item.name in CONSTANT)
        raise Overbooked(f"{error}; {gib(kept)} GiB of it are kept for {running} running requests, and fewer need less", error.largest) from None


def _check_pages(layout: Layout, agreed: Pool, account: Account, stage: StageCost) -> None:
    """Raise `ConfigError` for a pool that can hand out no page, or more than page ids can count."""
    at = layout.at
    if agreed.pages <= at.reserved_pages:
        most = max(account.items, key=lambda item: item.bytes, default=None)
        largest = f"; the largest item is {most.name} with {gib(most.bytes)} GiB" if most is not None else ""
        place = f"stage {stage.number}: " if at.pp > 1 else ""
        raise ConfigError(
            f"{place}{gib(account.rest)} GiB are left for pages of {layout.page_bytes(stage):,} B, which is {agreed.pages} of them, and "
            f"{at.reserved_pages + 1} are needed at least{largest}")
    if agreed.pages > LARGEST_POOL:
        raise ConfigError(f"{agreed.pages:,} pages are more than page ids can count, {LARGEST_POOL:,}: a larger page_size needs fewer")


def _with_kv(account: Account, allocated: int) -> Account:
    """The account with its token pool, and what is left unused: less than a page, or what the agreed count does not need."""
    kv = Item("kv", allocated, Provenance.DERIVED, "the agreed pages")
    return attrs.evolve(account, items=(*account.items, kv, Item("unused", account.rest - allocated, Provenance.DERIVED)))


def _resources(layout: Layout, usable: int, running: int) -> tuple[Resource, ...]:
    """Every pool that a request draws on."""
    at, slots = layout.at, layout.slots(running)
    out = [Resource("pages", usable, page_size=at.page_size)]
    if slots:
        out.append(Resource("state_slots", max(0, slots - at.transient_slots), fixed=at.slots_per_request))
    for window in layout.costs.windows:
        pages = layout.window_pages(window)
        out.append(Resource("window_pages", running * pages, page_size=at.page_size, most=pages * at.page_size))
    if layout.costs.all().cross and at.kv_bytes is None:
        out.append(Resource("cross", running, fixed=1))
    if at.max_running is not None or len(out) > 1:
        out.append(Resource("max_running", running, fixed=1))
    return tuple(out)


def _warnings(layout: Layout, agreed: Pool | None) -> tuple[str, ...]:
    """What a reader should know beside the figures."""
    at, out = layout.at, list(layout.model.notes)
    windowed = [one.window for one in layout.model.attentions if one.window is not None]
    total = len(layout.model.attentions)
    if windowed and not layout.costs.windows:
        how = (
            "no layer keeps everything, so one pool holds all tokens" if len(windowed) == total
            else "they are charged for every token, as a host with one page table keeps them; --recycle-windows sizes pools of their own"
        )
        out.append(f"{len(windowed)} of {total} attention layers look back only {', '.join(f'{one:,}' for one in sorted(set(windowed)))} tokens: {how}")
    if agreed is not None and _chosen_freely(layout):
        full = f"of the full context, {layout.context:,} tokens, " if layout.context is not None else "(config.json states no context) "
        out.append(
            f"state is kept for as many requests {full}as fit beside each other, at most {MAX_RUNNING}; how many run at once at other "
            "lengths is if --max-running is set to just that")
    if agreed is not None and at.kv_bytes is not None:
        out.append("the pool's own size was given: weights, state and everything else are not accounted for")
    if agreed is not None and at.pp > 1:
        held = ", ".join(
            f"stage {number} {'any number of' if one is None else f'{one * at.cp:,}'}"
            for number, one in enumerate(agreed.capacities) if number != agreed.binding)
        out.append(f"stage {agreed.binding} binds; {held} tokens would fit, and every stage allocates only the agreed count")
    return tuple(out)
