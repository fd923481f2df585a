"""The waiting queue: who holds nothing yet, and who was retracted.

Keeps arrival order and the counts that queue bounds need. Which of them goes first is the business of `kvsched.order`;
that retracted requests resume before others of the same or worse priority is decided here, under every order (law C2).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvsched.live import Live


class WaitingQueue:
    """Requests without pages. `fresh` never held any, by arrival; `resuming` did, by priority and arrival."""

    __slots__ = ("_priorities", "fresh", "resuming", "tokens", "unready", "version")

    def __init__(self) -> None:
        self.fresh: dict[int, Live] = {}
        self.resuming: list[Live] = []
        self._priorities: Counter[int] = Counter()
        self.tokens = 0  # prompt tokens of `fresh`
        self.unready = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self.fresh) + len(self.resuming)

    def __iter__(self) -> Iterator[Live]:
        yield from self.resuming
        yield from self.fresh.values()

    def add(self, live: Live) -> None:
        """A request that never held pages joins, or comes back to its old place after a rollback."""
        late = bool(self.fresh) and live.arrival < next(reversed(self.fresh))
        self.fresh[live.arrival] = live
        if late:
            self.fresh = dict(sorted(self.fresh.items()))
        self.tokens += live.prompt
        self.unready += not live.ready
        self._priorities[live.priority] += 1
        self.version += 1

    def add_resuming(self, live: Live) -> None:
        """A retracted request waits to resume. Not counted against any queue bound."""
        bisect.insort(self.resuming, live, key=_rank)
        self.version += 1

    def remove(self, live: Live) -> None:
        """Take a request out, whichever way it came in."""
        if self.fresh.pop(live.arrival, None) is None:
            self.resuming.remove(live)
        else:
            self.tokens -= live.prompt
            self.unready -= not live.ready
            self._priorities[live.priority] -= 1
            if not self._priorities[live.priority]:
                del self._priorities[live.priority]
        self.version += 1

    def made_ready(self, live: Live) -> None:
        """The host said that `live`, which is in the queue, may start."""
        live.ready = True
        self.unready -= 1
        self.version += 1

    def best_priority(self) -> int | None:
        """The best (lowest) priority that waits, None for an empty queue. O(distinct priorities)."""
        found = [min(self._priorities)] if self._priorities else []
        if self.resuming:
            found.append(self.resuming[0].priority)
        return min(found) if found else None

    def candidates(self, arrange: Callable[[Iterable[Live]], Iterable[Live]]) -> Iterator[Live]:
        """Everybody who waits, in the order a pass tries them. O(1) per request taken when nobody resumes."""
        if not self.resuming:
            yield from arrange(self.fresh.values())
            return
        if not self._priorities or min(self._priorities) >= self.resuming[-1].priority:
            yield from tuple(self.resuming)
            yield from arrange(self.fresh.values())
            return
        left = list(arrange(self.fresh.values()))
        for live in tuple(self.resuming):
            better = [other for other in left if other.priority < live.priority]
            yield from better
            left = [other for other in left if other.priority >= live.priority]
            yield live
        yield from left


def _rank(live: Live) -> tuple[int, int]:
    return live.priority, live.arrival
