"""The engine: one thread owns the scheduler, another one computes, and the event loop talks to both through an inbox.

What lives here: the host loop with up to two plans in flight, streams of tokens, and the signals that health is told from.
What does not: HTTP, text, and any decision about who runs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig
from kvsched.errors import HostError, InvalidRequest
from kvsched.plan import Ended, Outcome, Plan, Status, StepResult
from kvsched.request import Finish
from kvsched.verdict import Refused, WaitReason
from reference_server.executor import Model, ModelExecutor
from reference_server.sampling import Sampling
from reference_server.settings import Settings
from reference_server.stats import Vitals
from reference_server.stream import Piece, Stream

log = logging.getLogger("reference_server")
Answer = TypeVar("Answer")

BLOCKED_WAIT_S = 0.05
"""How long an engine that can start nothing waits for news before it asks again: often enough for a stall to be counted."""
ANSWER_S = 5.0
"""How long somebody who looks at the engine's state waits: longer than any sane step."""


class EngineDown(RuntimeError):
    """The engine takes no requests: not started, draining, or dead. The message says which."""


class EngineBusy(RuntimeError):
    """The engine did not answer in time: it waits for a step that is still computed."""


@attrs.define
class _Times:
    """Where the time went."""

    model_s: float = 0.0
    scheduler_s: float = 0.0
    decode_steps: int = 0
    decode_model_s: float = 0.0
    decode_scheduler_s: float = 0.0
    decode_wall_s: float = 0.0


@attrs.define(eq=False)
class _Flight:
    """A plan under way, and what it has cost so far."""

    plan: Plan
    result: Future[tuple[StepResult, float, float]]
    scheduler_s: float


class Engine:
    """Serves requests over a model: `start`, then `submit` from an event loop, and `stop`.

    model: what computes. settings: sizes of the pool, limits, deadlines. Raises `kvsched.errors.ConfigError` for settings
    that cannot work together. The pool is taken from memory here.
    """

    def __init__(self, model: Model, *, settings: Settings) -> None:
        limit = model.config.context_length
        self.context_limit = limit if settings.context_limit is None else min(limit, settings.context_limit)
        self.settings = settings
        self.vocabulary = int(model.config.vocab_size)
        config = SchedulerConfig(
            page_size=settings.page_size, max_running=settings.max_running, max_step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.chunk_tokens, context_limit=self.context_limit, admission=settings.admission,
            order=settings.order, head=settings.head, max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens, max_in_flight=settings.max_in_flight, stall_steps=settings.stall_steps,
        )
        cache = RadixCache(settings.page_size) if settings.prefix_cache else None
        self.scheduler = Scheduler(config, PagePool(settings.pages, settings.page_size), cache)
        self.executor = ModelExecutor(model, pages=settings.pages, page_size=settings.page_size)
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Callable[[BaseException], None]]] = queue.SimpleQueue()
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._flying: deque[_Flight] = deque()
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._post: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Piece]]] = {}
        self._times, self._last_commit = _Times(), 0.0
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._prompt_tokens = self._steps = self._failures = 0
        self._computing: float | None = None
        self._blocked = self._draining = self._started = self._over = False
        self._death: BaseException | None = None
        self._vitals = self._look()

    # -- from any thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Once."""
        self._thread.start()
        self._started = True

    def stop(self, drain_s: float) -> None:
        """Take no more requests, let those that run end for up to `drain_s` seconds, end the rest, and join the threads. Blocks."""
        self.drain()
        self._thread.join(max(drain_s, 0.0))
        if self._thread.is_alive():
            self._tell(self._give_up)
            self._thread.join(self.settings.step_deadline_s)
        self._device.shutdown(wait=not self._thread.is_alive(), cancel_futures=True)

    def drain(self) -> None:
        """Take no more requests from now on."""
        self._draining = True
        self._tell(lambda: None)

    @property
    def vitals(self) -> Vitals:
        """The engine as of its last turn. Takes no lock."""
        return self._vitals

    @property
    def live(self) -> bool:
        """Whether an orchestrator should let it be: work moves, or there is none (law F1)."""
        since = self._computing
        stuck = since is not None and time.monotonic() - since > self.settings.step_deadline_s
        return self._death is None and not stuck and self._vitals.health.condition.value in ("idle", "live")

    @property
    def ready(self) -> bool:
        """Whether another request should be sent here."""
        return self._started and not self._draining and self.live and self._vitals.health.ready

    @property
    def state(self) -> str:
        """One word for people: starting, draining, dead, stuck, or the scheduler's condition."""
        if self._death is not None:
            return "dead"
        if not self._started:
            return "starting"
        if not self.live and self._vitals.health.condition.value in ("idle", "live"):
            return "stuck"
        return "draining" if self._draining and self.live else self._vitals.health.condition.value

    def abort(self, key: str) -> None:
        """The client is gone: end the request and every sample of it. Unknown ids are no error."""
        self._tell(lambda: self._abort(key))

    def finish(self, key: str) -> None:
        """The host found the end of one sample in its text (a stop string). Unknown ids are no error."""
        self._tell(lambda: self._finish(key))

    # -- from an event loop ---------------------------------------------------------------------------------------

    async def submit(self, request: Request, sampling: Sampling) -> Stream | Refused:
        """Queue a request. Raises `EngineDown`, or `InvalidRequest` for token ids beyond the vocabulary or an id in use.

        A caller that is cancelled meanwhile leaves nothing behind.
        """
        if int(request.tokens.max()) >= self.vocabulary:
            raise InvalidRequest(f"prompt must hold token ids below {self.vocabulary}, not {int(request.tokens.max())}")
        if not self._started or self._draining:
            raise EngineDown("the server is draining" if self._draining else "the server is not started")
        loop = asyncio.get_running_loop()
        try:
            return await self._ask(lambda: self._submit(request, sampling, loop))
        except asyncio.CancelledError:
            self.abort(request.id)
            raise

    async def snapshot(self) -> dict[str, Any]:
        """The scheduler's whole state, with `why` each waiting request waits. Raises `EngineBusy` or `EngineDown`."""
        try:
            return await asyncio.wait_for(self._ask(self._snapshot), ANSWER_S)
        except TimeoutError:
            raise EngineBusy(f"the engine did not answer within {ANSWER_S:g} s") from None

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Have something called in the engine's thread, and wait for what it gives."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def give(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        def ask() -> None:
            try:
                answer = question()
            except (HostError, EngineDown) as error:  # the asker's mistake; anything else is the engine's end
                _call(loop, fail, error)
            else:
                _call(loop, give, answer)

        self._tell(ask, lambda error: _call(loop, fail, error))
        return await future

    def _tell(self, message: Callable[[], None], refuse: Callable[[BaseException], None] = lambda _: None) -> None:
        """Put a message into the inbox. refuse: called instead where the engine has come to its end."""
        self._inbox.put((message, refuse))
        if self._over:
            self._refuse_all()

    def _refuse_all(self) -> None:
        while True:
            try:
                _, refuse = self._inbox.get_nowait()
            except queue.Empty:
                return
            refuse(EngineDown(f"the engine has ended: {self._death!r}" if self._death is not None else "the server has stopped"))

    # -- in the engine's thread: the loop -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._turn()
                self._vitals = self._look()
                self._deliver()
        except BaseException as error:  # the thread ends here, and everybody who waits must hear of it
            self._death = error
            log.critical("the engine has died", exc_info=error)
        self._over = True
        for key in list(self._streams):
            self._end(Ended(key, Finish.ERROR, 0, 0, 0, 0, 0, 0, 0))
        self._deliver()
        self._refuse_all()

    def _receive(self) -> bool:
        """Take what is in the inbox; with nothing to do, wait for more. False when all is done and no more is wanted."""
        idle = not self._flying and not self.scheduler.has_work()
        if idle and self._draining:
            return False
        timeout = None if idle else BLOCKED_WAIT_S if self._blocked else 0.0
        try:
            message, _ = self._inbox.get(timeout != 0.0, timeout)
            message()
            while True:
                message, _ = self._inbox.get_nowait()
                message()
        except queue.Empty:
            return True

    def _turn(self) -> None:
        """Make one plan, start it, and commit what must be committed before the next one."""
        self._blocked = False
        if not self.scheduler.has_work():
            return
        begin = time.monotonic()
        plan = self.scheduler.schedule()
        spent = time.monotonic() - begin
        self._flying.append(_Flight(plan, self._device.submit(self._compute, plan), spent))
        if plan and len(self._flying) < self.settings.max_in_flight:
            return  # there is room for the next step beside this one
        self._blocked = plan.status is Status.BLOCKED
        # an empty plan says that nothing can start before what is in flight has ended: then wait for all of it
        while self._flying and (not plan or len(self._flying) == self.settings.max_in_flight):
            self._commit(self._flying.popleft())

    def _commit(self, flight: _Flight) -> None:
        result, started, model_s = flight.result.result()
        begin = time.monotonic()
        outcome = self.scheduler.commit(flight.plan, result)
        now = time.monotonic()
        spent, times = flight.scheduler_s + now - begin, self._times
        times.model_s += model_s
        times.scheduler_s += spent
        if flight.plan:
            self._steps += 1
            if not flight.plan.prefill:
                times.decode_steps += 1
                times.decode_model_s += model_s
                times.decode_scheduler_s += spent
                times.decode_wall_s += now - max(self._last_commit, started)
        self._last_commit = now
        self._failures += result.failed is not None
        self._hand_out(flight.plan, outcome)

    def _compute(self, plan: Plan) -> tuple[StepResult, float, float]:
        """In the device's thread: the result, when it was begun, and the seconds that it took."""
        begin = self._computing = time.monotonic()
        try:
            result = self.executor.run(plan)
            return result, begin, time.monotonic() - begin
        finally:
            self._computing = None

    def _hand_out(self, plan: Plan, outcome: Outcome) -> None:
        """Sort a step's tokens and ends into the streams."""
        ended = {end.id: end for end in outcome.ended}
        for key, token in zip(plan.ids, outcome.tokens.tolist(), strict=True):
            if key in ended:
                self._end(ended.pop(key), token)
            elif token >= 0:
                stream, index = self._streams[key]
                self._post.setdefault(stream.loop, []).append((stream, Piece(index, (token,))))
        for end in ended.values():
            self._end(end)

    def _end(self, end: Ended, token: int = -1) -> None:
        """One sample is over: close its part of the stream."""
        self.executor.drop(end.id)
        self._ended[end.finish.name.lower()] += 1
        stream, index = self._streams.pop(end.id)
        self._post.setdefault(stream.loop, []).append((stream, Piece(index, (token,) if token >= 0 else (), end)))

    def _deliver(self) -> None:
        """Send what has been gathered, one call to each event loop."""
        for loop, pieces in self._post.items():
            _call(loop, _put_all, pieces)
        self._post = {}

    # -- in the engine's thread: messages -------------------------------------------------------------------------

    def _submit(self, request: Request, sampling: Sampling, loop: asyncio.AbstractEventLoop) -> Stream | Refused:
        if self._draining:
            raise EngineDown("the server is draining")
        if self._failures:  # whatever spoilt a step may have spoilt what is cached: nobody who comes later reads it
            space = attrs.evolve(request.namespace, version=f"after {self._failures} failures")
            request = attrs.evolve(request, namespace=space)
        answer = self.scheduler.submit(request)
        if not answer:
            self._refused[answer.reason.value] += 1
            return answer
        stream = Stream(answer, request, loop)
        for index, key in enumerate(answer.ids):
            self._streams[key] = stream, index
            self.executor.add(key, sampling, index)
        self._prompt_tokens += len(request.tokens) * len(answer.ids)
        return stream

    def _abort(self, key: str) -> None:
        mine = [name for name, (stream, _) in self._streams.items() if key in (name, stream.id)]
        if self.scheduler.abort(key):
            for name in mine:
                self._end(Ended(name, Finish.ABORT, 0, 0, 0, 0, 0, 0, 0))

    def _finish(self, key: str) -> None:
        for end in self.scheduler.finish(key):
            self._end(end)

    def _give_up(self) -> None:
        for key in self.scheduler.abort_all():
            self._end(Ended(key, Finish.ABORT, 0, 0, 0, 0, 0, 0, 0))

    def _snapshot(self) -> dict[str, Any]:
        state = self.scheduler.snapshot()
        state["why"] = {key: attrs.asdict(self.scheduler.explain(key), value_serializer=_plain) for key in state["waiting"]}
        for key, record in state["requests"].items():
            stream, _ = self._streams[key]
            record |= {"prompt": stream.prompt_tokens, "max_new_tokens": stream.max_new_tokens}
        return state

    def _look(self) -> Vitals:
        return Vitals(
            health=self.scheduler.health(), occupancy=self.scheduler.occupancy, totals=self.scheduler.totals,
            prompt_tokens=self._prompt_tokens, steps=self._steps, ended=dict(self._ended), refused=dict(self._refused),
            failures=self._failures, **attrs.asdict(self._times),
        )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    """Call in an event loop, if it is still there."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:  # the loop is closed: nobody is left to hear it
        log.debug("an event loop is gone")


def _put_all(pieces: list[tuple[Stream, Piece]]) -> None:
    for stream, piece in pieces:
        stream.put(piece)


def _plain(_: Any, __: Any, value: Any) -> Any:
    """An enumeration as its word."""
    return value.value if isinstance(value, WaitReason) else value
