"""Records of what is under way: plans in flight, what hangs on them, holds, and what the last pass left.

Plain records. What is done with them lives in `kvsched.planning`, `kvsched.commit`, `kvsched.rollback`, `kvsched.holds`
and `kvsched.explain`.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvsched.live import Live
from kvsched.plan import Chunk, Plan
from kvsched.protocols import Handle
from kvsched.residents import Flags
from kvsched.units import Ints, Pages
from kvsched.verdict import WaitReason


@attrs.define(eq=False)
class Release:
    """Pages of a row that go back when the plan it hangs on has ended.

    valid: slots whose KV is good by then. used: whether the request ran, so that its hit counts as a use.
    """

    live: Live
    row: int
    handle: Handle | None
    donate: bool
    valid: int
    used: bool = True


@attrs.define(eq=False)
class PrefillRow:
    """One prefill row of a plan in flight."""

    live: Live
    chunk: Chunk
    admitted: bool


class Undo:
    """What schedule() changed besides rows and pages, as it was before.

    cached: tokens counted as hits. attributes: (object, name, old value). lagged: rows whose gap began here. served:
    (rows, step of their last turn). charged: (tenant, tokens). exchanged: block-table entries that this plan
    told the host. explained: reasons that had been worked out for the pass before. grants: (rows, pages appended to each). A plain class, like `kvsched.step.Step`.
    """

    __slots__ = ("attributes", "cached", "charged", "exchanged", "explained", "grants", "lagged", "last_decode_step", "postponed", "ratio", "served",
                 "skips", "step")

    def __init__(self, ratio: float, step: int, last_decode_step: int, skips: list[tuple[Ints, WaitReason]], *,
                 postponed: bool) -> None:
        self.ratio = ratio
        self.step = step
        self.last_decode_step = last_decode_step
        self.skips = skips
        self.postponed = postponed
        self.cached = 0
        self.explained: tuple[tuple[Any, ...], dict[str, tuple[WaitReason | None, int | None]]] | None = None
        self.attributes: list[tuple[Any, str, Any]] = []
        self.lagged: list[Ints] = []
        self.served: list[tuple[Ints, Ints]] = []
        self.charged: list[tuple[str, int]] = []
        self.exchanged: list[tuple[int, int, Pages]] = []
        self.grants: list[tuple[Ints, Ints]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Assign, remembering what was there."""
        self.attributes.append((target, name, getattr(target, name)))
        setattr(target, name, value)


@attrs.define(eq=False)
class InFlight:
    """A plan that waits for its commit or rollback, and what hangs on it.

    decode_rows, decode_widths: the plan's decode rows and slots per row (None: one each). ending: positions of decode
    rows that reach their last slot. blocks: which decode rows are block-diffusion rows, None when none is. dropped: rows
    whose tokens are not delivered.
    late: rows whose token goes to a request that was retracted meanwhile.
    """

    plan: Plan
    undo: Undo
    decode_rows: Ints
    decode_widths: Ints | None
    ending: Ints
    blocks: Flags | None
    prefill: list[PrefillRow]
    releases: list[Release] = attrs.field(factory=list)
    dropped: set[int] = attrs.field(factory=set)
    late: dict[int, Live] = attrs.field(factory=dict)

    def position(self, row: int) -> int:
        """The row's position in the plan, -1 when the plan does not name it. O(log rows)."""
        rows = self.decode_rows
        at = int(rows.searchsorted(row))
        if at < len(rows) and rows[at] == row:
            return at
        for index, entry in enumerate(self.prefill):
            if entry.chunk.row == row:
                return self.plan.decodes + index
        return -1

    def width(self, row: int) -> int:
        """Slots that the plan computes for the row beyond what was computed before it; 0 when it does not name it."""
        at = self.position(row)
        if at < 0:
            return 0
        if at >= self.plan.decodes:
            return self.prefill[at - self.plan.decodes].chunk.length
        if self.blocks is not None and self.blocks[at]:
            return 0
        return 1 if self.decode_widths is None else int(self.decode_widths[at])

    def samples(self, row: int) -> bool:
        """Whether the plan samples a token for the row."""
        at = self.position(row)
        return at >= 0 and (at < self.plan.decodes or self.prefill[at - self.plan.decodes].chunk.last)


@attrs.define(eq=False)
class Hold:
    """Pages set aside by the host under a name, counted as quarantined.

    pages: private pages of the request that has the name, or pages taken from the pool. cached: how many more lie in
    the cache, kept there by `handle`. row: of the request whose private pages these are, -1 once it has left.
    """

    pages: Pages
    until: int | None
    row: int = -1
    cached: int = 0
    handle: Handle | None = None


@attrs.define(eq=False)
class Pass:
    """What the last pass left, kept for explain(): why a request that was not tried got nothing is worked out from it.

    fundable, available: pages that were left. leaders: residents with prefill to commit.
    """

    number: int
    paused: bool = False
    head: Live | None = None
    closed: bool = False  # nobody behind the head was tried any more
    budget: int = 0
    fundable: int = 0
    available: int = 0
    beside: int | None = None
    partial_places: int | None = None
    adapters: frozenset[str] = frozenset()
    full: bool = False  # max_running was reached
    retracted: bool = False
    admit_left: int | None = None
    leaders: tuple[Live, ...] = ()
