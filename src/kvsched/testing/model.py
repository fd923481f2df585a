"""A plain account of what a host saw, and the laws that it must obey.

What lives here: `PlainModel`, which is told every call and every answer and works out, in the most obvious way, what the
scheduler's state must be. Laws over a whole plan, a queue, a snapshot or a refusal stand in modules of their own. What
does not: any code of the scheduler. Nothing here is fast; everything is meant to be right at a glance. A broken law
raises `ModelViolation`, which names it as DESIGN does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsched.config import SchedulerConfig
from kvsched.plan import Outcome, Plan, StepResult
from kvsched.request import Finish, Request
from kvsched.testing import plan_laws, queue_laws
from kvsched.testing.account import Account, Books, Frame, ModelViolation, Row, law
from kvsched.testing.intake_laws import check_answer
from kvsched.testing.plan_laws import Scene
from kvsched.testing.state_laws import check_state
from kvsched.verdict import Accepted, Refused

__all__ = ["ModelViolation", "PlainModel"]


class PlainModel(Books):
    """Told every call and answer of one scheduler, in order; `check` compares what must hold with a snapshot.

    config: the scheduler's. usable: pages its pool can hand out. Each method checks the answer it is told before it books it.
    """

    # -- submit and abort -----------------------------------------------------------------------------------------------

    def submitted(self, request: Request, answer: Accepted | Refused, ceiling: int | None = None) -> None:
        """Take the answer of a submit. ceiling: usable pages less hard pins; None: no pins."""
        check_answer(self, request, answer, self.usable if ceiling is None else ceiling)
        if isinstance(answer, Refused):
            return
        for name in answer.ids:
            self.accounts[name] = Account(name, request.id, request, answer.max_new_tokens, self.arrivals, request.ready)
            self.arrivals += 1

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

    def retract(self, account: Account) -> None:
        """Its pages are taken; it waits to be computed anew."""
        self._leave(account)
        account.retractions += 1
        self.retractions += 1

    # -- plans ----------------------------------------------------------------------------------------------------------

    def scheduled(self, plan: Plan, scene: Scene) -> None:
        """Take a plan and hold it against every law that can be told from the books."""
        self.step += 1
        law("steps are numbered", plan.step == self.step, plan.step, self.step)
        frame = Frame(plan, [], [], [(a, a.wait, a.peers, a.bypassed) for a in self.accounts.values()], self.parked_steps)
        decodable = [a for a in self.order if self.decodable(a)]
        parked = [a.id for a in self.order if a.prefilling and not a.paused and a.id not in plan.retracted]
        parked += [name for name, reason in scene.reasons.items() if reason == "step_tokens"]
        for name in plan.admitted:
            known = self.accounts.get(name)
            law("an admitted request was waiting", known is not None and not known.resident, name)
        plan_laws.check_appends(self, plan, scene)
        plan_laws.check_retraction(self, plan, scene)
        queue_laws.check_bypass(self, plan, scene)
        for name in plan.retracted:
            self.retract(self.accounts[name])
        self._admit(plan, frame, scene)
        for i, name in enumerate(plan.ids):
            self._row(plan, frame, i, name)
        self.frames.append(frame)
        plan_laws.check_limits(self, plan, scene)
        plan_laws.check_status(self, plan, scene)
        plan_laws.check_reasons(self, scene)
        plan_laws.check_bounds(self, plan, scene, decodable, parked)
        if scene.agreed:
            self._count_anew()
        fresh = [queue_laws.rank(self, self.accounts[name]) for name in plan.admitted if not self.accounts[name].retractions]
        last = max(fresh, default=None)
        self.overtaken = {name for name, reason in scene.reasons.items() if reason == "adapter_limit"
                          and (name in self.overtaken or (last is not None and queue_laws.rank(self, self.accounts[name]) < last))}
        self.evicted += plan.evicted
        if not self.accounts:
            self.moved = [self.step, self.step]

    def _admit(self, plan: Plan, frame: Frame, scene: Scene) -> None:
        fresh = [name for name in plan.admitted if not self.accounts[name].retractions]
        law("E2 admits no more than every rank can", scene.admit is None or len(fresh) <= scene.admit, plan.admitted, scene.admit)
        late = {row.account.id for other in self.frames for row in other.rows if row.samples}
        for name in plan.admitted:
            account = self.accounts[name]
            law("B10 the host said it is ready", account.ready, name)
            law("C2 a late output comes before the resume", not account.retractions or name not in late, name)
            if not account.unsure:
                queue_laws.check_overtaking(self, account, plan, scene)
            chunk = next((c for c in plan.prefill if c.id == name), None)
            start = chunk.start if chunk else 0
            queue_laws.check_shared_prefill(self, account, start, scene)
            frame.admitted.append((account, account.started, account.stay, start))
            account.resident = account.started = True
            account.target = len(account.text)
            account.next = account.cached = account.done = start
            law("D2 at least one token is computed", account.cached < account.target, name, account.cached, account.target)
            account.wait, account.peers = 0, 1
            self.cached_tokens += account.cached
            self.order.append(account)

    def _row(self, plan: Plan, frame: Frame, i: int, name: str) -> None:
        account = self.accounts.get(name)
        law("a row names a resident", account is not None and account.resident, name)
        assert account is not None
        law("a paused request gets nothing", not account.paused, name)
        start, count = int(plan.starts[i]), int(plan.counts[i])
        account.row = int(plan.rows[i])
        decode = samples = i < plan.decodes
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
        frame.rows.append(Row(account, account.stay, start, count, samples, decode))

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

    def rolled_back(self, plan: Plan) -> None:
        """The newest plan did not happen, except for whom it retracted and what it evicted."""
        frame = self.frames.pop()
        assert frame.plan is plan
        for row in frame.rows:
            if row.account.stay == row.stay and row.account.resident and not row.decode:
                row.account.next = row.start
        self._next_positions(frame)
        for account, started, stay, cached in frame.admitted:
            self.cached_tokens -= cached
            if self.accounts.get(account.id) is not account:
                continue
            if account.stay == stay:
                self._leave(account)
                account.started = started
            else:
                account.unsure = True
        for account, wait, peers, bypassed in frame.waits:
            account.wait, account.peers, account.bypassed = wait, peers, bypassed
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

    def _delivered(self, row: Row, result: StepResult, i: int) -> tuple[list[int], set[Finish]]:
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

    def _computed(self, row: Row, plan: Plan, account: Account, tokens: list[int], failed: bool) -> None:
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

    def _next_positions(self, frame: Frame) -> None:
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
        check_state(self, state)
