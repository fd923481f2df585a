"""The front door: `Scheduler`, which wires the rooms together and holds no policy of its own.

Every public method checks first and changes state afterwards, so a call that raises has changed nothing. One thread
owns the object; events go to the sink once the state is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
import numpy as np

from kvsched.admission.intake import admit_to_queue, as_accepted, check_block, new_lives, refusal
from kvsched.admission.ledger import CommitmentLedger
from kvsched.commit import commit
from kvsched.config import SETTABLE, SchedulerConfig
from kvsched.core import Core
from kvsched.ending import end
from kvsched.errors import (
    Broken,
    CallbackFailed,
    ConfigError,
    DuplicateRequest,
    HoldRefused,
    InvalidRequest,
    OutOfOrder,
    ReentrantCall,
    TooManyInFlight,
    UnknownRequest,
)
from kvsched.explain import explain
from kvsched.holds import hold, release
from kvsched.live import Live
from kvsched.liveness import Health, health, stalled
from kvsched.order import ORDERS
from kvsched.plan import Agreed, Ended, Flushed, Outcome, Plan, StepResult
from kvsched.planning import make_plan
from kvsched.protocols import EventSink, Pool, TreeCache
from kvsched.request import Cause, Finish, Request, State, whole
from kvsched.results import check_result
from kvsched.retraction import retract
from kvsched.rollback import rollback
from kvsched.snapshot import accounting, check, max_servable, request_state, snapshot
from kvsched.units import Pages, Tokens, sealed
from kvsched.verdict import Accepted, Explanation, Refused

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(method: Callable[Concatenate[Scheduler, P], R]) -> Callable[Concatenate[Scheduler, P], R]:
    """Refuse a call from inside a callback and on a broken object; deliver events when the call is done.

    A method checks first and then says `_changing = True`. What is raised before that has changed nothing; what is raised
    after it leaves the object broken.
    """

    @wraps(method)
    def guarded(self: Scheduler, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._busy:
            raise ReentrantCall(f"{method.__name__}() was called from inside a callback of this scheduler")
        if self._broken is not None:
            raise Broken(f"this scheduler broke in an earlier call: {self._broken!r}") from self._broken
        self._busy = True
        try:
            answer = method(self, *args, **kwargs)
            self._changing = False
            if self._core.events:
                self._deliver(answer)
        except BaseException as error:
            changing, self._changing = self._changing, False
            if changing and not isinstance(error, HoldRefused):  # which is raised before anything is taken
                self._broken = error
                if isinstance(error, Exception):
                    raise Broken(f"{method.__name__}() was interrupted in the middle by {error!r}") from error
            raise
        finally:
            self._busy = False
        return answer

    return guarded


def _string(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, not {value!r}")


def _fits(part: object, name: str, protocol: type) -> None:
    """Raise `ConfigError` unless the part has what the protocol asks for; a class in place of an object of it has not."""
    if isinstance(part, type):
        raise ConfigError(f"{name} must be an object, not the class {part.__name__}")
    missing = sorted(member for member in vars(protocol) if not member.startswith("_") and not hasattr(part, member))
    if missing:
        asked = f"what kvsched.protocols.{protocol.__name__} asks for"
        raise ConfigError(f"{name} must have {asked}; {type(part).__name__} lacks {', '.join(missing)}")


class Scheduler:
    """Decides which requests run each step, on which pages, what is evicted or retracted, and what is refused.

    config: every knob. pool: hands out pages; its page size must be the config's. cache: remembers prefixes; None for
    none. sink: hears events. ledger: for the simulator, which alone may switch it off.

    A host calls schedule(), runs the plan, and calls commit() or rollback(): every plan ends in one of the two.

    >>> from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
    >>> sched = Scheduler(SchedulerConfig(page_size=16), PagePool(64, 16), RadixCache(16))
    >>> bool(sched.submit(Request("r1", prompt=range(40), max_new_tokens=2)))
    True
    >>> while sched.has_work():
    ...     plan = sched.schedule()
    ...     outcome = sched.commit(plan, StepResult(tokens=[7] * len(plan)))
    >>> [(end.id, end.finish.name, end.generated) for end in outcome.ended]
    [('r1', 'LENGTH', 2)]
    """

    def __init__(self, config: SchedulerConfig, pool: Pool, cache: TreeCache | None = None, *, sink: EventSink | None = None,
                 ledger: CommitmentLedger | None = None) -> None:
        if not isinstance(config, SchedulerConfig):
            raise ConfigError(f"config must be a SchedulerConfig, not {type(config).__name__}")
        _fits(pool, "pool", Pool)
        if cache is not None:
            _fits(cache, "cache", TreeCache)
        if sink is not None:
            _fits(sink, "sink", EventSink)
        if ledger is not None and not isinstance(ledger, CommitmentLedger):
            raise ConfigError(f"ledger must be a CommitmentLedger or None, not {type(ledger).__name__}")
        if pool.page_size != config.page_size:
            raise ConfigError(f"page_size is {config.page_size} in the config but {pool.page_size} in the pool")
        if cache is not None and cache.page_size != config.page_size:
            raise ConfigError(f"page_size is {config.page_size} in the config but {cache.page_size} in the cache")
        if cache is not None and not cache.caches:
            cache = None
        self._core = Core(config, pool, cache, sink, CommitmentLedger() if ledger is None else ledger)
        self._core.order = ORDERS[config.order]()
        self._busy = False
        self._changing = False
        self._broken: BaseException | None = None
        self._last: Plan | None = None

    # -- what a host asks -----------------------------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        """The configuration in force."""
        return self._core.config

    @property
    def in_flight(self) -> tuple[Plan, ...]:
        """Plans made and not yet committed or rolled back, oldest first."""
        return tuple(record.plan for record in self._core.in_flight)

    @property
    def block_table(self) -> Pages:
        """int32 [rows, columns]: page of each column of each row. A read-only view of the live table.

        The table is replaced when it grows, so ask for it after each schedule(); or keep a copy by `Plan.deltas`.
        """
        view = self._core.residents.table.view()
        view.flags.writeable = False
        return view

    @property
    def ceiling(self) -> int:
        """Pages that an otherwise empty pool can give to one request: usable pages less those pinned for good (law B2)."""
        return self._core.ceiling()

    @property
    def max_servable_tokens(self) -> int:
        """Largest P + N - 1, in slots, that one request can have: what the pool holds, pins taken off, and the context limit."""
        return max_servable(self._core)

    @property
    def stalled(self) -> bool:
        """Whether work exists and nothing has moved for `stall_steps` steps (law F1)."""
        return stalled(self._core)

    def health(self) -> Health:
        """The signals of progress and the word for them: idle, live, stalled or retry loop; and whether the queue is open."""
        return health(self._core)

    def has_work(self) -> bool:
        """Whether anything is queued, resident or in flight. O(1).

        A plan in flight is work too, an empty one included. An empty plan from schedule() says that nothing can start
        before something else happens, so a host that keeps two plans in flight commits all of them before it asks again.
        """
        return bool(self._core.lives or self._core.in_flight)

    @property
    def occupancy(self) -> dict[str, int]:
        """Pages of the pool: `usable`, and the buckets that add up to it: free, cached, locked, private, quarantined (law A1). O(1)."""
        return accounting(self._core)

    @property
    def totals(self) -> dict[str, int]:
        """What has happened so far, each count in its own unit, as in `snapshot()`; they only rise, but for `cached_tokens` at a rollback. O(1)."""
        return dict(self._core.totals)

    def explain(self, key: str) -> Explanation:
        """Why a live request gets nothing, as of the last pass. Raises `UnknownRequest`."""
        return explain(self._core, self._live(key))

    def request_state(self, key: str) -> dict[str, Any]:
        """One live request as plain data. Raises `UnknownRequest`."""
        return request_state(self._core, self._live(key))

    def generated(self, key: str) -> Tokens:
        """Tokens delivered so far to a live request, read-only. Raises `UnknownRequest`."""
        live = self._live(key)
        if live.row < 0:
            return live.generated
        return sealed(np.concatenate((live.generated, self._core.log.read(live.row, live.since))))

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data, in the words of the scenario format. O(state)."""
        return snapshot(self._core, self._last)

    def check(self) -> None:
        """Raise `AccountingError`, every term printed, unless the laws of accounting hold. O(state)."""
        check(self._core)

    # -- requests -------------------------------------------------------------------------------------------------

    @_guarded
    def submit(self, request: Request) -> Accepted | Refused:
        """Take a request, or refuse it with a reason and two numbers. Total: what is accepted fits an empty pool.

        Raises `InvalidRequest` for what is no `Request`, `DuplicateRequest` for the id of a live one. O(1) for n = 1.
        """
        core = self._core
        if not isinstance(request, Request):
            raise InvalidRequest(f"submit takes a Request, not {type(request).__name__}")
        check_block(core, request)
        ids = (request.id,) if request.n == 1 else tuple(f"{request.id}/{child}" for child in range(request.n))
        for key in (request.id, *ids):
            if key in core.lives or key in core.parents:
                raise DuplicateRequest(f"request {key!r} is live already")
        refused, limit = refusal(core, request)
        if refused is not None:
            return refused
        self._changing = True
        admit_to_queue(core, new_lives(core, request, ids, limit))
        return as_accepted(request, ids, limit)

    @_guarded
    def abort(self, key: str) -> bool:
        """End a request, or every child of it, at once; pages in flight come back when their plan ends.

        False for an id that is not live; nothing is remembered of it.
        """
        return self._abort(key)

    @_guarded
    def finish(self, key: str) -> tuple[Ended, ...]:
        """End a request, or every child of it, as stopped: the host found a stop string in text it had already.

        Like a stop in commit(): what was computed may stay in the cache. Returns the records of those who ended.
        """
        found = self._named(key)
        self._changing = True
        ended = tuple(end(self._core, live, Finish.STOP) for live in found)
        self._rest()
        return ended

    @_guarded
    def abort_all(self) -> tuple[str, ...]:
        """End every live request. Returns their ids."""
        self._changing = True
        lives = list(self._core.lives.values())
        for live in lives:
            end(self._core, live, Finish.ABORT)
        self._rest()
        return tuple(live.id for live in lives)

    @_guarded
    def mark_ready(self, key: str) -> bool:
        """A request submitted with ready=False may start. Costs no tokens. False when it was ready or is not live."""
        found = [live for live in self._named(key) if not live.ready]
        self._changing = True
        for live in found:
            self._core.queue.made_ready(live)
        return bool(found)

    # -- the step -------------------------------------------------------------------------------------------------

    @_guarded
    def schedule(self, agreed: Agreed | None = None) -> Plan:
        """Decide the next step. Reads no clock and draws no random number: the same calls give the same plans.

        agreed: what the ranks agreed for this step, None for one rank; `Agreed(admit=0)` admits nobody, `Agreed(prefill_tokens=0)`
        leaves the decodes alone. Raises `TooManyInFlight` when `max_in_flight` plans wait for their end. Cost: per page crossed, chunk and admission; O(1) numpy calls for steady decodes.
        """
        core = self._core
        if len(core.in_flight) >= core.config.max_in_flight:
            raise TooManyInFlight(f"{len(core.in_flight)} plans are in flight and max_in_flight is {core.config.max_in_flight}")
        if agreed is not None:
            if not isinstance(agreed, Agreed):
                raise InvalidRequest(f"agreed must be an Agreed or None, not {type(agreed).__name__}")
            self._changing = True
            for key in agreed.aborts:
                self._abort(key)
        self._changing = True
        self._last = make_plan(core, agreed)
        return self._last

    @_guarded
    def commit(self, plan: Plan, result: StepResult) -> Outcome:
        """Apply the result of the oldest plan in flight.

        Raises `OutOfOrder` for any other plan and `InvalidResult` for a result that does not fit; both change nothing.
        Cost: array work per row, Python per chunk and per request that ends.
        """
        core = self._core
        record = core.in_flight[0] if core.in_flight else None
        if record is None or record.plan is not plan:
            raise OutOfOrder(self._order_error(plan, "commit", "oldest"))
        checked = check_result(record, result)
        self._changing = True
        outcome = commit(core, record, checked)
        if outcome.ended:
            self._rest()
        return outcome

    @_guarded
    def rollback(self, plan: Plan) -> None:
        """The newest plan in flight did not happen. Evictions and retractions stay, all else is as before.

        Raises `OutOfOrder` for any other plan.
        """
        core = self._core
        record = core.in_flight[-1] if core.in_flight else None
        if record is None or record.plan is not plan:
            raise OutOfOrder(self._order_error(plan, "rollback", "newest"))
        self._changing = True
        rollback(core, record)

    # -- control --------------------------------------------------------------------------------------------------

    @_guarded
    def pause(self, mode: str) -> tuple[str, ...]:
        """Stop starting and running requests: "hold" keeps their pages, "retract" sends them back to the queue.

        Idempotent. Steps in flight still end. Returns the ids of those it stopped. Raises `InvalidRequest` for another mode.
        """
        core = self._core
        if mode not in ("hold", "retract"):
            raise InvalidRequest(f"mode must be 'hold' or 'retract', not {mode!r}")
        self._changing = True
        core.paused = mode
        stopped = [live for live in core.running.values() if mode == "retract" or live.state is State.RUNNING]
        for live in stopped:
            if mode == "retract":
                retract(core, live, in_pass=False)
            else:
                live.move(Cause.HOLD)
                core.tell("paused", live)
        return tuple(live.id for live in stopped)

    @_guarded
    def resume(self) -> None:
        """End a pause. Idempotent."""
        core = self._core
        self._changing = True
        core.paused = None
        for live in core.running.values():
            if live.state is State.PAUSED:
                live.move(Cause.RESUME)
                core.tell("resumed", live)

    @_guarded
    def flush(self) -> Flushed:
        """Empty the cache, pins included. Refused, as an answer, while any request holds pages or a plan is in flight."""
        core = self._core
        if core.in_flight:
            return Flushed(ok=False, pages=0, reason=f"{len(core.in_flight)} plans are in flight")
        if core.running:
            return Flushed(ok=False, pages=0, reason=f"{len(core.running)} requests hold pages")
        if core.held_cached:
            return Flushed(ok=False, pages=0, reason=f"the host holds {core.held_cached} cached pages")
        if core.cache is None:
            return Flushed(ok=True, pages=0)
        self._changing = True
        for owner in list(core.pins):
            core.unpin(owner)
        pages = core.cache.clear()
        core.shrunk += 1
        core.pool.release(pages)
        return Flushed(ok=True, pages=len(pages))

    @_guarded
    def set_limits(self, /, **limits: Any) -> None:
        """Change limits of a live scheduler (`kvsched.config.SETTABLE`). Nothing that runs is stopped by it.

        Raises `ConfigError` naming the key and what is allowed; then nothing has changed.
        """
        core = self._core
        for key in limits:
            if key not in SETTABLE:
                raise ConfigError(f"{key} cannot be set on a live scheduler; allowed are {', '.join(SETTABLE)}")
        changed = attrs.evolve(core.config, **limits)
        widest = 0 if "max_step_tokens" not in limits else max((live.request.block_tokens or 0 for live in core.lives.values()), default=0)
        if changed.max_step_tokens < widest:
            raise ConfigError(f"max_step_tokens must be at least {widest}, the widest block of a live request, not {changed.max_step_tokens}")
        if changed.order != core.config.order:
            core.order = ORDERS[changed.order]()
        core.config = changed

    @_guarded
    def hold_pages(self, name: str, pages: int, steps: int | None = None) -> Pages:
        """Set pages aside under a name: that request's own if it holds any, else free ones, then evictable ones.

        They count as quarantined until release_pages(name), or for `steps` steps. Returns their ids. Raises `HoldRefused`, changing
        nothing, when there are not enough pages that nobody was promised.
        """
        if not name or not isinstance(name, str):
            raise InvalidRequest(f"name must be a string of at least one character, not {name!r}")
        whole(pages, "pages", 1)
        whole(steps, "steps", 1, none=True)
        self._changing = True
        return hold(self._core, name, int(pages), None if steps is None else self._core.step + int(steps))

    @_guarded
    def release_pages(self, name: str) -> bool:
        """Give held pages back. False when the name holds none (any more): an acknowledgement may come after the lease."""
        _string(name, "name")
        self._changing = True
        return release(self._core, name)

    @_guarded
    def unpin(self, owner: str) -> bool:
        """Let go of the pages that an ended request pinned. False when it has no pin."""
        _string(owner, "owner")
        self._changing = True
        return self._core.unpin(owner)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _named(self, key: str) -> list[Live]:
        """The live request of this id, or the live children of it."""
        _string(key, "id")
        live = self._core.lives.get(key)
        return [live] if live is not None else list(self._core.parents.get(key, ()))

    def _live(self, key: str) -> Live:
        _string(key, "id")
        live = self._core.lives.get(key)
        if live is None:
            raise UnknownRequest(f"no live request has the id {key!r}")
        return live

    def _abort(self, key: str) -> bool:
        found = self._named(key)
        self._changing = True
        for live in found:
            end(self._core, live, Finish.ABORT)
        self._rest()
        return bool(found)

    def _rest(self) -> None:
        """With nothing left to do the estimate returns to its start (law C1)."""
        core = self._core
        if not core.lives:
            core.ratio.reset()
            core.known_promises = False

    def _order_error(self, plan: object, verb: str, which: str) -> str:
        plans = [flying.step for flying in self.in_flight]
        if not isinstance(plan, Plan):
            return f"{verb} takes a Plan of this scheduler, not {type(plan).__name__}"
        if not any(plan is flying for flying in self.in_flight):
            return f"the plan of step {plan.step} is not in flight here (it has ended, or is another scheduler's); in flight: {plans}"
        return f"{verb} goes {which} first: in flight are the plans of steps {plans}, not step {plan.step} next"

    def _deliver(self, answer: object) -> None:
        """Hand the events of a finished call to the sink, all of them, and only then say that one of them failed."""
        core = self._core
        events, core.events = core.events, []
        sink = core.sink
        if sink is None:
            return
        failed: BaseException | None = None
        for event in events:
            try:
                sink.event(event)
            except BaseException as error:  # noqa: BLE001  # a foreign exception is translated at the seam, an interrupt goes on
                failed = failed or error
        if isinstance(failed, Exception):
            message = f"the event sink raised {failed!r}; the call was done and the scheduler is usable"
            raise CallbackFailed(message, answer) from failed
        if failed is not None:
            raise failed
