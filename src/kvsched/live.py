"""The mutable record of a request from submit to its end.

One record per child for n > 1. What changes in every decode step does not live here but in the arrays of
`kvsched.residents`.
"""

from __future__ import annotations

import numpy as np

from kvsched.protocols import Handle
from kvsched.request import Cause, Namespace, Request, State, advance
from kvsched.units import Tokens, pages_for, sealed, total_slots
from kvsched.verdict import WaitReason

NOTHING: Tokens = np.zeros(0, dtype=np.int32)
NOTHING.flags.writeable = False


class Family:
    """Children of one request with n > 1: they share the prompt's full pages."""

    __slots__ = ("id", "members")

    def __init__(self, key: str) -> None:
        self.id = key
        self.members: list[Live] = []


class Live:
    """A live request: queued, resident, paused, or ended with a step still in flight.

    prompt, limit, total: P, N and the slots it can ever write. target: tokens that its prefill computes, prompt and
    what was generated before it was (re)admitted. generated: tokens delivered, up to the last time they were collected
    from the token log. highwater: most slots that ever held its KV, for the count of recomputed tokens and progress.
    """

    __slots__ = (
        "admitted", "arrival", "branch", "bypassed", "cached", "commons", "family", "first_cached", "generated", "handle", "highwater",
        "hint", "hint_next", "hint_seen", "hint_shrunk", "id", "last_grant", "last_token_step", "late", "least", "limit", "max_gap", "overtaken",
        "priority", "prompt", "ready", "reason", "reason_pass", "request", "retractions", "row", "short_by",
        "since", "skips", "space", "stops", "state", "submitted_pass", "submitted_step", "target", "tenant", "turn", "tokens", "total",
        "total_pages", "uncomputed", "waited",
    )

    def __init__(self, key: str, request: Request, limit: int, arrival: int, page_size: int, family: Family | None) -> None:
        self.id = key
        self.request = request
        self.family = family
        self.tokens = request.tokens
        self.space: Namespace = request.space
        self.priority = request.priority
        self.tenant = request.tenant
        self.prompt = len(self.tokens)
        self.limit = limit
        self.total = total_slots(self.prompt, limit)
        self.total_pages = pages_for(self.total, page_size)
        self.stops = frozenset() if request.ignore_eos else request.stop_token_ids
        self.arrival = arrival
        self.state = State.WAITING
        self.ready = request.ready
        self.row = -1
        self.target = self.prompt
        self.generated: Tokens = NOTHING
        self.handle: Handle | None = None
        self.cached = 0
        self.first_cached = -1  # of its first admission; -1 before
        self.highwater = 0
        self.uncomputed = self.prompt  # prompt tokens that still count as in flight (law B11)
        self.retractions = 0
        self.late = 0  # plans in flight whose token it still waits for after a retraction
        self.since = 0  # tick of the token log from which this row's tokens are its own
        self.admitted = 0
        self.last_grant = 0  # step of its last chunk, or the step before it first wanted one
        self.last_token_step = -1
        self.max_gap = 0
        self.submitted_pass = 0
        self.submitted_step = 0  # step after which it began to wait
        self.waited = 0  # passes waited in earlier stays in the queue
        self.bypassed = 0
        self.skips = 0
        self.overtaken = False  # was stepped over for the adapter limit in an earlier pass
        self.hint = 0  # tokens of its last match; what was evicted since makes it an upper bound
        self.hint_next: tuple[int, bytes] | None = None  # what must be added to the cache for the match to grow
        self.hint_seen = -1  # growth of the cache up to which the match is known
        self.hint_shrunk = 0  # evictions up to which the match is known to the token
        self.commons: dict[int, int] = {}  # arrival of another request: tokens that both prompts begin with
        self.branch = b""  # its matched tokens as bytes, for orders that compare them
        self.turn = (-1, 0, 0)  # pass that deferred it without a close look; fundable and available pages at its turn
        self.least = 0  # pages it needs at least, given the match
        self.reason: WaitReason | None = None
        self.reason_pass = -1
        self.short_by: int | None = None

    def move(self, cause: Cause) -> None:
        """Apply one transition of the lifecycle table."""
        self.state = advance(self.state, cause)

    def sequence(self) -> Tokens:
        """Prompt and the generated tokens collected so far. O(tokens) once something was generated."""
        return np.concatenate((self.tokens, self.generated)) if len(self.generated) else self.tokens

    def part(self, start: int, stop: int) -> Tokens:
        """Tokens of positions start to stop - 1. O(stop - start)."""
        if stop <= self.prompt:
            return self.tokens[start:stop]
        if start >= self.prompt:
            return self.generated[start - self.prompt : stop - self.prompt]
        return sealed(np.concatenate((self.tokens[start:], self.generated[: stop - self.prompt])))
