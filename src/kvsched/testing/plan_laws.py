"""What one plan may do, given the books before it and the state around it (laws B10, C2, C3, C4, E1, E2 and the limits).

What lives here: laws that look at a plan as a whole. Who may pass whom: `queue_laws`. What a single row must be is checked where the
model books it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvsched.plan import Plan, Status
from kvsched.testing.account import Account, Books, law
from kvsched.units import pages_for


@attrs.frozen
class Scene:
    """What stood around a plan: snapshots before and after, pages of each resident before, and what the ranks agreed on.

    caching: whether there is a prefix cache.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    pages: Mapping[str, frozenset[int]]
    caching: bool
    admit: int | None = None
    free_pages: int | None = None
    prefill_tokens: int | None = None

    @property
    def agreed(self) -> bool:
        """Whether the ranks' agreement may have held something back."""
        return (self.admit, self.free_pages, self.prefill_tokens) != (None, None, None)

    @property
    def reasons(self) -> dict[str, str | None]:
        """Why each waiting request waits, after the pass."""
        return {name: self.after["requests"][name]["wait_reason"] for name in self.after["waiting"]}


def check_appends(books: Books, plan: Plan, scene: Scene) -> None:
    """Without `exchange_pages` a page that a resident holds stays where the host was told that it is. Read before the victims leave the books."""
    deltas = plan.deltas
    held = {a.row: scene.before["requests"][a.id]["pages"] for a in books.order if a.id not in plan.retracted}
    for row, column, page in zip(deltas.row.tolist(), deltas.column.tolist(), deltas.page.tolist(), strict=True):
        rewritten = column < held.get(row, 0) and page != books.told[row, column]
        law("a row is only appended to", not rewritten or books.config.exchange_pages, row, column, page)
        books.told[row, column] = page


def check_retraction(books: Books, plan: Plan, scene: Scene) -> None:
    """C2: whom a plan may retract, and that it had to. Read before the victims leave the books."""
    if not plan.retracted:
        return
    config = books.config
    displaces = config.preempt_priority
    law("guaranteed never retracts for memory", config.admission == "expected" or displaces, plan.retracted)
    law("no victim twice", len(set(plan.retracted)) == len(plan.retracted), plan.retracted)
    law("C2 a step does not admit its victim", not set(plan.admitted) & set(plan.retracted), plan.retracted, plan.admitted)
    victims = []
    for name in plan.retracted:
        victim = books.accounts.get(name)
        law("C31 a victim is live and resident", victim is not None and victim.resident, name)
        assert victim is not None
        victims.append(victim)
    if displaces:
        if config.admission == "guaranteed":
            better = [books.accounts[name].request.priority for name in plan.admitted]
            if scene.after["quarantined"] > scene.before["quarantined"]:  # its pages are on their way to who waits for them
                better += [books.accounts[name].request.priority for name in scene.after["waiting"]]
            for victim in victims:
                law("C35 only a strictly better priority displaces", any(p < victim.request.priority for p in better), victim.id, plan.admitted)
        return
    fresh = [name for name in plan.admitted if not books.accounts[name].retractions]
    law("C2 a step that retracted admits nobody new", not fresh, plan.retracted, plan.admitted)
    _choice(books, victims, scene)
    if not (books.holds or scene.agreed or config.pin_limit_pages):
        _had_to(books, victims, scene)


def _choice(books: Books, victims: Sequence[Account], scene: Scene) -> None:
    """Worst priority, then least unrecoverable work, then latest arrival; never the oldest of the best priority."""
    best = min(a.request.priority for a in books.order)
    spared = min((a for a in books.order if a.request.priority == best), key=lambda a: a.arrival)
    left = [a for a in books.order if a is not spared and (a in victims or a.next < a.total)]
    for victim in victims:
        law("C2 never the oldest of the best priority", victim is not spared, victim.id)
        worst = max(a.request.priority for a in left)
        law("C2 worst priority first", victim.request.priority == worst, victim.id, worst)
        if not scene.caching and not books.frames:
            peers = [a for a in left if a.request.priority == worst]
            first = min(peers, key=lambda a: (a.done, -a.arrival))
            law("C2 least unrecoverable work first, then latest arrival", victim is first, victim.id, [(a.id, a.done) for a in peers])
        left.remove(victim)


def _had_to(books: Books, victims: Sequence[Account], scene: Scene) -> None:
    """Before each victim, the decodes wanted more pages than were there or on their way (C28)."""
    state = scene.before
    left = list(books.order)
    for victim in victims:
        wanted = sum(
            max(pages_for(a.next + books.width(a), books.config.page_size) - len(scene.pages[a.id]), 0) for a in left if books.decodable(a)
        )
        kept = frozenset[int]().union(*[scene.pages[a.id] for a in left])
        given_up = frozenset[int]().union(*[scene.pages[a.id] for a in books.order]) - kept
        coming = state["free"] + state["cached"] + state["quarantined"] + len(given_up)
        law("C28 nobody is retracted for a page that is there or on its way", wanted > coming, victim.id, wanted, coming)
        left.remove(victim)


def check_limits(books: Books, plan: Plan, scene: Scene) -> None:
    """What the knobs bound in every step."""
    config = books.config
    law("max_step_tokens", plan.tokens <= config.max_step_tokens, plan.tokens, config.max_step_tokens)
    lengths = [chunk.length for chunk in plan.prefill]
    law("E2 no more prefill than the ranks agreed on", scene.prefill_tokens is None or sum(lengths) <= scene.prefill_tokens,
        lengths, scene.prefill_tokens)
    law("every prefill has 1 <= length", all(n >= 1 for n in lengths), lengths)
    if config.chunk_tokens is not None:
        law("chunk_tokens", all(n <= config.chunk_tokens for n in lengths), lengths)
    if config.long_prefill_tokens is not None:
        for i, chunk in enumerate(plan.prefill):
            alone = all(c.last for c in plan.prefill[:i]) and i + 1 == len(plan.prefill)
            law("long_prefill_tokens while another wants prefill", alone or chunk.length <= config.long_prefill_tokens, lengths)
    adapters = {books.accounts[name].request.adapter for name in plan.ids} - {None}
    law("max_adapters", config.max_adapters is None or len(adapters) <= config.max_adapters, adapters)
    partial = [a.id for a in books.order if a.prefilling]
    if config.max_partial_prefills is not None and plan:
        law("max_partial_prefills", len(partial) <= config.max_partial_prefills, partial)
    if plan.admitted:
        law("max_running", len(books.order) <= config.max_running, [a.id for a in books.order])
    if scene.free_pages is not None and not plan.retracted:
        taken = sum(scene.before[key] - scene.after[key] for key in ("free", "cached"))
        law("E1 no more is taken than every rank has", taken <= scene.free_pages, taken, scene.free_pages)
    if plan.evicted and not plan.retracted:
        law("D5 eviction takes exactly the shortfall", scene.after["free"] == 0, plan.evicted, scene.after["free"])


def check_status(books: Books, plan: Plan, scene: Scene) -> None:
    """RUN iff rows; an empty plan names why, and with nothing in flight, held or paused there is none (C3)."""
    law("status RUN iff rows", (plan.status is Status.RUN) == (len(plan) > 0), plan.status, len(plan))
    if plan:
        return
    law("status IDLE iff no work", (plan.status is Status.IDLE) == (not books.accounts), plan.status, list(books.accounts))
    if not books.accounts:
        return
    law("an empty plan says whether it waits for a commit", plan.status is not Status.IN_FLIGHT or len(books.frames) > 1, plan.status)
    busy = any(frame.plan for frame in books.frames)
    free_to_go = not (busy or books.paused or books.holds or scene.agreed) and all(a.ready for a in books.accounts.values())
    law("C3 with nothing in flight, held or paused, something runs", not free_to_go, plan.status, list(books.accounts))


def check_reasons(books: Books, scene: Scene) -> None:
    """Reasons that can be told from the books."""
    for name, reason in scene.reasons.items():
        account = books.accounts[name]
        if books.paused or not account.ready:
            law("the first reason counts", reason == ("paused" if books.paused else "host"), name, reason)
        full = len(books.order) >= books.config.max_running
        law("running_limit means that the places are taken", reason != "running_limit" or full, name)
        law("adapter_limit needs a limit", reason != "adapter_limit" or books.config.max_adapters is not None, name)
        shares = books.config.hold_shared_prefill or account.request.n > 1
        law("shared_prefill needs the option, or siblings", reason != "shared_prefill" or shares, name)


def check_bounds(books: Books, plan: Plan, scene: Scene, decodable: Sequence[Account], parked: Sequence[str]) -> None:
    """C4: gaps of decodes and of prefills, judged where memory and the host cannot be the reason.

    decodable, parked: who could decode, and who wanted prefill, in this step. The bound of a decode is ceil(running / rows of a
    step), times `decode_every`; with grants, each step of it may have one grant before it.
    """
    served, config = set(plan.ids), books.config
    for account in books.order:
        if account.id in served:
            account.wait, account.peers = 0, len(books.order)
    judged = config.admission == "guaranteed" and not (books.paused or config.preempt_priority or scene.agreed)
    judged = judged and not any(a.request.ignore_eos for a in books.order)  # admitted by the peak over time, they may wait for a page
    dearest = max([1 + config.lookahead_tokens, *[a.request.block_tokens or 1 for a in books.order]])
    for account in decodable:
        if account.id in served or not account.resident:
            continue
        account.wait += 1
        bound = pages_for(account.peers, max(1, config.max_step_tokens // dearest)) * config.decode_every
        if config.prefill_grant is not None:
            bound = 2 * bound + 1  # several prefills may be due in turn; a decode step stands between two grants that go first
        law("C4 decode gap", not judged or account.wait + 1 <= bound, account.id, "waits", account.wait, "steps, bound", bound)
    books.parked_steps = 0 if plan.prefill or not parked else books.parked_steps + 1
    if config.prefill_grant is not None:
        bound = max(config.prefill_grant, 2)
        law("C4 prefill grant", not judged or books.parked_steps < bound, books.parked_steps, bound, parked)
