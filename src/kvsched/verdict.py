"""Verdicts and refusals: "no" as a value with a reason and two numbers.

`decide` is law B2 in one function. It has no chunk-size parameter on purpose (law B1): a chunk bounds the compute of a
step and must never stand in for what a request will occupy.
"""

from __future__ import annotations

import enum
from typing import Literal

import attrs


class Verdict(enum.Enum):
    """What pool arithmetic says of one request."""

    ADMIT = "admit"
    DEFER = "defer"
    REFUSE = "refuse"


def decide(need: int, fundable: int, ceiling: int) -> Verdict:
    """Admit, defer or refuse, all three numbers in pages (law B2).

    need: what the request still has to get. fundable: what can be promised to it now. ceiling: what an otherwise empty
    pool can hold, permanent reserves taken off. A need above the ceiling can never fit, so deferring it would wedge the
    queue. O(1).

    >>> decide(99, 100, 100), decide(99, 50, 100), decide(101, 100, 100)
    (<Verdict.ADMIT: 'admit'>, <Verdict.DEFER: 'defer'>, <Verdict.REFUSE: 'refuse'>)
    """
    if need > ceiling:
        return Verdict.REFUSE
    return Verdict.ADMIT if need <= fundable else Verdict.DEFER


class RefusalReason(enum.Enum):
    """Why submit() refused. The unit of the two numbers stands beside each."""

    NEVER_FITS = "never_fits"  # pages
    CONTEXT_LIMIT = "context_limit"  # tokens
    QUEUE_REQUESTS = "queue_requests"  # requests
    QUEUE_TOKENS = "queue_tokens"  # tokens
    INFLIGHT_TOKENS = "inflight_tokens"  # tokens


@attrs.frozen
class Accepted:
    """submit() took the request. `ids`: the ids under which it runs (its children for n > 1)."""

    id: str
    ids: tuple[str, ...]
    max_new_tokens: int

    def __bool__(self) -> Literal[True]:
        return True


@attrs.frozen
class Refused:
    """submit() did not take the request and kept nothing of it. False in a condition.

    needed, available: what it asks and what there is, in the unit of the reason. retryable: whether the same request
    can be accepted later without a change of configuration.
    """

    id: str
    reason: RefusalReason
    needed: int
    available: int
    retryable: bool

    def __bool__(self) -> Literal[False]:
        return False


class WaitReason(enum.Enum):
    """Why a request gets nothing in a step. A request shows the first that stops it, in this order."""

    PAUSED = "paused"
    HOST = "host"
    HEAD_OF_LINE = "head_of_line"
    RANK_AGREEMENT = "rank_agreement"
    RUNNING_LIMIT = "running_limit"
    PARTIAL_PREFILL_LIMIT = "partial_prefill_limit"
    ADAPTER_LIMIT = "adapter_limit"
    SHARED_PREFILL = "shared_prefill"
    STATE_SLOTS = "state_slots"
    WINDOW_PAGES = "window_pages"
    PINNED_PAGES = "pinned_pages"
    PAGES = "pages"
    COMMITMENT = "commitment"
    ATTENDED_LIMIT = "attended_limit"
    STEP_TOKENS = "step_tokens"


HEAD_REASONS = frozenset({
    WaitReason.RANK_AGREEMENT, WaitReason.RUNNING_LIMIT, WaitReason.STATE_SLOTS, WaitReason.WINDOW_PAGES,
    WaitReason.PINNED_PAGES, WaitReason.PAGES, WaitReason.COMMITMENT,
})
"""Shortages that the head policy rules (law B10): memory, slots and running places. The others are stepped over."""


@attrs.frozen
class Explanation:
    """Why a request waits, as of the last pass.

    short_by: in the unit of what is short, None where nothing is counted. waited_steps: steps it has been deferred, over
    all its stays in the queue. since_step: the step that deferred it first in this stay; None when none has.
    """

    id: str
    status: str
    reason: WaitReason | None
    short_by: int | None = None
    waited_steps: int = 0
    since_step: int | None = None
    detail: str = ""
