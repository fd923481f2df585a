"""What submit must answer, by arithmetic alone (laws A2, B2, B11)."""

from __future__ import annotations

import attrs

from kvsched.request import Request
from kvsched.testing.account import Books, law
from kvsched.units import pages_for, total_slots
from kvsched.verdict import Accepted, Refused


@attrs.frozen
class Refusal:
    """Reason, the two numbers, and whether it may be tried again."""

    reason: str
    needed: int
    available: int
    retryable: bool


def check_answer(books: Books, request: Request, answer: Accepted | Refused, ceiling: int) -> None:
    """Refused exactly when the arithmetic says so, with its numbers. ceiling: usable pages less hard pins."""
    limit = _limit(books, request, ceiling)
    hard = _hard(books, request, limit, ceiling)
    soft, open_too = (set[Refusal](), False) if hard else _soft(books, request)
    no_room = books.config.context_limit == len(request.tokens) and request.max_new_tokens is None
    allowed = hard | soft
    if isinstance(answer, Refused):
        got = Refusal(answer.reason.value, answer.needed, answer.available, answer.retryable)
        law("B2/B11 refused iff arithmetic says so", got in allowed, request.id, "got", got, "allowed", allowed)
        return
    may = not allowed or open_too or no_room
    law("B2/B11 refused iff arithmetic says so", may, request.id, "accepted; must be", allowed)
    law("A2 limit", answer.max_new_tokens == limit, request.id, "got", answer.max_new_tokens, "expected", limit)
    ids = (request.id,) if request.n == 1 else tuple(f"{request.id}/{i}" for i in range(request.n))
    law("A4 children", answer.ids == ids, answer.ids, ids)


def _limit(books: Books, request: Request, ceiling: int) -> int:
    """N: as stated, or as many as context and pool allow."""
    if request.max_new_tokens is not None:
        return request.max_new_tokens
    context, prompt = books.config.context_limit, len(request.tokens)
    room = ceiling * books.config.page_size - prompt + 1
    if context is not None:
        room = min(room, context - prompt)
    return max(room, 0 if context == prompt else 1)


def _hard(books: Books, request: Request, limit: int, ceiling: int) -> set[Refusal]:
    """What can never be served; these come before the queue bounds."""
    prompt, context = len(request.tokens), books.config.context_limit
    out = set()
    need = pages_for(total_slots(prompt, limit), books.config.page_size)
    if need > ceiling:
        out.add(Refusal("never_fits", need, ceiling, retryable=False))
    if context is not None and prompt + limit > context:
        out.add(Refusal("context_limit", prompt + limit, context, retryable=False))
    if context == prompt and request.max_new_tokens is None:  # no new token fits: refused for one, or prefill only
        out.add(Refusal("context_limit", prompt + 1, prompt, retryable=False))
    return out


def _soft(books: Books, request: Request) -> tuple[set[Refusal], bool]:
    """What the queue bounds refuse now, and whether accepting is right as well (where a count is not determined)."""
    config = books.config
    fresh = [a for a in books.accounts.values() if not a.resident and not a.retractions and not a.started]
    adds, queued = request.n * len(request.tokens), sum(a.prompt for a in fresh)
    bounds: list[tuple[str, int | None, int, int, int]] = [
        ("queue_requests", config.max_queued_requests, request.n, len(fresh), len(fresh)),
        ("queue_tokens", config.max_queued_tokens, adds, queued, queued),
        ("inflight_tokens", config.max_inflight_prompt_tokens, adds, *_inflight(books)),
    ]
    out, certain = set(), False
    for reason, bound, more, low, high in bounds:
        if bound is None or more + high <= bound:
            continue
        out |= {Refusal(reason, more, max(bound - used, 0), retryable=more <= bound) for used in range(low, high + 1)}
        certain = certain or more + low > bound
    return out, not certain or any(a.unsure for a in books.accounts.values())


def _inflight(books: Books) -> tuple[int, int]:
    """Prompt tokens submitted and not yet computed: counted at the plan (low) and at the commit (high)."""
    low = high = 0
    for account in books.accounts.values():
        cached = account.cached if account.resident else 0
        high += max(account.prompt - max(account.sure, cached), 0)
        if not account.retractions:
            low += max(account.prompt - max(account.high, cached, account.next), 0)
    return low, high
