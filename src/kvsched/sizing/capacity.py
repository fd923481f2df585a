"""What a pool can serve: the longest request, and how many at once.

What lives here: functions of page counts. They go through the functions that submit and admission go through
(`kvsched.units.total_slots`, `kvsched.units.pages_for`, `kvsched.verdict.decide`), so that what is promised before a boot is what a
scheduler then accepts. What does not: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.checks import at_least
from kvsched.units import pages_for, servable_slots, total_slots
from kvsched.verdict import Verdict, decide


def max_servable_tokens(pages: int, page_size: int, context: int | None) -> int:
    """Largest P + N - 1 of one request, in slots: what the pool holds, and what the context limit on P + N leaves.

    pages: those that can be handed out. It equals `Scheduler.max_servable_tokens` of a scheduler on such a pool.

    >>> max_servable_tokens(1006, 64, None), max_servable_tokens(1006, 64, 4096)
    (64384, 4095)
    """
    return servable_slots(pages, page_size, context)


def fits(prompt: int, max_new: int, pages: int, page_size: int, context: int | None = None) -> bool:
    """Whether submit() accepts such a request on a pool of `pages`, and so whether an empty pool admits it."""
    if context is not None and prompt + max_new > context:
        return False
    need = pages_for(total_slots(prompt, max_new), page_size)
    return decide(need, need, pages) is not Verdict.REFUSE


def longest_output(prompt: int, pages: int, page_size: int, context: int | None = None) -> int | None:
    """The largest limit of new tokens with which such a prompt is accepted; None where it is refused with any.

    >>> longest_output(61_200, 1006, 64), longest_output(64_385, 1006, 64)
    (3185, None)
    """
    room = max_servable_tokens(pages, page_size, context) - prompt + 1
    return room if room >= 1 else None


@attrs.frozen
class Resource:
    """One pool that requests draw on. have: units in it. fixed: units of each request, whatever its length.

    page_size: slots of a page, where a request also takes a page for each started page_size of its slots; None: it takes
    `fixed` alone. most: slots for which a request ever holds pages (a window), None for all.
    """

    name: str
    have: int = attrs.field(validator=at_least(0))
    fixed: int = attrs.field(default=0, validator=at_least(0))
    page_size: int | None = None
    most: int | None = None

    def per_request(self, slots: int) -> int:
        """Units that a request of so many slots takes."""
        if self.page_size is None:
            return self.fixed
        return self.fixed + pages_for(slots if self.most is None else min(slots, self.most), self.page_size)

    def requests(self, slots: int) -> int | None:
        """How many such requests it holds at once; None for any number."""
        need = self.per_request(slots)
        return self.have // need if need else None


@attrs.frozen
class Concurrency:
    """How many requests of `slots` slots run at once, and which pool says so."""

    slots: int
    requests: int
    binding: str

    def as_dict(self) -> dict[str, object]:
        """The same as plain data."""
        return attrs.asdict(self)


def concurrency(slots: int, resources: Sequence[Resource]) -> Concurrency:
    """The minimum over all pools (of several, the first), each request charged the most it can write.

    >>> pools = [Resource("pages", 1000, page_size=16), Resource("state_slots", 12, fixed=1)]
    >>> concurrency(1600, pools), concurrency(160, pools)
    (Concurrency(slots=1600, requests=10, binding='pages'), Concurrency(slots=160, requests=12, binding='state_slots'))
    """
    found = [(count, one.name) for one in resources if (count := one.requests(slots)) is not None]
    if not found:
        raise ConfigError("concurrency needs a pool that requests take something of")
    count, name = min(found, key=lambda pair: pair[0])
    return Concurrency(slots, count, name)


def state_slots_for(running: int, per_request: int = 1, transient: int = 0) -> int:
    """Slots of a state pool that lets so many requests run: theirs, and those that a step needs for a moment."""
    return running * per_request + transient


def running_on(slots: int, per_request: int = 1, transient: int = 0) -> int:
    """How many requests a state pool of so many slots lets run; the inverse of `state_slots_for`.

    >>> running_on(13, 3, 1), running_on(3, 1, 3)
    (4, 0)
    """
    return max(0, slots - transient) // per_request


@attrs.frozen
class SharedBlocks:
    """One pool of blocks for groups of layers: some take a block per page of a request, others a fixed number whatever its length.

    blocks: blocks in the pool. growing: groups that take one for each started page. constant: blocks of all other groups together,
    per request. The pool's capacity is not to be divided by the number of groups: only the growing ones multiply.
    """

    blocks: int = attrs.field(validator=at_least(0))
    page_size: int = attrs.field(validator=at_least(1))
    growing: int = attrs.field(default=1, validator=at_least(0))
    constant: int = attrs.field(default=0, validator=at_least(0))

    def per_request(self, slots: int) -> int:
        """Blocks of a request of so many slots: at least one of each growing group.

        >>> SharedBlocks(1000, 16, growing=1, constant=3).per_request(1600)
        103
        """
        return self.growing * pages_for(max(slots, 1), self.page_size) + self.constant

    def requests(self, slots: int) -> int:
        """How many such requests run at once.

        >>> SharedBlocks(1000, 16, growing=1, constant=3).requests(1600)
        9
        """
        need = self.per_request(slots)
        return self.blocks // need if need else 0

    def max_servable_tokens(self, context: int | None = None) -> int:
        """Largest P + N - 1: the blocks less what a request takes whatever its length (case C87)."""
        if not self.growing:
            raise ConfigError("growing must be at least 1: without a growing group a pool holds no tokens")
        return max_servable_tokens(max(0, self.blocks - self.constant) // self.growing, self.page_size, context)

    def warning(self) -> str | None:
        """What a host should hear where a request of one token already takes many blocks."""
        least = self.per_request(1)
        if least <= 1:
            return None
        return (
            f"every request takes at least {least} of {self.blocks} blocks, so no more than {self.requests(1)} run at once however short they "
            f"are (up to {self.page_size} slots cost the same)"
        )


def attended_requests(attended: Sequence[int], limit: int) -> int:
    """How many of these requests, in order, one step can take: a workspace grows with the context they attend to (case C68).

    attended: context of each in tokens, cached and new. limit: the sum that the workspace is sized for.

    >>> attended_requests([4100, 4100, 4100], 8192)
    1
    """
    total = 0
    for count, one in enumerate(attended):
        total += one
        if total > limit:
            return count
    return len(attended)
