"""Who may be admitted before whom (laws B10, C2, C33, C83, C89), by going through the waiting requests one by one.

Strict order is judged under fcfs and priority, where it can be told from arrival and priority alone; backfill where every
need is known exactly (guaranteed admission, no cache, nothing in flight).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvsched.plan import Plan
from kvsched.testing.account import Account, Books, law
from kvsched.testing.plan_laws import Scene
from kvsched.units import aligned, pages_for, reusable

STEPPED_OVER = frozenset({"adapter_limit", "shared_prefill", "partial_prefill_limit", "host"})
"""Reasons that the head policies do not rule: such a request is passed."""
MEMORY_OR_PLACES = frozenset({"running_limit", "pages", "commitment", "pinned_pages"})
"""Reasons that they do rule."""


def check_overtaking(books: Books, account: Account, plan: Plan, scene: Scene) -> None:
    """Whom an admitted request may not pass: retracted ones (C2), earlier ones (strict), those overtaken before (B10)."""
    reasons = scene.reasons
    late = {row.account.id for frame in books.frames for row in frame.rows if row.samples}
    for other in books.accounts.values():
        if other.resident or other.unsure or other.id in plan.admitted or not other.ready:
            continue
        if other.retractions:
            if books.config.head == "strict" and other.id not in late and other.id not in plan.retracted:
                _resumes_first(books, account, other, reasons.get(other.id))
        elif books.config.order in ("fcfs", "priority") and not account.retractions and rank(books, other) < rank(books, account):
            _strict(books, account, other, reasons.get(other.id))


def _resumes_first(books: Books, account: Account, other: Account, reason: str | None) -> None:
    """C33: a retracted request resumes before all of the same or worse priority that never started; several by arrival."""
    theirs = (other.request.priority, other.arrival) if account.retractions else (other.request.priority,)
    mine = (account.request.priority, account.arrival) if account.retractions else (account.request.priority,)
    passed = theirs > mine or reason in STEPPED_OVER or _steps_aside(books, other)
    law("C2 retracted ones resume first", passed, account.id, "was admitted before", other.id, reason)


def _strict(books: Books, account: Account, other: Account, reason: str | None) -> None:
    better = account.request.priority < other.request.priority
    between = any(a.retractions for a in books.accounts.values())  # better than a retracted one, which goes before the other
    if better and (books.config.preempt_priority or between):
        return
    behind = other.id in books.overtaken and account.request.adapter is not None
    law("B10 overtaken in one pass only", not behind, account.id, "passed", other.id)
    if books.config.head == "strict":
        passed = reason in STEPPED_OVER or _steps_aside(books, other)
        law(f"strict {books.config.order}", passed, account.id, "was admitted before", other.id, "which waits for", reason)


def _steps_aside(books: Books, account: Account) -> bool:
    """Whether it may have been stepped over when its turn came, whatever stops it at the end of the pass."""
    return _no_adapter_for(books, account) or _no_partial_place(books) or _waits_for_a_prefix(books, account)


def _waits_for_a_prefix(books: Books, account: Account) -> bool:
    size = books.config.page_size
    most = reusable(len(account.text), size)
    for leader in books.order:
        if leader.done < leader.target and leader.request.space == account.request.space:  # a chunk in flight is not there yet
            pairs = zip(account.text[:most], leader.text[: leader.target], strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if aligned(common, size) > aligned(leader.done, size):
                return True
    return False


def _no_adapter_for(books: Books, account: Account) -> bool:
    active = {a.request.adapter for a in books.order} - {None}
    most = books.config.max_adapters
    return most is not None and account.request.adapter not in active | {None} and len(active) >= most


def _no_partial_place(books: Books) -> bool:
    most = books.config.max_partial_prefills
    if not most:  # with 0 every prefill is whole, and nobody steps aside
        return False
    return sum(a.prefilling for a in books.order) >= most


def rank(books: Books, account: Account) -> tuple[int, int]:
    """Who goes first under fcfs and priority among those that never started."""
    return (account.request.priority if books.config.order == "priority" else 0, account.arrival)


def _head(books: Books, plan: Plan, scene: Scene) -> Account | None:
    """The deferred head under fcfs: the earliest that could go and lacks memory or a place; None where that is not plain."""
    config = books.config
    if config.order != "fcfs" or config.preempt_priority or scene.agreed or any(a.retractions or a.unsure for a in books.accounts.values()):
        return None
    waiting = [a for a in books.accounts.values() if not a.resident and a.ready and a.id not in plan.admitted]
    head = min(waiting, key=lambda a: a.arrival, default=None)
    if head is None or scene.reasons.get(head.id) not in MEMORY_OR_PLACES or _steps_aside(books, head):
        return None
    return head


def check_bypass(books: Books, plan: Plan, scene: Scene) -> None:
    """B10: who passes a deferred head under `skip` (a count) and `backfill` (the head starts no later). Read before admission."""
    head = _head(books, plan, scene)
    if head is None:
        return
    passing = [books.accounts[name] for name in plan.admitted if books.accounts[name].arrival > head.arrival]
    if books.config.head == "skip":
        head.bypassed += len(passing)
        law("B10 skip is bounded", head.bypassed <= books.config.max_bypass, head.id, "was passed by", plan.admitted, head.bypassed)
    if books.config.head == "backfill" and passing and not _inexact(books, scene):
        _backfill(books, head, [books.accounts[name] for name in plan.admitted], scene)


def _inexact(books: Books, scene: Scene) -> bool:
    return bool(scene.caching or books.frames or books.holds or books.config.admission != "guaranteed"
                or any(a.request.ignore_eos for a in books.accounts.values()))


def _backfill(books: Books, head: Account, admitted: Sequence[Account], scene: Scene) -> None:
    """C89: a bypasser fits now, and beside the head at the head's start: the first release, by remaining tokens, after which it fits."""
    page = books.config.page_size
    residents, fund = list(books.order), scene.before["free"]
    fund -= sum(pages_for(a.total, page) - len(scene.pages[a.id]) for a in residents)
    for one in admitted:
        need = pages_for(one.total, page)
        law("B10 a bypasser fits now", need <= fund, one.id, need, fund)
        if one.arrival > head.arrival:
            orders = [sorted(residents, key=lambda a: a.limit - len(a.tokens)),
                      sorted(residents, key=lambda a: a.limit - len(a.tokens) + max(len(a.text) - a.next, 0))]
            beside = max(_at_the_heads_start(books, head, order, fund) for order in orders)
            law("B10 backfill does not delay the head", need <= beside, one.id, need, "beside", head.id, beside)
        fund -= need
        residents.append(one)


def _at_the_heads_start(books: Books, head: Account, order: Sequence[Account], fund: int) -> int:
    """Pages beside the head once it starts."""
    page, places = books.config.page_size, books.config.max_running - len(order)
    need = pages_for(head.total, page)
    for account in order:
        if need <= fund and places > 0:
            break
        fund += pages_for(account.total, page)
        places += 1
    return fund - need


def check_shared_prefill(books: Books, account: Account, start: int, scene: Scene) -> None:
    """C83, A4: with `hold_shared_prefill`, and always among siblings, nobody starts on a page that another computes for the cache."""
    end = start + books.config.page_size
    if not (scene.caching and account.request.cache_read) or end > reusable(len(account.text), books.config.page_size):
        return
    for leader in books.order:
        if not leader.request.cache_write or leader.request.space != account.request.space:
            continue
        if not books.config.hold_shared_prefill and leader.request is not account.request:
            continue
        computing = leader.prefilling and leader.done < end <= leader.target and leader.text[:end] == account.text[:end]
        law("C83 cold requests with one prefix wait for its first computation", not computing, account.id, "computes", start, end, "beside", leader.id)
