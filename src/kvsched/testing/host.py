"""A host that drives one scheduler with the simulated executor and the plain model beside it, and checks after every call.

What lives here: `CheckedHost`, whose methods take plain data (so a run can be written down and repeated), and `Parts`,
the factories it builds a scheduler from. What does not: any choice of what to do next (see `machine` and `driver`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvsched import NullCache, PagePool, RadixCache, Scheduler, SchedulerConfig
from kvsched.errors import (
    ConfigError,
    DuplicateRequest,
    HoldRefused,
    InvalidRequest,
    KvschedError,
)
from kvsched.plan import Agreed, Event, Plan, StepResult
from kvsched.protocols import EventSink, Pool, TreeCache
from kvsched.request import Finish, Namespace, Request
from kvsched.testing.account import Account, law
from kvsched.testing.executor import SimulatedExecutor
from kvsched.testing.memory_laws import check_content, check_hits, check_kept, check_owners, servable
from kvsched.testing.misuse import wrong_call
from kvsched.testing.model import PlainModel
from kvsched.testing.plan_laws import Scene
from kvsched.units import pages_for


def _pool(pages: int, page_size: int) -> Pool:
    return PagePool(pages, page_size)


def _cache(page_size: int, eviction: str) -> TreeCache:
    return RadixCache(page_size, eviction=eviction)


def _scheduler(config: SchedulerConfig, pool: Pool, cache: TreeCache, sink: EventSink) -> Scheduler:
    return Scheduler(config, pool, cache, sink=sink)


@attrs.frozen
class Parts:
    """What a `CheckedHost` is built from; put your own pool, cache or scheduler in place of ours.

    pool: (pages, page_size). cache: (page_size, eviction). scheduler: (config, pool, cache, sink).
    """

    pool: Callable[[int, int], Pool] = _pool
    cache: Callable[[int, str], TreeCache] = _cache
    scheduler: Callable[[SchedulerConfig, Pool, TreeCache, EventSink], Scheduler] = _scheduler


class _Ear:
    """Counts events by kind and id."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def event(self, event: Event) -> None:
        self.counts[event.kind, event.id] += 1

    def of(self, kind: str) -> int:
        return sum(n for (k, _), n in self.counts.items() if k == kind)


@attrs.define(eq=False)
class _InFlight:
    plan: Plan
    result: StepResult | None = None


class CheckedHost:
    """Drives a scheduler and verifies every answer: the executor its pages, the model its counts, `check()` itself.

    settings: keys of `SchedulerConfig`. pages: of the pool. prefix_cache, eviction: the cache. seed: of the executor.
    Every method is one call of the API; methods that make no sense in the present state do nothing, so that a recorded
    run stays valid when calls are taken out of it.
    """

    def __init__(self, settings: Mapping[str, Any], pages: int, *, prefix_cache: bool = True, eviction: str = "lru",
                 seed: int = 0, parts: Parts | None = None) -> None:
        parts = Parts() if parts is None else parts
        config = SchedulerConfig(**settings)
        self.ear = _Ear()
        self.pool = parts.pool(pages, config.page_size)
        self.cache = parts.cache(config.page_size, eviction) if prefix_cache else NullCache(config.page_size)
        self.scheduler = parts.scheduler(config, self.pool, self.cache, self.ear)
        self.executor = SimulatedExecutor(config.page_size, pages, lookahead_tokens=config.lookahead_tokens, vocabulary=4, seed=seed)
        self.model = PlainModel(config, self.pool.usable)
        self.in_flight: list[_InFlight] = []
        self.holds: dict[str, int | None] = {}  # name: last step of the hold, None without one
        self.stops: dict[str, int | None] = {}
        self.kept: list[tuple[Namespace, list[int]]] = []
        self.pins = False
        self.calls = self.rows = self.admissions = 0
        self.digests: list[str] = []
        self._last: Plan | None = None
        self._before: dict[str, Any] | None = None  # snapshot before the newest schedule, while nothing happened since
        self._again: str | None = None  # the plan that must come again after its rollback
        self.state = self.scheduler.snapshot()

    # -- the API --------------------------------------------------------------------------------------------------------

    def submit(self, name: str, prompt: list[int], max_new: int | None, *, stop_at: int | None = None, version: str | None = None,
               salt: str | None = None, **fields: Any) -> None:
        """Submit a request; a live id must be refused as a duplicate."""
        request = Request(name, prompt, max_new, namespace=Namespace(version=version, salt=salt), **fields)
        if request.block_tokens is not None and request.block_tokens > self.model.config.max_step_tokens:
            self.refuses(InvalidRequest, lambda: self.scheduler.submit(request))
            return
        ids = {name, *(f"{name}/{i}" for i in range(request.n) if request.n > 1)}
        if any(a.id in ids or a.parent in ids for a in self.model.accounts.values()):
            self.refuses(DuplicateRequest, lambda: self.scheduler.submit(request))
            return
        ceiling = self.scheduler.ceiling
        law("D7 without pins the ceiling is the pool", self.pins or ceiling == self.pool.usable, ceiling, self.pool.usable)
        answer = self.scheduler.submit(request)
        self.model.submitted(request, answer, ceiling)
        if answer:
            self.executor.add(request, answer.ids, stop_at=stop_at)
            self.stops.update(dict.fromkeys(answer.ids, stop_at))
            self.pins = self.pins or request.pin > 0
        self._touched()

    def abort(self, name: str) -> None:
        """Abort a live, ended or unknown id, or a parent's."""
        gone = [a.id for a in self.model.family(name)]
        did = self.scheduler.abort(name)
        law("abort answers with a bool", isinstance(did, bool), did)
        self.model.abort_of(name, did)
        for one in gone:
            self.executor.end(one)
        self._touched()

    def abort_all(self) -> None:
        """Abort everything that lives."""
        names = list(self.model.accounts)
        gone = self.scheduler.abort_all()
        law("abort_all says who", set(gone) == set(names), gone, names)
        for name in names:
            self.model.abort_of(name, did=True)
            self.executor.end(name)
        self._touched()

    def schedule(self, admit: int | None = None, aborts: tuple[str, ...] = (), free_pages: int | None = None,
                 prefill_tokens: int | None = None) -> None:
        """Make a plan, unless as many as allowed are in flight. The arguments are what the ranks agreed on."""
        if len(self.in_flight) >= self.model.config.max_in_flight:
            return
        before, again, hits, pages = self.state, self._again, servable(self.model, self.cache), self._pages()
        agreed = None
        if aborts or (admit, free_pages, prefill_tokens) != (None, None, None):
            agreed = Agreed(admit=admit, aborts=aborts, free_pages=free_pages, prefill_tokens=prefill_tokens)
        plan = self.scheduler.schedule(agreed)
        self.in_flight.append(_InFlight(plan))
        for name in aborts:
            for account in self.model.family(name):
                self.executor.end(account.id)
            self.model.abort_of(name, bool(self.model.family(name)))
        self._expire()
        self.model.holds = set(self.holds)
        self.rows += len(plan)
        self.admissions += len(plan.admitted)
        self.digests.append(plan.digest)
        self.executor.receive(plan, self.scheduler.block_table)
        self.state = self.scheduler.snapshot()
        caching = not isinstance(self.cache, NullCache)
        self.model.scheduled(plan, Scene(before, self.state, pages, caching, admit, free_pages, prefill_tokens))
        check_hits(plan, hits)
        self.verify()
        if again is not None and agreed is None:
            law("a rolled back plan is made again", again == plan.digest, plan)
        self._again = None
        self._before = before if agreed is None else None

    def _pages(self) -> dict[str, frozenset[int]]:
        """Pages of each resident now."""
        held = self.state["requests"]
        return {a.id: frozenset(self.scheduler.block_table[a.row, : held[a.id]["pages"]].tolist()) for a in self.model.order}

    def run(self) -> None:
        """Run the oldest plan that has not run, without committing it."""
        for entry in self.in_flight:
            if entry.result is None:
                entry.result = self.executor.run(entry.plan)
                return

    def commit(self, failed: int = 0, finished: int = 0) -> None:
        """Commit the oldest plan. `failed`, `finished`: bit i marks row i (of those that sample, for finished)."""
        if not self.in_flight:
            return
        entry = self.in_flight[0]
        if entry.result is None:
            self.run()
        plan, result = entry.plan, entry.result
        assert result is not None
        bad = [i for i in range(len(plan)) if failed >> i & 1]
        done = [i for i in range(len(plan)) if finished >> i & 1 and i not in bad
                and (i < plan.decodes or plan.prefill[i - plan.decodes].last)]
        if bad or done:
            result = attrs.evolve(result, failed=bad or None, finished=done or None)
        accounts = dict(self.model.accounts)
        outcome = self.scheduler.commit(plan, result)
        self._last = self.in_flight.pop(0).plan
        self.model.committed(plan, result, outcome)
        self.executor.committed(plan, outcome, bad)
        for record in outcome.ended:
            self._ended(accounts[record.id], record.finish)
        self._touched()

    def rollback(self) -> None:
        """Roll the newest plan back, whether or not it ran."""
        if not self.in_flight:
            return
        plan = self.in_flight[-1].plan
        before = None if any(last is not None for last in self.holds.values()) else self._before
        self.scheduler.rollback(plan)
        self.in_flight.pop()
        self.executor.rolled_back(plan)
        self.model.rolled_back(plan)
        self._touched()
        if before is not None and not plan.retracted:
            arranged = not plan.evicted or self.model.config.order not in BY_CACHE  # what was evicted shortens matches
            was, now = _comparable(before, plan.evicted, arranged=arranged), _comparable(self.state, 0, arranged=arranged)
            law("rollback restores the state", was == now, _difference(was, now))
            if not plan.evicted:
                self._again = plan.digest

    def pause(self, mode: str) -> None:
        """Pause in one of the two modes."""
        paused, retracted = self.ear.of("paused"), self.ear.of("retracted")
        held = sum(a.paused for a in self.model.order)
        residents = len(self.model.order)
        self.scheduler.pause(mode)
        self.model.pause(mode)
        if mode == "hold":
            law("C32 one pause event each", self.ear.of("paused") - paused == residents - held, mode, residents, held)
        else:
            law("C32 one retraction each", self.ear.of("retracted") - retracted == residents, mode, residents)
        self._touched()

    def resume(self) -> None:
        """End a pause (or do nothing)."""
        self.scheduler.resume()
        self.model.resume()
        self._touched()

    def flush(self) -> None:
        """Empty the cache; refused exactly while somebody holds pages (C81)."""
        answer = self.scheduler.flush()
        free = self.state["free"]
        self._touched()
        if not self.model.order and not self.in_flight and not self.holds:
            law("C81 flush works when nobody holds a page", answer.ok, answer)
        if answer.ok:
            law("C81 flush empties the tree", self.state["cached"] == 0, answer, self.state["cached"])
            law("C81 flush says what it gave", self.state["free"] - free == answer.pages, answer, free, self.state["free"])
        else:
            law("C81 a refused flush says why", bool(answer.reason), answer)
            law("C81 a refused flush changes nothing", self.state["free"] == free, answer)

    def ready(self, name: str) -> None:
        """Say that a request may go. A parent's id stands for its children."""
        one = self.model.accounts.get(name)
        if one is None:
            return
        did = self.scheduler.mark_ready(name)
        law("mark_ready says what it did", did == (not one.ready), name, did, one.ready)
        one.ready = True
        self._touched()

    def hold(self, name: str, pages: int, steps: int | None = None) -> None:
        """Set pages aside; refused where it cannot be, and then nothing changed."""
        if name in self.holds:
            return
        before = self.scheduler.snapshot()
        try:
            self.scheduler.hold_pages(name, pages, steps)
        except HoldRefused:
            law("a refused hold changes nothing", before == self.scheduler.snapshot(), name, pages)
            return
        self.holds[name] = None if steps is None else self.model.step + steps
        if not any(a.id == name and a.resident for a in self.model.accounts.values()):
            self.model.evicted += max(pages - before["free"], 0)
        self._touched()
        law("held pages are quarantined", self.state["quarantined"] >= before["quarantined"] + min(pages, 1), before, self.state)

    def release(self, name: str) -> None:
        """Give held pages back."""
        if name not in self.holds:
            law("nothing is released twice", not self.scheduler.release_pages(name), name)
            return
        last = self.holds.pop(name)
        if not self.scheduler.release_pages(name):
            law("a hold can be released", last is not None and self.model.step >= last, name, last, self.model.step)
        self._touched()

    def unpin(self, name: str) -> None:
        """Give up a pin, whoever holds it."""
        try:
            self.scheduler.unpin(name)
        except KvschedError:
            return
        self._touched()

    def limits(self, **values: Any) -> None:
        """Change settable limits; a step must stay wide enough for every open block, and for whole prefills where they are whole."""
        widest, whole = max([a.request.block_tokens or 0 for a in self.model.accounts.values()], default=0), False
        if self.model.config.max_partial_prefills == 0:
            widest, whole = max(widest, self.model.config.context_limit or 0), values.get("chunk_tokens") is not None
        if whole or values.get("max_step_tokens", widest) < widest:
            self.refuses(ConfigError, lambda: self.scheduler.set_limits(**values))
            return
        self.scheduler.set_limits(**values)
        self.model.limits(self.scheduler.config)
        for key, value in values.items():
            law("set_limits sets", getattr(self.scheduler.config, key) == value, key, value)
        self._touched()

    def misuse(self, kind: str) -> None:
        """Do one thing that a host may not; it must be a typed error that changes nothing."""
        found = wrong_call(self.scheduler, kind, [entry.plan for entry in self.in_flight], self._last)
        if found is not None:
            self.refuses(*found)

    def refuses(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call must raise this error and change nothing."""
        before = self.scheduler.snapshot()
        try:
            call()
        except error:
            law("a refused call changes nothing", before == self.scheduler.snapshot(), error.__name__)
            return
        law("a wrong call is refused", False, error.__name__)

    # -- checks ---------------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.model.config.page_size

    def _touched(self) -> None:
        self._before = self._again = None
        self._expire()
        self.model.holds = set(self.holds)
        self.state = self.scheduler.snapshot()
        self.verify()

    def _expire(self) -> None:
        step = self.scheduler.snapshot()["step"]
        for name, last in list(self.holds.items()):
            if last is not None and step > last + 1:
                del self.holds[name]

    def verify(self) -> None:
        """Everything that must hold now. O(everything)."""
        self.calls += 1
        self.scheduler.check()
        state = self.state
        self.model.check(state)
        if self.model.accounts or not self.in_flight:  # a plan in flight of requests that ended may count as work or not
            law("has_work", self.scheduler.has_work() == bool(self.model.accounts), list(self.model.accounts))
        law("in_flight", list(self.scheduler.in_flight) == [e.plan for e in self.in_flight], len(self.in_flight))
        for name, account in self.model.accounts.items():
            law("generated(id)", self.scheduler.generated(name).tolist() == account.tokens, name)
            law("explain and snapshot agree", _reason(self.scheduler.explain(name).reason) == state["requests"][name]["wait_reason"], name)
        ends: Counter[str] = Counter()
        for (kind, name), count in self.ear.counts.items():
            ends[name] += count if kind in ("finished", "aborted") else 0
        law("one terminal event for each end", +ends == Counter(self.model.ended), ends, self.model.ended)
        told = {kind: self.ear.of(kind) for kind in ("queued", "admitted", "retracted")}
        expected = {"queued": self.model.arrivals, "admitted": self.admissions, "retracted": self.model.retractions}
        law("an event for each change", told == expected, told, expected)
        check_owners(self.model, self.executor, self.scheduler.block_table, state, exact=not (self.pins or self.holds))

    def _ended(self, account: Account, finish: Finish) -> None:
        stop_at = self.stops[account.id]
        text = self.executor.reference(account.request, account.id, len(account.tokens), stop_at)
        law("I2 scheduling never changes text", text == account.tokens, account.id, account.tokens, text)
        if finish not in (Finish.LENGTH, Finish.STOP):
            return
        tokens = account.text[: account.filled]
        if any(row.account is account for frame in self.model.frames for row in frame.rows):
            return  # what a plan in flight uses enters the tree when that ends
        if account.id in self.holds:
            return  # pages set aside stay out of the tree
        if account.request.cache_write and not isinstance(self.cache, NullCache):
            check_kept(self.cache, account.request.space, tokens)
            self.kept = [*self.kept[-20:], (account.request.space, tokens)]

    def drain(self) -> None:
        """Release, resume and make ready; then everything must end within a bound, and every page come back (C3)."""
        for name in list(self.holds):
            self.release(name)
        self.resume()
        for name in list(self.model.accounts):
            self.ready(name)
        while self.in_flight:
            self.commit()
        while self.model.accounts:
            config = self.model.config
            chunk = min(config.max_step_tokens, config.chunk_tokens or 10**9, config.long_prefill_tokens or 10**9)
            bound = 20 + sum(8 + pages_for(a.prompt + len(a.tokens), chunk) for a in self.model.accounts.values())
            idle = self.model.step - self.model.moved[1]
            law("C3 no wedge", idle < bound, idle, self.state)
            self.schedule()
            self.commit()
        law("no work when nothing lives", not self.scheduler.has_work())
        state = self.state
        quiet = {key: state[key] for key in ("private", "quarantined", "outstanding", "reserved", "running", "waiting")}
        law("A1 everything comes back", not any(quiet.values()), quiet)
        limit = self.model.config.pin_limit_pages or 0
        law("A1 only pins stay locked", state["locked"] <= (limit if self.pins else 0), state["locked"], limit)
        for name in {*self.stops, *(name.rsplit("/", maxsplit=1)[0] for name in self.stops)}:
            self.unpin(name)
        law("D7 pins are given back", self.state["locked"] == 0, self.state["locked"])
        for space, tokens in self.kept:
            check_content(self.cache, self.executor, space, tokens)


def _reason(reason: Any) -> str | None:
    return None if reason is None else str(reason.value)


BY_CACHE = ("lpm", "dfs-weight", "sjf")
"""Orders in which a request's place depends on how much of its prompt is cached."""


def _comparable(state: Mapping[str, Any], evicted: int, *, arranged: bool) -> dict[str, Any]:
    """A snapshot without what a pass leaves behind; `evicted` pages moved from the cache to the free ones.

    arranged: the order of those who wait counts as well.
    """
    out = {key: value for key, value in state.items() if key != "plan"}
    out["waiting"] = state["waiting"] if arranged else sorted(state["waiting"])
    out["free"], out["cached"] = state["free"] + evicted, state["cached"] - evicted
    out["requests"] = {name: {k: v for k, v in entry.items() if k not in ("wait_reason", "short_by")}  # worked out when asked for
                       for name, entry in state["requests"].items()}
    out["totals"] = {**state["totals"], "evicted_pages": state["totals"]["evicted_pages"] + evicted}
    return out


def _difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (one[key], two[key]) for key in one if one[key] != two.get(key)}
