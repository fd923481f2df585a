"""What an order may ask about the present, and the arrangement of those who wait, remembered while nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvsched.core import Core
from kvsched.live import Live


def arranger(core: Core) -> Callable[[Iterable[Live]], Iterable[Live]]:
    """The present order as a function of those who wait. What cannot have changed is not sorted again."""
    view = _View(core)
    order = core.order

    def arrange(waiting: Iterable[Live]) -> Iterable[Live]:
        if not order.keeps:
            return order.arrange(waiting, view)
        key = (core.queue.version, *((core.growths, core.shrunk) if "cache" in order.keeps else ()),
               *((core.passes,) if "passes" in order.keeps and core.config.aging_tokens else ()))
        if core.arranged is None or core.arranged[0] is not order or core.arranged[1] != key:
            core.arranged = (order, key, list(order.arrange(waiting, view)))
        return core.arranged[2]

    return arrange


class _View:
    """What the orders see of the core."""

    __slots__ = ("core",)

    def __init__(self, core: Core) -> None:
        self.core = core

    def matched(self, live: Live) -> int:
        return self.core.match(live, exact=True)

    def path(self, live: Live) -> tuple[int, ...]:
        finder = getattr(self.core.cache, "path", None)
        if finder is None or not live.request.cache_read:
            return ()
        found: tuple[int, ...] = finder(live.space, live.tokens)
        return found[1:]  # that a namespace has a root says nothing of what is cached

    def waited(self, live: Live) -> int:
        return live.waited + self.core.passes - live.submitted_pass

    @property
    def aging_tokens(self) -> int:
        return self.core.config.aging_tokens

    @property
    def max_skips(self) -> int:
        return self.core.config.max_skips

    @property
    def service(self) -> dict[str, float]:
        return self.core.service

    def weight(self, tenant: str) -> float:
        return self.core.rates.get(tenant, 1.0)
