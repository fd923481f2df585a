"""Runs a checked scenario against the real scheduler, and plays the executor in it.

Every request samples the same token at every position, or the stop token where the file says so. What does not live here:
the file format (`document`), the comparison (`expect`), and the reported state (`state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvsched.errors import ConfigError, HostError, InternalError
from kvsched.plan import Plan, StepResult
from kvsched.request import Namespace, Request
from kvsched.scenario import state as records
from kvsched.scenario.document import Document, Event, InvalidScenario, Segment, Submit, load
from kvsched.scenario.expect import compare
from kvsched.scenario.prompts import SAMPLED, STOP, Vocabulary
from kvsched.units import Tokens

HELD, NOT_HELD, INVALID = 0, 1, 2
"""Exit codes: every expectation held; one did not; the file is not valid."""


@attrs.frozen
class Report:
    """What came of one file. `code` is its exit code; `state` is None where the file is not valid."""

    name: str
    code: int
    failures: tuple[str, ...]
    state: dict[str, Any] | None
    expectations: int = 0


def run_file(path: Path | str) -> Report:
    """Load and run one file. Everything that can be wrong with it is in the report; nothing is raised."""
    try:
        document = load(path)
    except InvalidScenario as error:
        return Report(name=Path(path).stem, code=INVALID, failures=(str(error),), state=None)
    return run(document)


def run(document: Document) -> Report:
    """Run a checked file on a scheduler of its own. The accounting equation is checked after each event."""
    try:
        room = Runner(document)
    except (InvalidScenario, ConfigError) as error:
        return Report(name=document.name, code=INVALID, failures=(str(error),), state=None)
    for event in document.events:
        try:
            room.take(event)
            room.scheduler.check()
        except (HostError, ConfigError) as error:
            failure = f"event {event.index} ({event.kind}): {error}"
            return Report(name=document.name, code=INVALID, failures=(*room.failures, failure), state=None)
        except InternalError as error:
            failure = f"event {event.index} ({event.kind}): a law of the scheduler is broken: {error}"
            return Report(name=document.name, code=NOT_HELD, failures=(*room.failures, failure), state=None)
        except Exception as error:  # noqa: BLE001 -- the scheduler is under test here: what it raises is the finding
            failure = f"event {event.index} ({event.kind}): the scheduler raised {type(error).__name__}: {error}"
            return Report(name=document.name, code=NOT_HELD, failures=(*room.failures, failure), state=None)
        if room.unreached:
            break
    code = NOT_HELD if room.failures else HELD
    return Report(name=document.name, code=code, failures=tuple(room.failures), state=room.state(), expectations=room.expectations)


@attrs.frozen
class _Known:
    """What the executor knows of a request: when its stop token comes (None: never), and its tokens per block (0: none)."""

    stop_after: int | None
    block: int


@attrs.frozen(eq=False)
class _Flight:
    """A plan in flight, with what was known of its rows' requests when it was made: an id may be used again meanwhile."""

    plan: Plan
    known: Mapping[str, _Known]
    reasons: Mapping[str, records.Reason]  # of the pass before, which stand again after a rollback


class Runner:
    """One scenario on one scheduler. `take` takes the events in order; `failures` collects what did not hold."""

    def __init__(self, document: Document) -> None:
        self.scheduler = records.build(document)
        self.failures: list[str] = []
        self.expectations = 0
        self.unreached = False
        self._words = Vocabulary(event.value for event in document.events if event.kind == "submit")
        self._flights: list[_Flight] = []
        self._known: dict[str, _Known] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._live: dict[str, None] = {}
        self._ended: dict[str, records.Record] = {}
        self._refused: dict[str, dict[str, Any]] = {}
        self._flushed: dict[str, Any] | None = None
        self._held: set[str] = set()
        self._reasons: Mapping[str, records.Reason] = {}

    def state(self) -> dict[str, Any]:
        """The state of SCENARIOS.md, as plain values. O(requests)."""
        return records.assemble(self.scheduler, self._ended, self._refused, self._flushed, self._reasons)

    def take(self, event: Event) -> None:
        """Do what one event says. Raises `HostError` or `ConfigError` where the file asks for what is not allowed."""
        if event.kind == "until":
            self._until(event)
        elif event.kind == "expect":
            self.expectations += 1
            found = compare(event.value, self.state())
            self.failures += [f"event {event.index} (expect): {mismatch}" for mismatch in found]
        else:
            getattr(self, f"_{event.kind}")(event.value)

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> None:
        fields = dict(submit.fields)
        fields["namespace"] = Namespace(**fields.get("namespace", {}))
        stop_after = None if fields.get("ignore_eos") else submit.stop_after
        stops = () if submit.stop_after is None else (STOP,)
        prompt = self._words.tokens(submit.prompt, self._generated)
        answer = self.scheduler.submit(Request(submit.id, prompt, stop_token_ids=stops, **fields))
        if not answer:
            self._refused[submit.id] = records.refused(answer)
            return
        self._refused.pop(submit.id, None)
        self._groups[submit.id] = answer.ids
        for name in answer.ids:
            self._ended.pop(name, None)
            self._live[name] = None
            self._known[name] = _Known(stop_after, fields.get("block_tokens") or 0)

    def _generated(self, segment: Segment) -> Tokens:
        name = str(segment.name)
        if name in self._live:
            count = int(self.scheduler.request_state(name)["generated"])
        elif name in self._ended:
            count = int(self._ended[name].state["generated"])
        else:
            children = self._groups.get(name)
            hint = f"name one of {', '.join(children)}" if children else "no request of that id was accepted"
            raise InvalidScenario(f"submit.prompt names '@{name}': {hint}")
        if segment.length > count:
            raise InvalidScenario(f"submit.prompt names {segment.length} tokens of '@{name}'; allowed: the {count} that it generated")
        tokens = np.full(segment.length, SAMPLED, dtype=np.int32)
        stop_after = self._known[name].stop_after
        if stop_after is not None and stop_after <= segment.length:
            tokens[stop_after - 1] = STOP
        return tokens

    def _ready(self, name: str) -> None:
        self.scheduler.mark_ready(name)

    def _abort(self, name: str) -> None:
        self._end(self._ids(name), lambda: self.scheduler.abort(name))

    def _abort_all(self, _: Any) -> None:
        self._end(tuple(self._live), self.scheduler.abort_all)

    def _end(self, ids: Iterable[str], act: Any) -> None:
        gaps = self.scheduler.snapshot()["max_gap"]
        before = {name: (self.scheduler.request_state(name), gaps.get(name, 0)) for name in ids if name in self._live}
        if act():
            for name, (state, gap) in before.items():
                self._close(name, records.aborted(state, gap))

    def _close(self, name: str, record: records.Record) -> None:
        self._live.pop(name, None)
        self._ended[name] = record

    def _ids(self, name: str) -> tuple[str, ...]:
        return self._groups.get(name, (name,))

    # --- the host's other calls -------------------------------------------------------------------------------------------

    def _pause(self, mode: str) -> None:
        self.scheduler.pause(mode)

    def _resume(self, _: Any) -> None:
        self.scheduler.resume()

    def _flush(self, _: Any) -> None:
        answer = self.scheduler.flush()
        self._flushed = {"ok": answer.ok, "reason": answer.reason}

    def _set(self, limits: Mapping[str, Any]) -> None:
        self.scheduler.set_limits(**limits)

    def _hold_pages(self, hold: Mapping[str, Any]) -> None:
        self.scheduler.hold_pages(hold["name"], hold["pages"], hold["steps"])
        self._held.add(hold["name"])

    def _release_pages(self, name: str) -> None:
        # a lease that is over already may be released late; a name that never held anything is a slip of the file
        if not self.scheduler.release_pages(name) and name not in self._held:
            raise InvalidScenario(f"release_pages.id: {name!r} holds no pages; held were {sorted(self._held) or 'none'}")

    # --- steps ------------------------------------------------------------------------------------------------------------

    def _schedule(self, _: Any) -> None:
        plan = self.scheduler.schedule()
        known = {name: self._known[name] for name in plan.ids} if plan else {}
        self._flights.append(_Flight(plan, known, self._reasons))
        self._reasons = records.reasons(self.scheduler)

    def _commit(self, accepted: Mapping[str, int]) -> None:
        if not self._flights:
            raise InvalidScenario("commit needs a plan in flight, and there is none")
        flight = self._flights[0]
        outcome = self.scheduler.commit(flight.plan, self._result(flight, accepted))
        self._flights.pop(0)
        for ended in outcome.ended:
            self._close(ended.id, records.ended(ended))

    def _rollback(self, _: Any) -> None:
        if not self._flights:
            raise InvalidScenario("rollback needs a plan in flight, and there is none")
        self.scheduler.rollback(self._flights[-1].plan)
        self._reasons = self._flights.pop().reasons

    def _step(self, rounds: int) -> None:
        for _ in range(rounds):
            self._schedule(True)
            self._drain()

    def _drain(self) -> None:
        while self._flights:
            self._commit({})

    def _until(self, event: Event) -> None:
        kind, name = event.value
        if kind != "idle" and name not in self._groups and name not in self._known and name not in self._refused:
            raise InvalidScenario(f"until.{kind} names {name!r}, and no request of that id was submitted")
        self._drain()
        for _ in range(event.max_steps):
            if self._reached(kind, name):
                return
            self._step(1)
        if not self._reached(kind, name):
            self.unreached = True
            self.failures.append(self._unmet(event))

    def _reached(self, kind: str, name: str) -> bool:
        if kind == "idle":
            return not self.scheduler.has_work()
        ids = self._ids(name)
        if kind == "finished":
            return all(one in self._ended for one in ids)
        return all(one in self._live and self.scheduler.request_state(one)["status"] == "running" for one in ids)

    def _unmet(self, event: Event) -> str:
        kind, name = event.value
        wanted = "idle" if kind == "idle" else f"{name} {kind}"
        left = []
        for one in self._live:
            state = self.scheduler.request_state(one)
            short = "" if state["short_by"] is None else f", short by {state['short_by']}"
            why = "" if state["wait_reason"] is None else f" ({state['wait_reason']}{short})"
            left.append(f"{one} {state['status']}{why}")
        still = "; ".join(left) or "no request is left"
        return f"event {event.index} (until): expected {wanted} within {event.max_steps} steps, got: {still}"

    # --- the executor -----------------------------------------------------------------------------------------------------

    def _result(self, flight: _Flight, accepted: Mapping[str, int]) -> StepResult:
        """The sampled tokens of one plan. O(rows) with stop tokens, drafts or blocks; O(1) calls otherwise."""
        plan, known = flight.plan, flight.known
        ids = plan.ids
        for name in accepted:
            if name not in ids:
                raise InvalidScenario(f"commit.accepted names {name!r}; allowed: {', '.join(ids) or 'no id, the plan has no rows'}")
        blocks = [known[name].block if row < plan.decodes else 0 for row, name in enumerate(ids)]
        width = max(1 + self.scheduler.config.lookahead_tokens, max(blocks, default=0))
        tokens = np.full((len(ids), width), SAMPLED, dtype=np.int64)
        counts = np.zeros(len(ids), dtype=np.int64)
        final = []
        for row, name in enumerate(ids):
            possible = int(plan.counts[row]) - 1 if row < plan.decodes else 0
            taken = accepted.get(name, possible if blocks[row] else 0)
            if taken > possible:
                raise InvalidScenario(f"commit.accepted.{name} is {taken}; allowed: at most {possible} drafts in this step")
            if not blocks[row]:
                counts[row] = taken
            elif taken == possible:
                final.append(row)
            self._place_stop(tokens[row], name, known[name])
        if width == 1:
            return StepResult(tokens=tokens[:, 0])
        return StepResult(tokens=tokens, accepted=counts, final=final)

    def _place_stop(self, row: np.ndarray[Any, np.dtype[np.int64]], name: str, known: _Known) -> None:
        if known.stop_after is not None and name in self._live:
            place = known.stop_after - 1 - int(self.scheduler.request_state(name)["generated"])
            if 0 <= place < len(row):
                row[place] = STOP
