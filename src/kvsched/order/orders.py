"""The orders. Each arranges those who wait (given by arrival) into the order in which a pass tries them.

An order decides nothing else: memory, limits and head policies are the pass's business, and retracted requests are put
before the rest under every order (`kvsched.queue`). An order reads; it changes nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from kvsched.live import Live
from kvsched.request import Namespace

BYTES = 4
"""Bytes of a token id as it is kept."""


Rank = tuple[int, ...]
"""What a ranked order sorts by; lower goes first."""


class View(Protocol):
    """What an order may ask about the present."""

    def matched(self, live: Live) -> int:
        """Tokens of its prompt that the cache has."""

    def ranked(self, waiting: Iterable[Live], order: Ranked) -> list[tuple[Rank, int, Live]]:
        """(rank, arrival, request) of those who wait, sorted; remembered while nothing that the order rests on changed.

        Ranks that rest on the cache are taken from an upper bound of the match, which evictions may have made too high.
        """

    def waited(self, live: Live) -> int:
        """Passes it has waited, the present one included."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def aging_tokens(self) -> int:
        """Tokens of credit per pass waited."""

    @property
    def max_skips(self) -> int:
        """Admissions that may pass one request."""

    def served(self, tenant: str) -> float:
        """Tokens that a tenant was served, divided by its weight."""

    def weight(self, tenant: str) -> float:
        """Share of a tenant."""


class Order(Protocol):
    """One way to arrange those who wait."""

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        """The order in which to try them; `waiting` comes by arrival. May be lazy."""


class Fcfs:
    """First come, first served. O(1)."""

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        del view
        return waiting


class Ranked:
    """An order by one rank per request, among equals by arrival. A subclass says `rank`, and what it rests on.

    rests_on: "cache" when the rank reads `matched`; it must then not fall as `matched` falls. "passes" when it reads how
    long a request has waited. O(n log n) when something it rests on changed; else O(1) and O(log n) per request taken.
    """

    rests_on: tuple[str, ...] = ()

    def rank(self, live: Live, matched: int, view: View) -> Rank:
        """What to sort by, given the tokens that the cache has of the request's prompt."""
        raise NotImplementedError

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        """Those who wait by rank. A rank from an upper bound is made exact when its turn comes, and waits its real turn."""
        entries = view.ranked(waiting, self)
        if "cache" not in self.rests_on:
            yield from (live for _, _, live in entries)
            return
        put_back: list[tuple[Rank, int, Live]] = []
        for rank, arrival, live in entries:
            while put_back and put_back[0] < (rank, arrival):
                yield heapq.heappop(put_back)[2]
            exact = self.rank(live, view.matched(live), view)
            if exact == rank:
                yield live
            else:
                heapq.heappush(put_back, (exact, arrival, live))
        while put_back:
            yield heapq.heappop(put_back)[2]


class LongestPrefix(Ranked):
    """Longest cached prefix first. A request counts for at least its credit, so that no hot prefix starves it.

    With `aging_tokens` a request that waited w passes stands level with a match of w * aging_tokens; among equals the
    earlier arrival goes first.
    """

    rests_on = ("cache", "passes")

    def rank(self, live: Live, matched: int, view: View) -> Rank:
        credit = view.aging_tokens
        return (-max(matched, credit * view.waited(live)) if credit else -matched,)


class DepthFirstWeight:
    """Requests below the heaviest cached branch first, branch by branch, so that what is cached is used up together.

    The branches are those of the cached prefixes of the requests that wait, page by page, whatever the cache looks like
    inside; the weight of a branch is the number of requests in it. Requests that end at a fork come after its branches.
    O(n log n) comparisons of cached prefixes.
    """

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        spaces: dict[Namespace, list[tuple[bytes, Live]]] = defaultdict(list)
        cold: list[Live] = []
        for live in waiting:
            matched = view.matched(live)
            if matched:
                if len(live.branch) != matched * BYTES:
                    live.branch = live.tokens[:matched].tobytes()
                spaces[live.space].append((live.branch, live))
            else:
                cold.append(live)
        page = view.page_size * BYTES
        order: list[Live] = []
        # a stack of branches to walk, heaviest on top, and of requests that come after them
        stack: list[tuple[list[tuple[bytes, Live]], int]] = []
        _push(stack, [sorted(branch, key=lambda item: (item[0], item[1].arrival)) for branch in spaces.values()], 0)
        while stack:
            branch, depth = stack.pop()
            if depth < 0:
                order += [live for _, live in branch]
                continue
            depth += _common(branch[0][0][depth:], branch[-1][0][depth:]) // page * page
            ends = [item for item in branch if len(item[0]) == depth]
            if ends:
                stack.append((ends, -1))
            forks: dict[bytes, list[tuple[bytes, Live]]] = defaultdict(list)
            for item in branch[len(ends):]:  # sorted: those that end here come first
                forks[item[0][depth : depth + page]].append(item)
            _push(stack, list(forks.values()), depth)
        return order + cold


def _push(stack: list[tuple[list[tuple[bytes, Live]], int]], branches: list[list[tuple[bytes, Live]]], depth: int) -> None:
    """Put branches on the stack so that the heaviest comes off first, among equals that of the earliest arrival."""
    branches.sort(key=lambda branch: (len(branch), -min(live.arrival for _, live in branch)))
    stack += [(branch, depth) for branch in branches]


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix. O(log length) memory comparisons."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class LongestOutput(Ranked):
    """Most new tokens first: long answers start early."""

    def rank(self, live: Live, matched: int, view: View) -> Rank:
        del matched, view
        return (-live.limit,)


class Priority(Ranked):
    """Lower priority value first, then by arrival."""

    def rank(self, live: Live, matched: int, view: View) -> Rank:
        del matched, view
        return (live.priority,)


class ShortestFirst(Ranked):
    """Fewest prompt tokens to compute first; one that was passed `max_skips` times goes before all."""

    rests_on = ("cache",)

    def rank(self, live: Live, matched: int, view: View) -> Rank:
        return (0, 0) if live.skips >= view.max_skips else (1, live.prompt - matched)


class Fair:
    """The tenant that was served least for its weight goes first; within a tenant by arrival.

    What a request that is taken will cost counts at once, so that one pass already shares. O(n), then O(log tenants) per request taken.
    """

    def arrange(self, waiting: Iterable[Live], view: View) -> Iterable[Live]:
        lines: dict[str, list[Live]] = defaultdict(list)
        for live in waiting:
            lines[live.tenant].append(live)
        heads = [(view.served(tenant), line[0].arrival, tenant) for tenant, line in lines.items()]
        heapq.heapify(heads)
        taken = dict.fromkeys(lines, 0)
        while heads:
            served, _, tenant = heapq.heappop(heads)
            line, at = lines[tenant], taken[tenant]
            yield line[at]
            taken[tenant] = at + 1
            if at + 1 < len(line):
                heapq.heappush(heads, (served + line[at].prompt / view.weight(tenant), line[at + 1].arrival, tenant))


ORDERS: dict[str, type[Order]] = {
    "fcfs": Fcfs, "lpm": LongestPrefix, "dfs-weight": DepthFirstWeight, "lof": LongestOutput, "priority": Priority,
    "sjf": ShortestFirst, "fair": Fair,
}
"""Every order by its name in the configuration."""
