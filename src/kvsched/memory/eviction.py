"""Who is forgotten first: eviction policies, and the queue that finds the next victim.

A policy is one small class with one method. It sees how often and how recently a piece of content was used, in counters the
cache keeps; never a clock. What does not live here: the tree (see `radix`), and how much is evicted (the scheduler's).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from kvsched.errors import ConfigError

UNUSED_PRIORITY = 1 << 62
"""Priority of content that no request has given back yet: worse than any."""
PROTECTED_USES = 2
"""Uses from which content is in the protected segment of `Slru`: used again after the request that brought it."""
SLACK = 64
"""Stale entries a queue tolerates besides as many as it has live ones."""


class Usage(Protocol):
    """What a policy may look at. Every use of content is a use of all that comes before it in its prompt."""

    last: int
    """The last time a request that used it gave it back, in order of such events."""
    uses: int
    """How many requests used it and gave it back."""
    born: int
    """When the request that brought it locked its prefix, in order of such events."""
    priority: int
    """The best (lowest) priority of the requests that used it."""


class EvictionPolicy(Protocol):
    """Ranks leaves. The lowest score is evicted first. A score changes only when a handle is given back."""

    def score(self, usage: Usage) -> Any:
        """Anything that compares with the other scores of this policy. Ties go to what became evictable first."""


class Lru:
    """Least recently used first."""

    def score(self, usage: Usage) -> int:
        return usage.last


class Lfu:
    """Least often used first, then least recently."""

    def score(self, usage: Usage) -> tuple[int, int]:
        return usage.uses, usage.last


class Slru:
    """What was used only by the request that brought it first (probation), then the rest (protected); each by recency."""

    def score(self, usage: Usage) -> tuple[bool, int]:
        return usage.uses >= PROTECTED_USES, usage.last


class Fifo:
    """What came first goes first, however often it is used."""

    def score(self, usage: Usage) -> int:
        return usage.born


class WorstPriority:
    """Worst priority first (the highest number), then least recently used."""

    def score(self, usage: Usage) -> tuple[int, int]:
        return -usage.priority, usage.last


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"lru": Lru, "lfu": Lfu, "slru": Slru, "fifo": Fifo, "priority": WorstPriority}
)
"""Policies by the name a configuration uses. A class of a host's own can be passed instead of a name."""


def policy_of(eviction: Any) -> EvictionPolicy:
    """The policy that `eviction` names, or is. Raises `ConfigError` naming those there are."""
    if isinstance(eviction, str):
        if eviction in POLICIES:
            return POLICIES[eviction]()
    elif callable(getattr(eviction, "score", None)) and not isinstance(eviction, type):
        policy: EvictionPolicy = eviction
        return policy
    raise ConfigError(f"eviction must be one of {', '.join(POLICIES)}, or an object with a score method, not {eviction!r}")


class Ticketed(Protocol):
    """What a `VictimQueue` holds: something with room for the number of its present entry."""

    ticket: int


Item = TypeVar("Item", bound=Ticketed)


class VictimQueue(Generic[Item]):
    """A heap from which items are withdrawn by forgetting their ticket: every operation is O(log items), amortised.

    An item is in at most one queue at a time. Entries of withdrawn items stay in the heap until they come up, or until
    they outnumber the live ones.
    """

    __slots__ = ("_heap", "_live", "_tickets")

    def __init__(self, tickets: Iterator[int]) -> None:
        """`tickets` yields numbers from 1 up, each once; queues that share items share it."""
        self._heap: list[tuple[Any, int, Item]] = []
        self._live = 0
        self._tickets = tickets

    def __len__(self) -> int:
        return self._live

    def add(self, item: Item, score: Any) -> None:
        """Put an item in that is in no queue."""
        ticket = item.ticket = next(self._tickets)
        self._live += 1
        heap = self._heap
        heapq.heappush(heap, (score, ticket, item))
        if len(heap) > 2 * self._live + SLACK:
            self._heap = [entry for entry in heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def withdraw(self, item: Item) -> None:
        """Take an item out that is in this queue."""
        item.ticket = 0
        self._live -= 1

    def first(self) -> Item | None:
        """The item with the lowest score, which stays in; None when the queue is empty."""
        heap = self._heap
        while heap:
            _, ticket, item = heap[0]
            if item.ticket == ticket:
                return item
            heapq.heappop(heap)
        return None

    def items(self) -> list[Item]:
        """All items, in no particular order. O(entries)."""
        return [item for _, ticket, item in self._heap if item.ticket == ticket]
