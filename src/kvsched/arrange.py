"""What an order may ask about the present, and the arrangement of those who wait, remembered while nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvsched.core import Core
from kvsched.live import Live
from kvsched.order import Rank, Ranked


def arranger(core: Core) -> Callable[[Iterable[Live]], Iterable[Live]]:
    """The present order as a function of those who wait."""
    view = _View(core)
    return lambda waiting: core.order.arrange(waiting, view)


class _View:
    """What the orders see of the core."""

    __slots__ = ("core",)

    def __init__(self, core: Core) -> None:
        self.core = core

    def matched(self, live: Live) -> int:
        return self.core.match(live, exact=True)

    def ranked(self, waiting: Iterable[Live], order: Ranked) -> list[tuple[Rank, int, Live]]:
        core = self.core
        by_cache = "cache" in order.rests_on
        key = (core.queue.version, core.growths if by_cache else 0,
               core.passes if "passes" in order.rests_on and core.config.aging_tokens else 0)
        if core.arranged is None or core.arranged[0] is not order or core.arranged[1] != key:
            entries = sorted((order.rank(live, core.match(live) if by_cache else 0, self), live.arrival, live) for live in waiting)
            core.arranged = (order, key, entries)
        return core.arranged[2]

    def waited(self, live: Live) -> int:
        return live.waited + self.core.passes - live.submitted_pass

    @property
    def page_size(self) -> int:
        return self.core.config.page_size

    @property
    def aging_tokens(self) -> int:
        return self.core.config.aging_tokens

    @property
    def max_skips(self) -> int:
        return self.core.config.max_skips

    def served(self, tenant: str) -> float:
        return self.core.shares.served(tenant)

    def weight(self, tenant: str) -> float:
        return self.core.shares.weight(tenant)
