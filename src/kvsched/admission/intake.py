"""submit(): refusal or a place in the queue (laws A2, B2, B11). Total: what is accepted fits an empty pool."""

from __future__ import annotations

from kvsched.core import Core
from kvsched.errors import InvalidRequest
from kvsched.live import Family, Live
from kvsched.plan import Event
from kvsched.request import Request
from kvsched.units import pages_for, total_slots
from kvsched.verdict import Accepted, RefusalReason, Refused, Verdict, decide


def refusal(core: Core, request: Request) -> tuple[Refused | None, int]:
    """Why the request cannot be taken, or None and its limit of new tokens. Changes nothing. O(1)."""
    config = core.config
    prompt, wanted = len(request.tokens), request.max_new_tokens
    capacity = core.ceiling() * config.page_size
    context = config.context_limit
    if wanted is None:
        room = capacity - prompt + 1
        limit = max(room if context is None else min(room, context - prompt), 1)
    else:
        limit = wanted
    if context is not None and prompt + (limit if wanted is not None else 1) > context:
        needed = prompt + (limit if wanted is not None else 1)
        return Refused(request.id, RefusalReason.CONTEXT_LIMIT, needed, context, retryable=False), limit
    need = pages_for(total_slots(prompt, limit), config.page_size)
    if decide(need, need, core.ceiling()) is Verdict.REFUSE:
        return Refused(request.id, RefusalReason.NEVER_FITS, need, core.ceiling(), retryable=False), limit
    bounds = (
        (RefusalReason.QUEUE_REQUESTS, config.max_queued_requests, request.n, len(core.queue.fresh)),
        (RefusalReason.QUEUE_TOKENS, config.max_queued_tokens, request.n * prompt, core.queue.tokens),
        (RefusalReason.INFLIGHT_TOKENS, config.max_inflight_prompt_tokens, request.n * prompt, core.inflight_tokens),
    )
    for reason, bound, adds, used in bounds:
        if bound is not None and used + adds > bound:
            return Refused(request.id, reason, adds, max(bound - used, 0), retryable=adds <= bound), limit
    return None, limit


def check_block(core: Core, request: Request) -> None:
    """A block is computed in one step, so the step must be able to hold it. Raises `InvalidRequest`."""
    most = core.config.max_step_tokens
    if request.block_tokens is not None and request.block_tokens > most:
        raise InvalidRequest(f"block_tokens must be at most max_step_tokens = {most}, not {request.block_tokens}")


def new_lives(core: Core, request: Request, ids: tuple[str, ...], limit: int) -> list[Live]:
    """The records of an accepted request, one per child."""
    family = Family(request.id) if request.n > 1 else None
    lives = []
    for key in ids:
        core.arrivals += 1
        live = Live(key, request, limit, core.arrivals, core.config.page_size, family)
        lives.append(live)
    if family is not None:
        family.members = lives.copy()
        core.parents[request.id] = family.members
    return lives


def admit_to_queue(core: Core, lives: list[Live]) -> None:
    """Put accepted requests into the queue."""
    if not core.lives:
        core.progress_step = core.step  # idle until now: no stall is counted from before
    for live in lives:
        core.lives[live.id] = live
        live.submitted_pass, live.submitted_step = core.passes, core.step
        core.queue.add(live)
        core.inflight_tokens += live.prompt
        if core.sink is not None:
            core.events.append(Event("queued", live.id, core.step))
        if core.config.order == "fair" and live.tenant not in core.tenants:
            core.shares.lift(live.tenant, core.tenants)
        core.tenants[live.tenant] += 1


def as_accepted(request: Request, ids: tuple[str, ...], limit: int) -> Accepted:
    """The answer to an accepted request."""
    return Accepted(request.id, ids, limit)
