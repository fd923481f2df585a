"""The books of the plain model: what is known of each request, of each plan in flight, and in total.

What lives here: data and the few sums over it that every law needs. What does not: how the books change
(`kvsched.testing.model`) and what must hold (`intake_laws`, `plan_laws`, `state_laws`).
"""

from __future__ import annotations

import attrs

from kvsched.config import SchedulerConfig
from kvsched.plan import Plan
from kvsched.request import Request
from kvsched.units import total_slots


class ModelViolation(AssertionError):
    """The scheduler did what a law forbids; the text starts with the law."""


def law(name: str, holds: bool, *facts: object) -> None:
    """Raise `ModelViolation` with the law's name and the facts unless it holds."""
    if not holds:
        raise ModelViolation(f"{name}: " + " ".join(str(fact) for fact in facts))


@attrs.define(eq=False)
class Account:
    """One request as the host sees it; children of n > 1 each have their own.

    tokens: those delivered. limit: N. target, next: of the present stay: tokens that its prefill computes, and the position
    after the last one that was planned. high: most positions ever known to be computed. done: those of the present stay. sure: the
    most of any stay, without what a late row computed. stay: counts up. wait: steps in which it could decode and did not. peers:
    residents when it was last served. bypassed: newcomers that passed it while it was the deferred head. unsure: a rollback
    after another event rewrote its history; order is not judged.
    """

    id: str
    parent: str
    request: Request
    limit: int
    arrival: int
    ready: bool
    tokens: list[int] = attrs.field(factory=list)
    resident: bool = False
    paused: bool = False
    started: bool = False
    retractions: int = 0
    target: int = 0
    next: int = 0
    high: int = 0
    done: int = 0
    sure: int = 0
    cached: int = 0
    stay: int = 0
    row: int = -1
    wait: int = 0
    peers: int = 1
    bypassed: int = 0
    last_step: int | None = None
    gap: int = 0
    unsure: bool = False

    @property
    def prompt(self) -> int:
        """P."""
        return len(self.request.tokens)

    @property
    def total(self) -> int:
        """Slots that it can ever write (law A2)."""
        return total_slots(self.prompt, self.limit)

    @property
    def filled(self) -> int:
        """Slots that are valid when everything delivered was computed."""
        return self.prompt + max(len(self.tokens) - 1, 0)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of its prefill are left to plan."""
        return self.resident and self.next < self.target

    @property
    def text(self) -> list[int]:
        """Prompt and delivered tokens."""
        prompt: list[int] = self.request.tokens.tolist()
        return prompt + self.tokens


@attrs.define(eq=False)
class Row:
    """A row of a plan in flight and whose it was. samples: it gives a token (or drafts, or a block)."""

    account: Account
    stay: int
    start: int
    count: int
    samples: bool
    decode: bool


@attrs.define(eq=False)
class Frame:
    """A plan in flight, and what a rollback must put back.

    admitted: account, whether it had started before, its stay, tokens from the cache. waits: account, wait, peers, bypassed.
    """

    plan: Plan
    rows: list[Row]
    admitted: list[tuple[Account, bool, int, int]]
    waits: list[tuple[Account, int, int, int]]
    parked: int


class Books:
    """Everything that the plain model knows of one scheduler. Two figures stand for a range where the laws leave one open."""

    def __init__(self, config: SchedulerConfig, usable: int) -> None:
        self.config = config
        self.usable = usable
        self.accounts: dict[str, Account] = {}
        self.order: list[Account] = []  # residents in order of admission
        self.frames: list[Frame] = []
        self.ended: dict[str, int] = {}  # id: how often, over all lives of the id
        self.paused = False
        self.holds: set[str] = set()
        self.step = self.commits = self.arrivals = 0
        self.emitted = self.finished = self.aborted = self.retractions = 0
        self.evicted = self.cached_tokens = 0
        self.prefilled = [0, 0]  # a row that failed, or whose request had ended, may or may not count
        self.recomputed = [0, 0]
        self.moved = [0, 0]  # step in which something moved last (law F1): that of the plan, and that of the commit
        self.overtaken: set[str] = set()
        self.told: dict[tuple[int, int], int] = {}  # the host's block table: row and column to page
        self.parked_steps = 0

    def family(self, name: str) -> list[Account]:
        """Live accounts that an id stands for: itself, or its children (law A4)."""
        return [a for a in self.accounts.values() if name in (a.id, a.parent)]

    def decodable(self, account: Account) -> bool:
        """Whether one more position is known to be wanted, every draft in flight taken as accepted."""
        if account.paused or account.prefilling:
            return False
        passes = [r for f in self.frames for r in f.rows if r.account is account and r.decode]
        if account.request.block_tokens is not None and passes:
            return False  # whether its block is final is not known yet
        return account.next < account.total and account.limit > 0

    def width(self, account: Account) -> int:
        """Positions that its next decode computes."""
        most = account.request.block_tokens or 1 + self.config.lookahead_tokens
        return min(most, account.total - account.next)
