"""The real scheduler under a simulated clock.

What lives here: how a scheduler is set up for a replay, the host loop that drives it, and what is measured on the way. What
does not: where arrivals come from (`trace`, `workload`), what a step costs (`cost`), how figures are shown (`report`).

The loop does what a host does: it submits what has arrived, schedules, lets the step take its time, samples, commits. With
`max_in_flight` 2 the next step is scheduled when the present one starts. Work per step is O(1) plus the prefill chunks of
the plan and the requests that ended; nothing walks over the running set.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvsched.admission.ledger import CommitmentLedger
from kvsched.config import SchedulerConfig
from kvsched.errors import ConfigError
from kvsched.memory import NullCache, PagePool, RadixCache
from kvsched.plan import Plan, StepResult
from kvsched.protocols import Executor, Pool, TreeCache
from kvsched.request import Request
from kvsched.scheduler import Scheduler
from kvsched.sim.cost import CostModel, LinearCost
from kvsched.sim.report import STUCK_SHOWN, Refusals, Report, Spread, Stuck, Wedge
from kvsched.sim.trace import Arrival
from kvsched.verdict import Refused

SAMPLED = 7
"""The token that every request samples; nothing stops at it."""
SLOWEST = 1e-9
"""Least speed: with it the last moment that a trace can name is still a finite one."""


@attrs.frozen
class Engine:
    """A scheduler with the pool and the cache it works on."""

    scheduler: Scheduler
    pool: Pool
    cache: TreeCache


def build(
    config: SchedulerConfig, pool_tokens: int, *, prefix_cache: bool = True, eviction: str = "lru", ledger: bool = True
) -> Engine:
    """Set up a scheduler over a pool of `pool_tokens` slots, rounded down to whole pages.

    ledger: False makes the commitment ledger take no part in decisions, which brings back the deadlock of law B7; the
    simulator alone can do that. Raises `ConfigError`.
    """
    pages = pool_tokens // config.page_size
    if pages < 1:
        raise ConfigError(f"pool_tokens must be at least one page of {config.page_size} tokens, not {pool_tokens}")
    pool = PagePool(pages, config.page_size)
    cache: TreeCache = RadixCache(config.page_size, eviction=eviction) if prefix_cache else NullCache(config.page_size)
    return Engine(Scheduler(config, pool, cache, ledger=CommitmentLedger(enforced=ledger)), pool, cache)


class ConstantExecutor:
    """Samples the same token for every row, at no cost per row."""

    def __init__(self, token: int = SAMPLED) -> None:
        self._token = token
        self._tokens = np.full(256, token, dtype=np.int64)

    def run(self, plan: Plan) -> StepResult:
        if len(plan) > len(self._tokens):
            self._tokens = np.full(2 * len(plan), self._token, dtype=np.int64)
        return StepResult(tokens=self._tokens[: len(plan)])


@attrs.frozen
class Progress:
    """How far a replay is. used, usable: pages."""

    clock_s: float
    steps: int
    requests: int
    arrived: int
    finished: int
    refused: int
    used: int
    usable: int


def replay(
    arrivals: Sequence[Arrival],
    engine: Engine,
    *,
    cost: CostModel | None = None,
    executor: Executor | None = None,
    speed: float = 1.0,
    check: bool = False,
    skipped: int = 0,
    observe: Callable[[Progress], None] | None = None,
    every: int = 200,
) -> Report:
    """Run arrivals, which must be in order of time, through a scheduler that nothing else uses.

    cost: `LinearCost()` unless given. executor: `ConstantExecutor()` unless given. speed: 2 lets everybody arrive in half
    the time. check: call `Scheduler.check()` after each commit. skipped: noted in the report. observe: called every `every`
    steps and once at the end.

    A refusal is final, also one that a client might try again: how soon a client would is not for a trace to say. Such
    refusals are counted by reason. When the scheduler reports a stall, or nothing can run and nobody is to arrive, the
    replay stops and the report's `wedge` says who is stuck and why.
    """
    if isinstance(speed, bool) or not SLOWEST <= speed <= 1 / SLOWEST:
        raise ConfigError(f"speed must be a number from {SLOWEST:g} to {1 / SLOWEST:g}, not {speed!r}")
    run = _Run(arrivals, engine, cost or LinearCost(), executor or ConstantExecutor(), speed=speed)
    run.check, run.observe, run.every = check, observe, every
    return run.report(run.drive(), skipped)


class _Run:
    """One replay. Plain attributes: all of them change in every step."""

    def __init__(
        self, arrivals: Sequence[Arrival], engine: Engine, cost: CostModel, executor: Executor, *, speed: float
    ) -> None:
        self.arrivals, self.cost, self.executor, self.speed = arrivals, cost, executor, speed
        self.scheduler, self.pool, self.cache = engine.scheduler, engine.pool, engine.cache
        self.check = False
        self.observe: Callable[[Progress], None] | None = None
        self.every = 1
        self.depth = engine.scheduler.config.max_in_flight
        self.next = 0  # the arrival that comes next
        self.start = self.clock = arrivals[0].time_s / speed if arrivals else 0.0
        self.busy_until = self.clock
        self.flight: deque[tuple[Plan, float]] = deque()  # plans and the moments at which they end
        self.steps = 0
        self.idle_steps = 0  # empty plans in a row with nothing in flight
        self.arrived: dict[str, float] = {}  # live requests
        self.silent: set[str] = set()  # those of them that have no token yet
        self.ttft: list[float] = []
        self.e2e: list[float] = []
        self.finished = self.refused = self.generated = 0
        self.refusals: dict[str, Refusals] = {}
        self.used = self.peak = 0
        self.area = 0.0  # page seconds
        self.cpu = 0.0

    def drive(self) -> Wedge | None:
        """Run to the end, or to where nothing can go on."""
        scheduler = self.scheduler
        wedge = None
        while wedge is None:
            self._submit_due()
            if self.flight and (len(self.flight) == self.depth or not self.flight[-1][0]):
                self._commit()
                wedge = self._wedge()
            elif scheduler.has_work():
                self._schedule()
            elif self.flight:
                self._commit()
            elif self.next < len(self.arrivals):
                self._jump()
            else:
                break
        if self.observe:
            self.observe(self._progress())
        return wedge

    def _submit_due(self) -> None:
        arrivals = self.arrivals
        while self.next < len(arrivals) and arrivals[self.next].time_s / self.speed <= self.clock:
            arrival = arrivals[self.next]
            self.next += 1
            request = Request(
                arrival.id, arrival.prompt(), max_new_tokens=arrival.max_new, tenant=arrival.tenant, priority=arrival.priority
            )
            begin = time.perf_counter()
            answer = self.scheduler.submit(request)
            self.cpu += time.perf_counter() - begin
            if isinstance(answer, Refused):
                self._refuse(answer)
            else:
                self.arrived[arrival.id] = arrival.time_s / self.speed
                self.silent.add(arrival.id)

    def _refuse(self, answer: Refused) -> None:
        self.refused += 1
        reason = answer.reason.value
        before = self.refusals.get(reason)
        count = 1 if before is None else before.count + 1
        if before is None or answer.needed - answer.available > before.needed - before.available:
            self.refusals[reason] = Refusals(reason, count, answer.needed, answer.available, answer.retryable)
        else:
            self.refusals[reason] = attrs.evolve(before, count=count)

    def _schedule(self) -> None:
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        self.cpu += time.perf_counter() - begin
        self._read_pool()
        start = max(self.clock, self.busy_until)
        self.busy_until = start + self.cost.step_seconds(plan) if plan else start
        self.flight.append((plan, self.busy_until))

    def _commit(self) -> None:
        plan, end = self.flight.popleft()
        self._advance(end)
        result = self.executor.run(plan)
        begin = time.perf_counter()
        outcome = self.scheduler.commit(plan, result)
        self.cpu += time.perf_counter() - begin
        self._read_pool()
        if plan:
            self.steps += 1
            self.idle_steps = 0
        elif not self.flight:
            self.idle_steps += 1
        for row, chunk in enumerate(plan.prefill, plan.decodes):
            if chunk.last and chunk.id in self.silent and outcome.tokens[row] >= 0:
                self.silent.remove(chunk.id)
                self.ttft.append(self.clock - self.arrived[chunk.id])
        for ended in outcome.ended:
            self.e2e.append(self.clock - self.arrived.pop(ended.id))
            self.silent.discard(ended.id)
            self.finished += 1
            self.generated += ended.generated
        if self.check:
            self.scheduler.check()
        if self.observe and plan and self.steps % self.every == 0:
            self.observe(self._progress())

    def _wedge(self) -> Wedge | None:
        """Why the replay cannot go on, if it cannot; otherwise, when nothing can run, go to where something changes."""
        if self.scheduler.stalled:
            limit = self.scheduler.config.stall_steps
            return self._describe(f"no token, no end and no new computed token in {limit} steps although there is work")
        if self.idle_steps > 1 and not self.flight:
            if self.next < len(self.arrivals):
                self._jump()
            elif self.idle_steps > self.scheduler.config.stall_steps:
                return self._describe(f"nothing could run in {self.idle_steps} passes, and nobody is to arrive")
        return None

    def _jump(self) -> None:
        self._advance(self.arrivals[self.next].time_s / self.speed)

    def _advance(self, moment: float) -> None:
        if moment > self.clock:
            self.area += self.used * (moment - self.clock)
            self.clock = moment

    def _read_pool(self) -> None:
        self.used = self.pool.usable - self.pool.free - self.cache.evictable
        self.peak = max(self.peak, self.used)

    def _progress(self) -> Progress:
        return Progress(
            self.clock, self.steps, len(self.arrivals), self.next, self.finished, self.refused, self.used, self.pool.usable
        )

    def _describe(self, why: str) -> Wedge:
        stuck = []
        for name in self.arrived:
            state, explanation = self.scheduler.request_state(name), self.scheduler.explain(name)
            reason = explanation.reason.value if explanation.reason else None
            stuck.append(Stuck(
                name, explanation.status, state["computed"], state["pages"], reason,
                explanation.short_by, explanation.waited_steps, explanation.detail,
            ))
        stuck.sort(key=lambda one: one.status == "waiting")
        return Wedge(
            self.clock, self.steps, why, self.pool.free, self.cache.evictable, self.pool.usable,
            tuple(stuck[:STUCK_SHOWN]), len(stuck[STUCK_SHOWN:]),
        )

    def report(self, wedge: Wedge | None, skipped: int) -> Report:
        """The figures, once `drive` has returned."""
        totals = self.scheduler.snapshot()["totals"]
        span = self.clock - self.start
        usable = self.pool.usable
        return Report(
            requests=len(self.arrivals),
            finished=self.finished,
            refused=self.refused,
            unfinished=len(self.arrivals) - self.finished - self.refused,
            skipped=skipped,
            steps=self.steps,
            retractions=totals["retractions"],
            recomputed_tokens=totals["recomputed_tokens"],
            cached_tokens=totals["cached_tokens"],
            prefill_tokens=totals["prefill_tokens"],
            generated_tokens=self.generated,
            ttft=Spread.of(self.ttft),
            e2e=Spread.of(self.e2e),
            makespan_s=span,
            occupancy_mean=self.area / span / usable if span > 0 else 0.0,
            occupancy_peak=self.peak / usable,
            cpu_s=self.cpu,
            cpu_us_per_step=self.cpu / self.steps * 1e6 if self.steps else 0.0,
            refusals=tuple(self.refusals.values()),
            wedge=wedge,
        )
