"""What would have to change for a deployment to hold so many tokens, or so many requests of a length.

What lives here: a goal, how much it lacks, and single changes that would reach it, each worked out by sizing anew. What does not: which of
them is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.amounts import gib
from kvsched.sizing.checks import at_least_or_none
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.dtypes import dtype
from kvsched.sizing.geometry import Model
from kvsched.sizing.layout import Layout
from kvsched.sizing.report import Report
from kvsched.sizing.sized import size
from kvsched.units import pages_for

MOST_RANKS = 64
"""Ranks that a suggested split goes up to."""


@attrs.frozen(kw_only=True)
class Goal:
    """Either tokens in the pool, or requests of a length (in slots, P + N - 1) that run at once."""

    tokens: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    requests: int | None = attrs.field(default=None, validator=at_least_or_none(1))
    slots: int | None = attrs.field(default=None, validator=at_least_or_none(1))

    def __attrs_post_init__(self) -> None:
        if (self.tokens is None) == (self.requests is None) or (self.requests is None) != (self.slots is None):
            raise ConfigError("a goal is a number of tokens, or a number of requests with their length")

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" if self.tokens is not None else f"{self.requests:,} requests of {self.slots:,} slots"

    def pages(self, page_size: int) -> int:
        """Pages that it takes."""
        if self.tokens is not None:
            return pages_for(self.tokens, page_size)
        return (self.requests or 0) * pages_for(self.slots or 0, page_size)

    def met(self, report: Report) -> bool:
        """Whether a deployment reaches it."""
        if self.tokens is not None:
            return report.tokens >= self.tokens
        slots = self.slots or 0
        return slots <= report.max_servable_tokens and report.requests_at(slots).requests >= (self.requests or 0)


@attrs.frozen
class Change:
    """One change that reaches the goal. tokens, requests: what the pool then holds; requests at the goal's length, None without one."""

    what: str
    tokens: int
    requests: int | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return attrs.asdict(self)


@attrs.frozen
class Answer:
    """What is lacking, and what would reach the goal. short: bytes of one rank, by stage; 0 where memory is not what is short.

    obstacle: why no change of memory can reach it, "" where one can.
    """

    goal: Goal
    reached: bool
    short: tuple[int, ...]
    changes: tuple[Change, ...]
    obstacle: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "goal": attrs.asdict(self.goal), "reached": self.reached, "short_bytes_per_rank": list(self.short), "obstacle": self.obstacle,
            "changes": [change.as_dict() for change in self.changes],
        }


def what_if(model: Model, deployment: Deployment, report: Report, goal: Goal) -> Answer:
    """Hold a sized deployment against a goal. O(splits tried x layers)."""
    if goal.met(report):
        return Answer(goal, reached=True, short=(0,) * deployment.pp, changes=())
    if goal.slots is not None and report.context is not None and goal.slots > report.context - 1:
        return Answer(
            goal, reached=False, short=(0,) * deployment.pp, changes=(),
            obstacle=f"a request has at most {report.context - 1:,} slots: the context limit on P + N is {report.context:,}")
    base = deployment
    if goal.requests is not None and (deployment.max_running is not None or report.keeps_constants):
        base = attrs.evolve(deployment, max_running=max(goal.requests, deployment.max_running or 1), state_slots=None)
    short = _short(model, base, report, goal)
    changes = []
    for what, changed, note in _candidates(model, base, report, goal, short):
        found = _sized(model, changed)
        if found is not None and goal.met(found):
            at = found.requests_at(goal.slots).requests if goal.slots is not None else None
            changes.append(Change(what, found.tokens, at, note))
            if what == "":
                break  # counting the requests is all it takes
    if base is not deployment:
        changes = [attrs.evolve(change, what=_with_running(change.what, base)) for change in changes]
    return Answer(goal, reached=False, short=short, changes=tuple(changes))


def _with_running(what: str, base: Deployment) -> str:
    running = f"max_running {base.max_running}"
    return running if what == "" else f"{what}, {running}"


def _sized(model: Model, deployment: Deployment) -> Report | None:
    """The report, or None where such a deployment cannot be."""
    try:
        return size(model, deployment)
    except ConfigError:
        return None


def _short(model: Model, base: Deployment, report: Report, goal: Goal) -> tuple[int, ...]:
    """Bytes that each rank of each stage lacks."""
    running = base.max_running if base.max_running is not None else report.max_running
    layout, pages = Layout(model, base), goal.pages(base.page_size) + base.reserved_pages
    if base.kv_bytes is not None:
        return tuple(max(0, pages * layout.page_bytes(stage) - have) for stage, have in zip(layout.stages, base.kv_bytes, strict=True))
    return tuple(
        max(0, layout.needed(stage, pages, running) + sum(item.bytes for item in items) - have)
        for stage, items, have in zip(layout.stages, base.items, base.budgets, strict=True)
    )


def _candidates(
    model: Model, base: Deployment, report: Report, goal: Goal, short: tuple[int, ...],
) -> Iterator[tuple[str, Deployment, str]]:
    """(what changes, the changed deployment, a remark), one change at a time, each as small as reaches the goal."""
    yield "", base, ""
    most = max(short)
    if base.kv_bytes is not None:
        yield f"{gib(most)} GiB more for the pool of each rank", attrs.evolve(base, kv_bytes=tuple(map(sum, zip(base.kv_bytes, short, strict=True)))), ""
    elif most:
        running = base.max_running if base.max_running is not None or not report.keeps_constants else report.max_running
        more = attrs.evolve(base, budgets=tuple(map(sum, zip(base.budgets, short, strict=True))), max_running=running)
        yield f"{gib(most)} GiB more memory on each rank", more, f"{most:,} B; or as much less of weights and other items"
    if base.widths.kv.width > 1:
        narrow = attrs.evolve(base, widths=attrs.evolve(base.widths, kv=dtype("fp8")))
        yield f"kv_dtype {narrow.widths.kv}", narrow, "one byte per element"
        yield from _first(model, goal, _splits(model, narrow, "tp", f"kv_dtype {narrow.widths.kv}, "))
    if base.recycle_interval is None and any(one.window is not None for one in model.attentions):
        yield "recycle windows", attrs.evolve(base, recycle_interval=base.page_size), "where the host gives back pages outside of windows"
    yield from _first(model, goal, _splits(model, base, "tp"))
    yield from _first(model, goal, _splits(model, base, "pp"))
    yield from _first(model, goal, _splits(model, base, "cp"))
    if goal.tokens is not None:
        yield from _fewer_running(model, base, report, goal)


def _first(
    model: Model, goal: Goal, candidates: Iterator[tuple[str, Deployment, str]],
) -> Iterator[tuple[str, Deployment, str]]:
    """The first candidate that reaches the goal."""
    for candidate in candidates:
        found = _sized(model, candidate[1])
        if found is not None and goal.met(found):
            yield candidate
            return


def _splits(model: Model, base: Deployment, key: str, prefix: str = "") -> Iterator[tuple[str, Deployment, str]]:
    """More ranks along one axis, from few to many. Weights are taken to split evenly, which the remark says."""
    now = getattr(base, key)
    if key == "pp" and (base.cut is not None or len({*base.budgets}) > 1 or len({*base.items}) > 1 or base.kv_bytes is not None):
        return  # stages that differ cannot be extended without saying how
    for ranks in range(now + 1, MOST_RANKS + 1):
        if key == "tp" and model.query_heads % ranks:
            continue
        if key == "cp" and base.page_size % ranks:
            continue
        changes: dict[str, Any] = {key: ranks}
        note = "weights stay as they are" if key == "cp" else "if the weights split evenly"
        if key != "cp":
            items = tuple(tuple(_scaled(item, now, ranks) for item in stage) for stage in base.items)
            changes["items"] = items * (ranks // len(items)) + items[: ranks % len(items)] if key == "pp" and items else items
        if key == "pp":
            changes["budgets"] = base.budgets[:1] * ranks
        yield f"{prefix}{key} {ranks}", attrs.evolve(base, **changes), note


def _scaled(item: Item, now: int, ranks: int) -> Item:
    if item.name != "weights":
        return item
    return Item(item.name, (item.bytes * now + ranks - 1) // ranks, Provenance.DERIVED, f"{item.bytes:,} B x {now} / {ranks}")


def _fewer_running(model: Model, base: Deployment, report: Report, goal: Goal) -> Iterator[tuple[str, Deployment, str]]:
    """The most running requests with which the pool has the tokens, where what they keep takes room from it."""
    if not report.keeps_constants or base.state_slots is not None or base.kv_bytes is not None:
        return

    def with_running(running: int) -> Deployment:
        return attrs.evolve(base, max_running=running)

    found = _largest(report.max_running - 1, lambda running: (report := _sized(model, with_running(running))) is not None and goal.met(report))
    if found:
        yield f"max_running {found}", with_running(found), "state is kept for fewer requests"


def _largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that is good, 0 for none, where every smaller one of a good one is good."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
