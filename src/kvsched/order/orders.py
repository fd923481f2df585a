"""The orders. Each arranges those who wait (given by arrival) into the order in which a pass tries them.

An order decides nothing else: memory, limits and head policies are the pass's business, and retracted requests are put
before the rest under every order (`kvsched.queue`). An order reads; it changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvsched.live import Live


class View(Protocol):
    """What an order may ask about the present."""

    def matched(self, live: Live) -> int:
        """Tokens of its prompt that the cache has."""

    def path(self, live: Live) -> tuple[int, ...]:
        """Ids of the cache nodes on its match, root first; empty where the cache has none to show."""

    def waited(self, live: Live) -> int:
        """Passes it has waited, the present one included."""

    @property
    def aging_tokens(self) -> int:
        """Tokens of credit per pass waited."""

    @property
    def max_skips(self) -> int:
        """Admissions that may pass one request."""

    @property
    def service(self) -> Mapping[str, float]:
        """Tokens served per tenant, divided by its weight."""

    def weight(self, tenant: str) -> float:
        """Share of a tenant."""


class Order(Protocol):
    """One way to arrange those who wait.

    keeps: what its arrangement rests on besides who waits: "cache" for what is cached, "passes" for how long they have
    waited (with aging); as long as that stands still it is not asked again. Empty: it is asked in every pass.
    """

    keeps: tuple[str, ...]

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        """The order in which to try them; `waiting` comes by arrival. May be lazy."""


class Fcfs:
    """First come, first served. O(1)."""

    keeps: tuple[str, ...] = ()

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        del view
        return waiting


class LongestPrefix:
    """Longest cached prefix first. A request counts for at least its credit, so that no hot prefix starves it.

    With `aging_tokens` a request that waited w passes stands level with a match of w * aging_tokens; among equals the
    earlier arrival goes first. O(n log n), a cache match for each whose last match is out of date.
    """

    keeps: tuple[str, ...] = ("queue", "cache", "passes")

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        credit = view.aging_tokens
        if not credit:
            return sorted(waiting, key=lambda live: -view.matched(live))
        return sorted(waiting, key=lambda live: -max(view.matched(live), credit * view.waited(live)))


class DepthFirstWeight:
    """Requests below the heaviest cache branch first, branch by branch, so that what is cached is used up together.

    The weight of a cache node is the number of requests whose match runs through it. O(total path length + n log n).
    """

    keeps: tuple[str, ...] = ("queue", "cache")

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        paths = {live.id: view.path(live) for live in waiting}
        weight: dict[tuple[int, ...], int] = defaultdict(int)
        for path in paths.values():
            for depth in range(1, len(path) + 1):
                weight[path[:depth]] += 1

        def key(live: Live) -> tuple[tuple[int, int], ...]:
            path = paths[live.id]
            steps = tuple((-weight[path[: depth + 1]], path[depth]) for depth in range(len(path)))
            return (*steps, (1, 0))  # those that end at a node come after its branches

        return sorted(waiting, key=key)


class LongestOutput:
    """Most new tokens first: long answers start early. O(n log n)."""

    keeps: tuple[str, ...] = ("queue",)

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        del view
        return sorted(waiting, key=lambda live: -live.limit)


class Priority:
    """Lower priority value first, then by arrival. O(n log n)."""

    keeps: tuple[str, ...] = ("queue",)

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        del view
        return sorted(waiting, key=lambda live: live.priority)


class ShortestFirst:
    """Fewest prompt tokens to compute first; one that was passed `max_skips` times goes before all. O(n log n)."""

    keeps: tuple[str, ...] = ("queue", "cache")

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        bound = view.max_skips

        def key(live: Live) -> tuple[int, int]:
            return (0, 0) if live.skips >= bound else (1, live.prompt - view.matched(live))

        return sorted(waiting, key=key)


class Fair:
    """The tenant that was served least for its weight goes first; within a tenant by arrival.

    What a request that is taken will cost counts at once, so that one pass already shares. O(tenants) per request taken.
    """

    keeps: tuple[str, ...] = ()

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        lines: dict[str, list[Live]] = defaultdict(list)
        for live in waiting:
            lines[live.tenant].append(live)
        served = {tenant: view.service.get(tenant, 0.0) for tenant in lines}
        heads = dict.fromkeys(lines, 0)
        while heads:
            tenant = min(heads, key=lambda name: (served[name], lines[name][heads[name]].arrival))
            live = lines[tenant][heads[tenant]]
            served[tenant] += live.prompt / view.weight(tenant)
            heads[tenant] += 1
            if heads[tenant] == len(lines[tenant]):
                del heads[tenant]
            yield live


ORDERS: dict[str, type[Order]] = {
    "fcfs": Fcfs, "lpm": LongestPrefix, "dfs-weight": DepthFirstWeight, "lof": LongestOutput, "priority": Priority,
    "sjf": ShortestFirst, "fair": Fair,
}
"""Every order by its name in the configuration."""
