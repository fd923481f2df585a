"""A plain account of what a host saw, and the laws that it must obey.

What lives here: `PlainModel`, which is told every call and every answer and works out, in the most obvious way, what the
scheduler's state must be. What does not: any code of the scheduler. Nothing here is fast; everything is meant to be
right at a glance. A broken law raises `ModelViolation`, which names it as DESIGN does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvsched.config import SchedulerConfig
from kvsched.plan import Outcome, Plan, Status, StepResult
from kvsched.request import Finish, Request
from kvsched.units import pages_for, total_slots
from kvsched.verdict import Accepted, Refused


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
    after the last one that was planned. high: most positions ever known to be computed. done: those of the present stay. sure: the most
    of any stay, without what a late row computed. stay: counts up.
    wait: steps in which it could decode and did not. peers: residents when it was last served.
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
    last_step: int | None = None
    gap: int = 0
    unsure: bool = False  # its history was rewritten by a rollback after another event; order is not judged

    @property
    def prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def total(self) -> int:
        return total_slots(self.prompt, self.limit)

    @property
    def filled(self) -> int:
        """Slots that are valid when everything delivered was computed."""
        return self.prompt + max(len(self.tokens) - 1, 0)

    @property
    def prefilling(self) -> bool:
        return self.resident and self.next < self.target

    @property
    def text(self) -> list[int]:
        prompt: list[int] = self.request.tokens.tolist()
        return prompt + self.tokens


@attrs.define(eq=False)
class _Row:
    account: Account
    stay: int
    start: int
    count: int
    samples: bool
    decode: bool


@attrs.define(eq=False)
class _Frame:
    plan: Plan
    rows: list[_Row]
    admitted: list[tuple[Account, bool, int, int]]  # account, started before, stay, tokens from the cache
    waits: list[tuple[Account, int, int]]
    parked: int


class PlainModel:
    """Told every call and answer of one scheduler; `check` compares what must hold with a snapshot.

    config: the scheduler's. usable: pages its pool can hand out. exact: whether the pool and the cache are such that
    every figure is determined (no holds on running requests, no pins); where it is not, a bound is checked instead.
    """

    def __init__(self, config: SchedulerConfig, usable: int) -> None:
        self.config = config
        self.usable = usable
        self.accounts: dict[str, Account] = {}
        self.order: list[Account] = []  # residents in order of admission
        self.frames: list[_Frame] = []
        self.ended: dict[str, int] = {}  # id: how often, over all lives of the id
        self.paused = False
        self.holds: set[str] = set()
        self.pins = 0
        self.step = self.commits = 0
        self.arrivals = 0
        self.emitted = self.finished = self.aborted = self.retractions = 0
        self.evicted = self.cached_tokens = 0
        self.prefilled = [0, 0]  # at least, at most: a failed row may or may not count
        self.recomputed = [0, 0]
        self.moved = [0, 0]  # step in which something moved last (law F1): that of the plan, and that of the commit
        self.overtaken: set[str] = set()
        self.parked_steps = 0

    # -- submit and abort -----------------------------------------------------------------------------------------------

    def submitted(self, request: Request, answer: Accepted | Refused, ceiling: int | None = None) -> None:
        """A2, B2, B11 worked out plainly: refused exactly when the arithmetic says so. `ceiling`: usable less hard pins."""
        ceiling = self.usable if ceiling is None else ceiling
        limit, allowed = self._arithmetic(request, ceiling)
        if isinstance(answer, Refused):
            got = (answer.reason.value, answer.needed, answer.available, answer.retryable)
            law("B2/B11 refused iff arithmetic says so", got in allowed, request.id, "got", got, "allowed", allowed)
            return
        law("B2/B11 refused iff arithmetic says so", not allowed or None in allowed, request.id, "accepted; must be", allowed)
        law("A2 limit", answer.max_new_tokens == limit, request.id, "got", answer.max_new_tokens, "expected", limit)
        ids = (request.id,) if request.n == 1 else tuple(f"{request.id}/{i}" for i in range(request.n))
        law("A4 children", answer.ids == ids, answer.ids, ids)
        for name in ids:
            self.accounts[name] = Account(name, request.id, request, limit, self.arrivals, request.ready)
            self.arrivals += 1
        self.pins += request.pin > 0

    def _arithmetic(self, request: Request, ceiling: int) -> tuple[int, set[Any]]:
        config, page = self.config, self.config.page_size
        prompt, limit = len(request.tokens), request.max_new_tokens
        slots = ceiling * page
        if limit is None:
            limit = slots - prompt + 1
            if config.context_limit is not None:
                limit = min(limit, config.context_limit - prompt)
            limit = max(limit, 0 if config.context_limit == prompt and prompt <= slots else 1)
        hard: set[Any] = set()
        need = pages_for(total_slots(prompt, limit), page)
        if need > ceiling:
            hard.add(("never_fits", need, ceiling, False))
        if config.context_limit is not None and prompt + limit > config.context_limit:
            hard.add(("context_limit", prompt + limit, config.context_limit, False))
        if config.context_limit == prompt and request.max_new_tokens is None:
            hard |= {("context_limit", prompt + 1, prompt, False), None}
        if hard:
            return limit, hard
        soft: set[Any] = set()
        fresh = [a for a in self.accounts.values() if not a.resident and not a.retractions and not a.started]
        unsure = any(a.unsure for a in self.accounts.values())
        n, queued = request.n, sum(a.prompt for a in fresh)
        bounds: list[tuple[str, int | None, int, int, int]] = [
            ("queue_requests", config.max_queued_requests, n, len(fresh), len(fresh)),
            ("queue_tokens", config.max_queued_tokens, n * prompt, queued, queued),
            ("inflight_tokens", config.max_inflight_prompt_tokens, n * prompt, *self._inflight()),
        ]
        for reason, bound, adds, low, high in bounds:
            if bound is None:
                continue
            if adds + high > bound:
                soft |= {(reason, adds, max(bound - used, 0), adds <= bound) for used in range(low, high + 1)}
                if adds + low <= bound or unsure:
                    soft.add(None)
        return limit, soft

    def _inflight(self) -> tuple[int, int]:
        """Prompt tokens submitted and not yet computed: counted at the plan (low) and at the commit (high)."""
        low = high = 0
        for account in self.accounts.values():
            cached = account.cached if account.resident else 0
            high += max(account.prompt - max(account.sure, cached), 0)
            if not account.retractions:
                low += max(account.prompt - max(account.high, cached, account.next), 0)
        return low, high

    def family(self, name: str) -> list[Account]:
        """Live accounts that an id stands for: itself, or its children (law A4)."""
        return [a for a in self.accounts.values() if name in (a.id, a.parent)]

    def abort_of(self, name: str, did: bool) -> None:
        """An abort did something exactly when something lived."""
        gone = self.family(name)
        law("abort is idempotent and says what it did", did == bool(gone), name, "returned", did, "live:", [a.id for a in gone])
        for account in gone:
            self._end(account)
            self.aborted += 1

    def _end(self, account: Account) -> None:
        self._leave(account)
        del self.accounts[account.id]
        self.ended[account.id] = self.ended.get(account.id, 0) + 1
        self.moved[1] = self.step

    def _leave(self, account: Account) -> None:
        if account.resident:
            self.order.remove(account)
        account.resident = account.paused = False
        account.stay += 1
        account.next = account.target = account.done = 0
        account.cached = 0

    # -- plans ----------------------------------------------------------------------------------------------------------

    def scheduled(self, plan: Plan, waiting: Mapping[str, str | None], admit: int | None = None, free_pages: int | None = None) -> None:
        """Take a plan. `waiting`: wait reason of each waiting request after this pass; the others: what the ranks agreed on."""
        self.step += 1
        law("steps are numbered", plan.step == self.step, plan.step, self.step)
        decodable = [a for a in self.order if self._decodable(a)]
        parked = [a.id for a in self.order if a.prefilling and not a.paused and a.id not in plan.retracted]
        parked += [name for name, reason in waiting.items() if reason == "step_tokens"]
        frame = _Frame(plan, [], [], [(a, a.wait, a.peers) for a in self.order], self.parked_steps)
        self._retracted(plan)
        self._admitted(plan, frame, waiting, admit)
        self._rows(plan, frame)
        self.frames.append(frame)
        self._limits(plan)
        self._status(plan, agreed=admit is not None or free_pages is not None)
        self._bounds(plan, decodable, parked)
        if admit is not None or free_pages is not None:
            self._count_anew()
        for name, reason in waiting.items():
            account = self.accounts[name]
            if self.paused or not account.ready:
                law("the first reason counts", reason == ("paused" if self.paused else "host"), name, reason)
            law("running_limit means that the places are taken", reason != "running_limit" or len(self.order) >= self.config.max_running, name)
        self.overtaken = {name for name, reason in waiting.items() if reason == "adapter_limit"}
        self.evicted += plan.evicted
        if not self.accounts:
            self.moved = [self.step, self.step]

    def _decodable(self, account: Account) -> bool:
        """Whether one more position is known to be wanted, every draft in flight taken as accepted."""
        if account.paused or account.prefilling:
            return False
        if account.request.block_tokens is not None and any(r.account is account for f in self.frames for r in f.rows):
            return False  # whether its block is final is not known yet
        return account.next < account.total and account.limit > 0

    def _retracted(self, plan: Plan) -> None:
        if not plan.retracted:
            return
        memory = not self.config.preempt_priority
        law("guaranteed never retracts for memory", self.config.admission == "expected" or not memory, plan.retracted)
        best = min(a.request.priority for a in self.order)
        oldest = min((a for a in self.order if a.request.priority == best), key=lambda a: a.arrival)
        law("no victim twice", len(set(plan.retracted)) == len(plan.retracted), plan.retracted)
        for name in plan.retracted:
            victim = self.accounts.get(name)
            law("C31 a victim is live and resident", victim is not None and victim.resident, name)
            assert victim is not None
            law("C2 never the oldest of the best priority", victim is not oldest or not memory, name)
            self.retract(victim)

    def retract(self, account: Account) -> None:
        """Its pages are taken; it waits to be computed anew."""
        self._leave(account)
        account.retractions += 1
        self.retractions += 1

    def _admitted(self, plan: Plan, frame: _Frame, waiting: Mapping[str, str | None], admit: int | None) -> None:
        fresh = [self.accounts[i] for i in plan.admitted if i in self.accounts and not self.accounts[i].retractions]
        late = {r.account.id for f in self.frames for r in f.rows if r.samples}
        if plan.retracted and not self.config.preempt_priority:
            law("C2 a step that retracted admits nobody new", not fresh, plan.retracted, plan.admitted)
        law("C2 a step does not admit its victim", not set(plan.admitted) & set(plan.retracted), plan.retracted, plan.admitted)
        if admit is not None:
            law("E2 admits no more than every rank can", len(fresh) <= admit, plan.admitted, admit)
        resumable = [a for a in self.accounts.values() if not a.resident and a.retractions and a.ready and not a.unsure
                     and a.id not in late and a.id not in plan.admitted and a.id not in plan.retracted]
        for name in plan.admitted:
            account = self.accounts.get(name)
            law("an admitted request was waiting", account is not None and not account.resident, name)
            assert account is not None
            law("B10 the host said it is ready", account.ready, name)
            law("C2 a late output comes before the resume", not account.retractions or account.id not in late, name)
            if not account.unsure:
                self._overtakes(account, set(plan.admitted), resumable, waiting)
            chunk = next((c for c in plan.prefill if c.id == name), None)
            frame.admitted.append((account, account.started, account.stay, chunk.start if chunk else 0))
            account.resident, account.started = True, True
            account.target = len(account.text)
            account.next = account.cached = account.done = chunk.start if chunk else 0
            law("D2 at least one token is computed", account.cached < account.target, name, account.cached, account.target)
            account.wait, account.peers = 0, 1
            self.cached_tokens += account.cached
            self.order.append(account)
        if plan.admitted:
            law("max_running", len(self.order) <= self.config.max_running, [a.id for a in self.order])

    def _overtakes(self, account: Account, admitted: set[str], resumable: Iterable[Account], waiting: Mapping[str, str | None]) -> None:
        """Who may not be passed by an admitted request: retracted ones (C2), earlier ones (strict fcfs), the overtaken (B10)."""
        others = [a for a in self.accounts.values() if not a.resident and a.id not in admitted and not a.unsure]
        stepped_over = {"adapter_limit", "shared_prefill", "partial_prefill_limit", "host"}
        if self.config.head == "strict":
            for other in resumable:
                first = (other.request.priority, other.arrival) if account.retractions else (other.request.priority,)
                mine = (account.request.priority, account.arrival) if account.retractions else (account.request.priority,)
                passed = other.resident or first > mine or waiting.get(other.id) in stepped_over
                law("C2 retracted ones resume first", passed, account.id, "was admitted before", other.id, waiting.get(other.id))
        if self.config.order in ("fcfs", "priority") and not account.retractions:
            for other in others:
                if self._rank(other) > self._rank(account) or other.retractions:
                    continue
                better = account.request.priority < other.request.priority
                between = any(a.retractions for a in self.accounts.values())  # better than a retracted one, which goes before the other
                if not other.ready or (better and (self.config.preempt_priority or between)):
                    continue
                passed = waiting.get(other.id) in stepped_over or self._no_adapter_for(other)
                behind = other.id in self.overtaken and account.request.adapter is not None and waiting.get(other.id) != "shared_prefill"
                law("B10 overtaken in one pass only", not behind, account.id, "passed", other.id)
                if self.config.head == "strict":
                    law(f"strict {self.config.order}", passed, account.id, "was admitted before", other.id, "which waits for", waiting.get(other.id))

    def _no_adapter_for(self, account: Account) -> bool:
        active = {a.request.adapter for a in self.order} - {None}
        most = self.config.max_adapters
        return most is not None and account.request.adapter not in active | {None} and len(active) >= most

    def _rank(self, account: Account) -> tuple[int, int]:
        return (account.request.priority if self.config.order == "priority" else 0, account.arrival)

    def _rows(self, plan: Plan, frame: _Frame) -> None:
        for i, name in enumerate(plan.ids):
            account = self.accounts.get(name)
            law("a row names a resident", account is not None and account.resident, name)
            assert account is not None
            law("a paused request gets nothing", not account.paused, name)
            start, count = int(plan.starts[i]), int(plan.counts[i])
            account.row = int(plan.rows[i])
            decode = i < plan.decodes
            samples = decode
            if decode:
                self._decode_row(plan, account, start, count)
            else:
                chunk = plan.prefill[i - plan.decodes]
                samples = chunk.last
                law("prefill goes on where it stopped", start == account.next, name, start, account.next)
                law("a chunk is a part of the prefill", start + count <= account.target, name, start, count, account.target)
                law("chunk.last", chunk.last == (start + count == account.target), name, start, count, account.target)
            law("A2 no slot beyond P + max(N, 1) - 1", start + count <= account.total, name, start, count, account.total)
            account.next = start + count
            frame.rows.append(_Row(account, account.stay, start, count, samples, decode))

    def _decode_row(self, plan: Plan, account: Account, start: int, count: int) -> None:
        law("decode goes on where it stopped", start == account.next, account.id, start, account.next)
        law("decode after its prefill", not account.prefilling, account.id)
        block = account.request.block_tokens
        if block is None:
            law("1 + lookahead tokens per decode", 1 <= count <= 1 + self.config.lookahead_tokens, account.id, count)
            return
        behind = [r.start for f in self.frames for r in f.rows if r.account is account and r.decode and r.stay == account.stay]
        law("B4 a block in flight is not passed again", not behind, account.id, behind, plan.step)
        law("B4 a block computes all its slots", count == min(block, account.total - start), account.id, count, block)

    def _limits(self, plan: Plan) -> None:
        config = self.config
        law("max_step_tokens", plan.tokens <= config.max_step_tokens, plan.tokens, config.max_step_tokens)
        lengths = [c.length for c in plan.prefill]
        law("every prefill has 1 <= length", all(n >= 1 for n in lengths), lengths)
        if config.chunk_tokens is not None:
            law("chunk_tokens", all(n <= config.chunk_tokens for n in lengths), lengths)
        if config.long_prefill_tokens is not None:
            for i, chunk in enumerate(plan.prefill):
                alone = all(c.last for c in plan.prefill[:i]) and i + 1 == len(plan.prefill)
                law("long_prefill_tokens while another wants prefill", alone or chunk.length <= config.long_prefill_tokens, lengths)
        adapters = {self.accounts[i].request.adapter for i in plan.ids} - {None}
        if config.max_adapters is not None:
            law("max_adapters", len(adapters) <= config.max_adapters, adapters)
        parked = [a.id for a in self.order if a.prefilling]
        if config.max_partial_prefills is not None and plan:
            law("max_partial_prefills", len(parked) <= config.max_partial_prefills, parked)

    def _status(self, plan: Plan, *, agreed: bool) -> None:
        law("status RUN iff rows", (plan.status is Status.RUN) == (len(plan) > 0), plan.status, len(plan))
        if plan:
            return
        law("status IDLE iff no work", (plan.status is Status.IDLE) == (not self.accounts), plan.status, list(self.accounts))
        if not self.accounts:
            return
        busy = any(f.plan for f in self.frames)
        law("an empty plan says whether it waits for a commit", plan.status is not Status.IN_FLIGHT or len(self.frames) > 1, plan.status)
        free_to_go = not (busy or self.paused or self.holds or agreed) and all(a.ready for a in self.accounts.values())
        law("C3 with nothing in flight, held or paused, something runs", not free_to_go, plan.status, list(self.accounts))

    def _bounds(self, plan: Plan, decodable: Sequence[Account], parked: Sequence[str]) -> None:
        """C4: gaps of decodes and of prefills, judged where memory and the host cannot be the reason."""
        served = set(plan.ids)
        config = self.config
        for account in self.order:
            if account.id in served:
                account.wait, account.peers = 0, len(self.order)
        judged = config.admission == "guaranteed" and not self.paused and not config.preempt_priority
        judged = judged and not any(a.request.ignore_eos for a in self.order)  # admitted by the peak over time, they may wait for a page
        for account in decodable:
            if account.id in served or not account.resident:
                continue
            account.wait += 1
            dearest = max([1 + config.lookahead_tokens, *[a.request.block_tokens or 1 for a in self.order]])
            turns = pages_for(account.peers, max(1, config.max_step_tokens // dearest))
            bound = turns * config.decode_every
            if config.prefill_grant is not None:
                bound += 1 + bound // max(config.prefill_grant - 1, 1)
            if judged:
                law("C4 decode gap", account.wait + 1 <= bound, account.id, "waits", account.wait, "steps, bound", bound)
        self.parked_steps = 0 if plan.prefill or not parked else self.parked_steps + 1
        if config.prefill_grant is not None and judged:
            bound = max(config.prefill_grant, 2)
            law("C4 prefill grant", self.parked_steps < bound, self.parked_steps, bound, parked)

    def rolled_back(self, plan: Plan) -> None:
        """The newest plan did not happen, except for whom it retracted and what it evicted."""
        frame = self.frames.pop()
        assert frame.plan is plan
        for row in frame.rows:
            account = row.account
            if account.stay != row.stay or not account.resident:
                continue
            if not row.decode:
                account.next = row.start
        self._next_positions(frame)
        for account, started, stay, cached in frame.admitted:
            self.cached_tokens -= cached
            if account.id not in self.accounts or self.accounts[account.id] is not account:
                continue
            if account.stay == stay:
                self._leave(account)
                account.started = started
            else:
                account.unsure = True
        for account, wait, peers in frame.waits:
            account.wait, account.peers = wait, peers
        self.parked_steps = frame.parked
        self.step -= 1
        self.moved = [min(step, self.step) for step in self.moved]
        self.overtaken = set()

    # -- commit ---------------------------------------------------------------------------------------------------------

    def committed(self, plan: Plan, result: StepResult, outcome: Outcome) -> None:
        """What each row must have delivered, token for token, and who must have ended."""
        frame = self.frames.pop(0)
        assert frame.plan is plan
        self.commits += 1
        failed = {int(i) for i in (result.failed if result.failed is not None else ())}
        finished = {int(i) for i in (result.finished if result.finished is not None else ())}
        law("the outcome is aligned with the plan", np.array_equal(outcome.rows, plan.rows), outcome.rows, plan.rows)
        ended: dict[str, tuple[Account, set[Finish]]] = {}
        for i, row in enumerate(frame.rows):
            account = row.account
            alive = self.accounts.get(account.id) is account
            got = [t for t in np.atleast_1d(outcome.tokens[i]).tolist() if t != -1]
            if not row.decode:
                self.prefilled[1] += row.count
                self.prefilled[0] += row.count if alive and i not in failed else 0
            if not alive:
                if not row.decode:
                    self.recomputed[1] += max(0, min(row.start + row.count, account.high) - row.start) if account.retractions else 0
                    account.high = max(account.high, row.start + row.count)
                law("an ended request gets no token", not got, account.id, got)
                continue
            if i in failed:
                tokens: list[int] = []
                stale = not row.samples and row.stay != account.stay  # a retracted request lost nothing by this
                finish = {Finish.ERROR, Finish.NONE} if stale else {Finish.ERROR}
            else:
                tokens, finish = self._delivered(row, result, i)
                if i in finished:  # where the host says so and the limit is reached as well, either code is right
                    finish = (finish | {Finish.STOP}) - {Finish.NONE}
            law("tokens delivered", got == tokens, account.id, "got", got, "expected", tokens)
            law("finish code", Finish(int(outcome.finish[i])) in finish, account.id, int(outcome.finish[i]), finish)
            self._computed(row, plan, account, tokens, i in failed)
            if int(outcome.finish[i]):
                ended[account.id] = (account, finish)
        self._next_positions(frame)
        law("ended once each", sorted(e.id for e in outcome.ended) == sorted(ended), [e.id for e in outcome.ended], list(ended))
        for record in outcome.ended:
            account, codes = ended[record.id]
            law("finish of the record", record.finish in codes, record)
            facts = (record.generated, record.retractions)
            law("the record of an ended request", facts == (len(account.tokens), account.retractions), record,
                len(account.tokens), account.retractions)
            law("waited_steps", record.waited_steps >= 0, record)
            law("max_gap", record.max_gap == account.gap, record, account.gap)
            if record.finish in (Finish.LENGTH, Finish.STOP) and account.resident:
                law("A2 the last token is not written", record.computed == account.filled, record, account.filled)
            self._end(account)
            self.finished += 1
            self.moved[0] = max(self.moved[0], plan.step)

    def _delivered(self, row: _Row, result: StepResult, i: int) -> tuple[list[int], set[Finish]]:
        account = row.account
        if not row.samples:
            return [], {Finish.NONE}
        if account.limit == 0:
            return [], {Finish.LENGTH}
        drafts = 0 if result.accepted is None else int(result.accepted[i])
        if row.decode and account.request.block_tokens is not None:
            final = () if result.final is None else {int(position) for position in result.final}
            if i not in final:
                return [], {Finish.NONE}
            drafts = row.count - 1
        tokens: list[int] = []
        for token in np.atleast_1d(result.tokens[i])[: drafts + 1].tolist():
            tokens.append(token)
            count = len(account.tokens) + len(tokens)
            codes = set()
            stops = () if account.request.ignore_eos else account.request.stop_token_ids
            if token in stops and count >= account.request.min_new_tokens:
                codes.add(Finish.STOP)
            if count == account.limit:
                codes.add(Finish.LENGTH)
            if codes:
                return tokens, codes
        return tokens, {Finish.NONE}

    def _computed(self, row: _Row, plan: Plan, account: Account, tokens: list[int], failed: bool) -> None:
        if not row.decode and account.retractions:
            again = max(0, min(row.start + row.count, account.high) - row.start)
            self.recomputed[0] += 0 if failed else again
            self.recomputed[1] += again
        if failed:
            return
        if tokens:
            if account.last_step is not None:
                account.gap = max(account.gap, plan.step - account.last_step)
            account.last_step = plan.step
            account.tokens.extend(tokens)
            self.emitted += len(tokens)
        high = account.filled if row.decode else row.start + row.count
        if tokens or high > account.high:
            self.moved[1] = self.step
            if tokens or account.stay == row.stay:  # whether what a late row computed is progress is not judged
                self.moved[0] = max(self.moved[0], plan.step)
        account.high = max(account.high, high)
        if account.stay == row.stay:
            account.done = max(account.done, high)
            account.sure = max(account.sure, high)

    def _next_positions(self, frame: _Frame) -> None:
        """Rejected drafts move the next position back: what is valid, and what is in flight behind it."""
        for row in frame.rows:
            account = row.account
            if row.decode and account.resident and account.stay == row.stay:
                behind = [r for f in self.frames for r in f.rows if r.account is account and r.stay == account.stay and r.decode]
                account.next = max(account.filled, account.target) + sum(r.count for r in behind)

    # -- the host's other calls -----------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Retract everybody, or keep everybody where they are."""
        self.paused = True
        for account in list(self.order):
            if mode == "retract":
                self.retract(account)
            else:
                account.paused = True

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        for account in self.accounts.values():
            account.paused = False
        self._count_anew()

    def _count_anew(self) -> None:
        """Gaps are counted from here: something happened that lengthens them for good reason."""
        self.parked_steps = 0
        for account in self.order:
            account.wait, account.peers = 0, len(self.order)

    def limits(self, config: SchedulerConfig) -> None:
        """The scheduler's configuration after set_limits."""
        self.config = config
        self._count_anew()

    # -- the state ------------------------------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> None:
        """Compare a snapshot with what it must be. O(everything)."""
        terms = {k: state[k] for k in ("free", "cached", "locked", "private", "quarantined")}
        law("A1 accounting equation", sum(terms.values()) == state["usable"] == self.usable and min(terms.values()) >= 0, terms, self.usable)
        law("step", state["step"] == self.step, state["step"], self.step)
        names = [a.id for a in self.order]
        law("B9 residents in order of admission", state["running"] == names, state["running"], names)
        waiting = {a.id for a in self.accounts.values() if not a.resident}
        listed = state["waiting"]
        law("every other live request waits, once", set(listed) == waiting and len(listed) == len(waiting), listed, waiting)
        owed = sum(max(a.target - a.next, 0) for a in self.order)
        law("B6 ledger conservation", state["outstanding"] == owed, state["outstanding"], owed)
        self._check_requests(state["requests"], state["max_gap"])
        self._check_totals(state["totals"])
        self._check_reserved(state)
        law("C1 the ratio stays in bounds", 0 <= state["ratio"] <= 1, state["ratio"])
        if not self.accounts:
            law("F1 idle is healthy", not state["stalled"])
        elif self.step - self.moved[0] < self.config.stall_steps:
            law("F1 not stalled while things move", not state["stalled"], self.step, self.moved)
        elif self.step - self.moved[1] > self.config.stall_steps:
            law("F1 stalled when nothing moved", state["stalled"], self.step, self.moved)

    def _check_requests(self, listed: Mapping[str, Mapping[str, Any]], gaps: Mapping[str, int]) -> None:
        law("requests lists the live ones", set(listed) == set(self.accounts), set(listed) ^ set(self.accounts))
        for name, account in self.accounts.items():
            entry = listed[name]
            status = "paused" if account.paused else "running" if account.resident else "waiting"
            law("status", entry["status"] == status, name, entry["status"], status)
            law("C26 nothing emitted is lost or repeated", entry["generated"] == len(account.tokens), name, entry, len(account.tokens))
            law("retractions", entry["retractions"] == account.retractions or account.unsure, name, entry, account.retractions)
            law("waited_steps", entry["waited_steps"] >= 0, name, entry)
            law("max_gap", gaps[name] == account.gap, name, gaps[name], account.gap)
            if not account.resident:
                law("a waiting request holds nothing", entry["pages"] == 0, name, entry)
                continue
            law("cached", entry["cached"] == account.cached, name, entry, account.cached)
            low = pages_for(account.filled if not account.prefilling and account.high else account.cached, self.config.page_size)
            high = pages_for(max(account.next, account.total), self.config.page_size)
            law("B3 pages held", low <= entry["pages"] <= high, name, entry, low, high)

    def _check_totals(self, totals: Mapping[str, int]) -> None:
        expected = {
            "finished": self.finished, "aborted": self.aborted, "retractions": self.retractions, "emitted": self.emitted,
            "evicted_pages": self.evicted, "steps": self.commits, "cached_tokens": self.cached_tokens,
        }
        got = {key: totals[key] for key in expected}
        law("totals", got == expected, "got", got, "expected", expected)
        for key, (low, high) in (("prefill_tokens", self.prefilled), ("recomputed_tokens", self.recomputed)):
            law(f"totals.{key}", low <= totals[key] <= high, totals[key], low, high)

    def _check_reserved(self, state: Mapping[str, Any]) -> None:
        """B3 and B4: what is promised is the sum of needs not yet held, and it can be funded."""
        if any(a.request.ignore_eos for a in self.order) or self.holds:
            return
        guaranteed = self.config.admission == "guaranteed"
        held = {name: entry["pages"] for name, entry in state["requests"].items()}
        promised = 0
        for account in self.order:
            base = max(account.target, account.filled)
            rest = account.total - base
            estimate = rest if guaranteed else min(math.ceil(state["ratio"] * rest), self.config.clip_new_tokens)
            promised += max(pages_for(base + min(rest, estimate), self.config.page_size) - held[account.id], 0)
        if guaranteed or not self.frames:
            law("B3 reserved", state["reserved"] == promised, state["reserved"], promised)
        if guaranteed and not self.frames:  # a plan in flight may lock pages of a request that ended
            law("B4 what is promised can be funded", promised <= state["free"] + state["cached"], promised, state["free"], state["cached"])
