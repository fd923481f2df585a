"""A host that brings a page pool of its own, and has kvsched's conformance suite look at it before it goes live.

The suite needs the `testing` extra and runs under pytest; the rest runs by itself:

    pytest examples/own_pool.py
    python examples/own_pool.py
"""

from __future__ import annotations

import numpy as np

from kvsched import Request, Scheduler, SchedulerConfig, StepResult
from kvsched.errors import AccountingError, DoubleFree, InvalidRequest, PoolExhausted
from kvsched.testing.pool_suite import PoolConformance
from kvsched.units import Pages


class LowestFirstPool:
    """Hands out the lowest free page ids, so that the pages in use stay together."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.usable = pages
        self._free = set(range(pages))

    @property
    def free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free)

    def alloc(self, n: int) -> Pages:
        """Hand out the `n` lowest free pages."""
        if n < 0:
            raise InvalidRequest(f"n must be at least 0, not {n}")
        if n > len(self._free):
            raise PoolExhausted(f"{n} pages were asked for and {len(self._free)} are free")
        pages = sorted(self._free)[:n]
        self._free.difference_update(pages)
        return np.array(pages, dtype=np.int32)

    def release(self, pages: Pages) -> None:
        """Take pages back, each of them handed out and named once."""
        back = np.asarray(pages).tolist()
        if len(set(back)) < len(back) or any(page in self._free or not 0 <= page < self.usable for page in back):
            raise DoubleFree(f"{back} are not all handed out and named once")
        self._free.update(back)

    def check(self) -> None:
        """A set of free pages cannot contradict itself, but it can leave its range."""
        if self._free - set(range(self.usable)):
            raise AccountingError(f"free pages out of range: {sorted(self._free)}")


class TestLowestFirstPool(PoolConformance):
    """Every test that the scheduler's own pool passes."""

    def make(self, usable: int, page_size: int) -> LowestFirstPool:
        """A fresh pool, all free."""
        return LowestFirstPool(usable, page_size)


def main() -> None:
    """Serve a request with it."""
    scheduler = Scheduler(SchedulerConfig(page_size=16), LowestFirstPool(64, 16))
    scheduler.submit(Request("r1", prompt=range(100), max_new_tokens=8))
    while scheduler.has_work():
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult(tokens=[7] * len(plan)))
    print(f"served with it: {scheduler.snapshot()['totals']['emitted']} tokens")


if __name__ == "__main__":
    main()
