"""What goes between scheduler and host: the plan, the step's result, what a commit answers, and events.

Plans are values: nothing in one changes after schedule() returned it. Arrays are read-only.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvsched.errors import InvalidRequest
from kvsched.request import Finish, whole
from kvsched.units import Ints, Tokens, plain


class Status(enum.Enum):
    """What an answer of schedule() means."""

    RUN = "run"  # there is something to compute
    IDLE = "idle"  # there is no work
    BLOCKED = "blocked"  # there is work, and something must be released, resumed or made ready first
    IN_FLIGHT = "in_flight"  # there is work, and it needs the commit of a plan in flight first


@attrs.frozen(eq=False)
class Chunk:
    """A prefill row of a plan: `tokens` to compute from position `start` on. `last`: the row samples a token."""

    id: str
    row: int
    start: int
    tokens: Tokens
    last: bool

    @property
    def length(self) -> int:
        """Tokens computed in this step."""
        return len(self.tokens)


@attrs.frozen(eq=False)
class Deltas:
    """Pages written to the block table by this step: `table[row[i], column[i]] = page[i]`, in this order."""

    row: Ints
    column: Ints
    page: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


class RowIds:
    """Ids of rows, worked out when asked for: a plan of thousands of rows is made without them. Pickles as the ids alone."""

    __slots__ = ("_found", "_names", "_rows")

    def __init__(self, names: list[str], rows: Ints) -> None:
        self._names = names
        self._rows = rows
        self._found: tuple[str, ...] | None = None

    def __call__(self) -> tuple[str, ...]:
        if self._found is None:
            names = self._names
            self._found = tuple([names[row] for row in self._rows.tolist()])
        return self._found

    def __reduce__(self) -> tuple[type[RowIds], tuple[list[str], Ints]]:
        return RowIds, (list(self()), np.arange(len(self._rows)))


@attrs.frozen(eq=False)
class Plan:
    """What to run in one step: a value that can be kept, compared by digest, pickled and sent. Rows: decodes first (ascending table row), then prefills in the order they got budget.

    step: number of the step, from 1. status: what the plan means; only RUN has rows.
    rows, starts, counts: int64[n]; table row, position of the first token computed, tokens computed. A row attends to
        positions 0 to starts + counts - 1. With `lookahead_tokens` and two plans in flight, `starts` assumes that every
        draft in flight is accepted.
    decodes: how many of the rows are decodes. prefill: the `Chunk` of each other row.
    deltas: what to apply to a copy of the block table before the step.
    retracted: ids whose pages were taken, in the order chosen. evicted: cached pages forgotten to make room.
    admitted: ids that start in this step, resuming ones included.
    copies: page copies to do before the step (empty unless a host tier is used).

    A host computes every row, those of requests that a later plan retracted included: their pages may be kept. Rows of
    requests that ended or were aborted meanwhile may be skipped; whatever stands in the result for them is ignored.
    """

    step: int
    status: Status
    rows: Ints
    starts: Ints
    counts: Ints
    decodes: int
    prefill: tuple[Chunk, ...]
    deltas: Deltas
    retracted: tuple[str, ...]
    evicted: int
    copies: tuple[tuple[int, int], ...]
    admitted: tuple[str, ...]
    _decode_ids: Callable[[], tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        return len(self.rows) > 0

    @property
    def decode_ids(self) -> tuple[str, ...]:
        """Ids of the decode rows, in row order. Worked out when first asked for."""
        return self._decode_ids()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all rows, in row order."""
        return self.decode_ids + tuple(chunk.id for chunk in self.prefill)

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that two schedulers share exactly when they decided the same. O(rows), when asked for."""
        seal = hashlib.blake2b(digest_size=16)
        for array in (self.rows, self.starts, self.counts, self.deltas.row, self.deltas.column, self.deltas.page.astype(np.int64)):
            seal.update(len(array).to_bytes(8, "little"))
            seal.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        words = (self.step, self.status.value, self.decodes, self.retracted, self.evicted, self.copies, self.ids,
                 [(c.start, c.last, c.tokens.tolist()) for c in self.prefill])
        seal.update(repr(words).encode())
        return seal.hexdigest()


@attrs.frozen(eq=False)
class StepResult:
    """What the host's forward pass gave, in the plan's row order.

    tokens: integers [rows], or [rows, width] with speculation or blocks, at least as wide as the widest decode row of the
        plan (accepted drafts first, then the sampled token; of a block all its tokens). A row that samples nothing (a chunk that is not the last) may hold anything.
    accepted: integers [rows], drafts taken besides the sampled token, 0 for prefill rows. None: no drafts taken.
    finished: positions in the plan (0 to rows - 1) that the host knows to be at an end (stop string, grammar).
    failed: positions whose computation failed; their requests end with `Finish.ERROR` and no token.
    final: positions of block-diffusion rows whose block became final in this pass.
    """

    tokens: Any
    accepted: Any = None
    finished: Sequence[int] | Ints | None = None
    failed: Sequence[int] | Ints | None = None
    final: Sequence[int] | Ints | None = None


@attrs.frozen
class Ended:
    """A request that ended.

    generated: tokens delivered over its whole life. computed: slots whose KV was valid at the end. cached: tokens that its
    last admission took from the cache. pages: pages it held. retractions: how often it was. max_gap: the longest number
    of steps between two of its tokens, 0 with fewer than two. waited_steps: passes in which it waited. first_cached: tokens
    that its first admission took from the cache, which is what a client is told of its prompt.
    """

    id: str
    finish: Finish
    generated: int
    computed: int
    cached: int
    pages: int
    retractions: int
    max_gap: int
    waited_steps: int
    first_cached: int = 0


@attrs.frozen
class Flushed:
    """Answer of flush(): whether the cache was emptied, how many pages that gave, and why not."""

    ok: bool
    pages: int
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.ok


@attrs.frozen(eq=False)
class Outcome:
    """What commit() answers, aligned with the plan's rows.

    rows: table rows. tokens: int [rows] (or [rows, width]); -1 where no token is delivered: a chunk that is not the
    last, a request that ended or failed meanwhile, a position past a stop. finish: `Finish` codes, int8 [rows].
    ended: objects, for requests that ended only.
    """

    rows: Ints
    tokens: npt.NDArray[np.signedinteger[Any]]
    finish: npt.NDArray[np.int8]
    ended: tuple[Ended, ...]


def _count(_: Any, attribute: Any, value: Any) -> None:
    whole(value, attribute.name, 0, none=True)


def _ids(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(f"{attribute.name} must be a tuple of ids, not {value!r}")


def _time(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)):
        raise InvalidRequest(f"{attribute.name} must be a finite number or None, not {value!r}")


@attrs.frozen
class Agreed:
    """What the ranks agreed for one step (law E2). One rank passes None.

    free_pages: the group's minimum of free + evictable pages at publication; allocations of the step are charged to it.
    admit: newcomers, resuming ones included, that every rank can admit. prefill_tokens: tokens of prefill in this step over all
    requests; 0 leaves the decodes alone. aborts: ids to abort in this step on every rank.
    now: the group's time, for policies that need one. A malformed field raises `InvalidRequest` when the record is made.
    """

    free_pages: int | None = attrs.field(default=None, converter=plain, validator=_count)
    admit: int | None = attrs.field(default=None, converter=plain, validator=_count)
    prefill_tokens: int | None = attrs.field(default=None, converter=plain, validator=_count)
    aborts: tuple[str, ...] = attrs.field(default=(), validator=_ids)
    now: float | None = attrs.field(default=None, validator=_time)


@attrs.frozen
class Event:
    """One change in a request's life. kind: queued, admitted, retracted, paused, resumed, finished, aborted."""

    kind: str
    id: str
    step: int
    detail: str = ""
