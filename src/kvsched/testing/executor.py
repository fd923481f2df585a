"""A forward pass that can be wrong: plans are run over a simulated paged memory, and every page they name is verified.

What lives here: `SimulatedExecutor`, which writes into page `p` at offset `o` a *stamp* of everything that the key and
value there would depend on (namespace and all tokens up to that position), and reads every position that a row attends
to before it computes. A page with two owners, a stale page, a wrong prefix hit or a page given away while a step still
uses it gives a wrong stamp, and `ExecutorViolation` names request, page and position.

What does not: any knowledge of scheduling. The executor sees requests, plans and outcomes, as a host does; it never
reads the scheduler's block table, except to compare its own copy (built from `plan.deltas`) with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvsched.plan import Outcome, Plan, StepResult
from kvsched.request import Namespace, Request
from kvsched.testing.stamps import Stamps, continued, mixed, sealed, stamps_of
from kvsched.units import Tokens, pages_for

_EMPTY = 0  # what a slot holds before anything was written
_REJECTED = 0x5EED  # what a draft that was not accepted leaves behind


class ExecutorViolation(AssertionError):
    """What a plan names is not what its requests computed: the text has request, page and position."""


@attrs.define(eq=False)
class _Sequence:
    """One request as the executor knows it. `tokens`: prompt and everything sampled, delivered or not yet."""

    id: str
    request: Request
    salt: int
    stop_at: int | None
    tokens: list[int]
    stamps: Stamps
    delivered: int = 0
    passes: int = 0  # over the open block
    live: bool = True

    def extend(self, tokens: list[int]) -> None:
        have = len(self.tokens)
        if have + len(tokens) > len(self.stamps):
            self.stamps = np.concatenate([self.stamps, np.zeros(have + len(tokens), np.uint64)])
        self.stamps[have : have + len(tokens)] = continued(int(self.stamps[have - 1]), np.asarray(tokens, np.int64))
        self.tokens.extend(tokens)

    @property
    def sampled(self) -> int:
        return len(self.tokens) - len(self.request.tokens)


@attrs.define(eq=False)
class _Row:
    """One row of a plan, bound to the sequence that had the id when the plan was made."""

    sequence: _Sequence
    table_row: int
    start: int
    count: int
    last: bool
    decode: bool
    pages: npt.NDArray[np.int32]
    before: int = 0
    new: list[int] = attrs.field(factory=list)
    rejected: int = 0
    older: list[_Row] = attrs.field(factory=list)  # rows of the sequence that were in flight when the plan was made

    @property
    def blocked(self) -> bool:
        return self.decode and self.sequence.request.block_tokens is not None

    def written(self, page_size: int) -> set[int]:
        return set(self.pages[self.start // page_size :].tolist())


@attrs.define(eq=False)
class _Frame:
    """A plan that is not yet committed or rolled back."""

    plan: Plan
    rows: list[_Row]
    undo: list[tuple[int, int, int]]
    ran: bool = False


class SimulatedExecutor:
    """Runs plans over a paged memory of stamps. It satisfies the `Executor` protocol.

    page_size, pages: of the memory; `pages` counts every page id that may appear, reserved ones included.
    lookahead_tokens: as in the scheduler's config; decode rows draft `counts - 1` tokens and a seeded function says how
        many of them are right.
    vocabulary: tokens are sampled from 0 to vocabulary - 1, by a function of the prefix and the request's id alone, so a
        request that is retracted and computed anew must give the same text.
    seed: of the samples and of the accepted drafts.

    A bare host loop needs `add(request)` and `run(plan)`. A host that wants every check calls `receive` when a plan is made,
    `run` in plan order (now or later), then `committed` or `rolled_back`. Cost of a row: O(tokens it attends to).
    """

    def __init__(self, page_size: int, pages: int, *, lookahead_tokens: int = 0, vocabulary: int = 5, seed: int = 0) -> None:
        self.page_size = page_size
        self.pages = pages
        self.lookahead_tokens = lookahead_tokens
        self.vocabulary = vocabulary
        self.seed = seed
        self._memory: Stamps = np.full((pages, page_size), _EMPTY, np.uint64)
        self._table: npt.NDArray[np.int32] = np.full((4, 4), -1, np.int32)
        self._sequences: dict[str, _Sequence] = {}
        self._frames: list[_Frame] = []

    # -- what the host says ---------------------------------------------------------------------------------------------

    def add(self, request: Request, ids: Sequence[str] | None = None, *, stop_at: int | None = None) -> None:
        """Make an accepted request known, under the ids it runs with. O(prompt).

        stop_at: the number of the generated token that is the (smallest) stop token; no earlier one is.
        """
        for name in (request.id,) if ids is None else ids:
            stamps = stamps_of(request.space, request.tokens)
            salt = sealed(f"{self.seed}/{name}")
            self._sequences[name] = _Sequence(name, request, salt, stop_at, request.tokens.tolist(), stamps)

    def end(self, name: str) -> None:
        """Forget a request (after an abort). Plans in flight that name it still run."""
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            sequence.live = False

    def receive(self, plan: Plan, table: npt.NDArray[np.int32] | None = None) -> None:
        """Take a plan as soon as it is made: apply its deltas and verify that it is fit to run. O(rows and their pages).

        table: the scheduler's block table now; the rows of the plan must be the same in the executor's own copy.
        """
        self._fenced_deltas(plan)
        undo = self._apply(plan)
        frame = _Frame(plan, self._bind(plan), undo)
        if table is not None:
            self._same_table(frame, table)
        self._exclusive(frame)
        self._frames.append(frame)

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan and sample. A plan that `receive` has not seen is received first, and earlier ones count as ended."""
        frame = self._frame(plan)
        if frame is None:
            self._frames = [f for f in self._frames if not f.ran]
            self.receive(plan)
            frame = self._frames[-1]
        if frame.ran:
            raise ExecutorViolation(f"plan {plan.step} runs a second time")
        if any(not f.ran for f in self._frames[: self._frames.index(frame)]):
            raise ExecutorViolation(f"plan {plan.step} runs before an older plan in flight")
        frame.ran = True
        wide = [row.count for row in frame.rows if row.decode]
        width = max([1 + self.lookahead_tokens, *wide])
        tokens = np.full((len(frame.rows), width), -7, np.int64)  # a real tensor has something in the unused places too
        accepted = np.zeros(len(frame.rows), np.int64)
        final = []
        for i, row in enumerate(frame.rows):
            self._compute(plan, row)
            tokens[i, : len(row.new)] = row.new
            if row.blocked and row.new:
                final.append(i)
            elif not row.blocked:
                accepted[i] = max(len(row.new) - 1, 0)
        if width == 1:
            return StepResult(tokens[:, 0], final=final or None)
        return StepResult(tokens, accepted, final=final or None)

    def committed(self, plan: Plan, outcome: Outcome, failed: Sequence[int] = ()) -> None:
        """Compare what a commit delivered with what was sampled: nothing lost, nothing twice, nothing else. O(rows)."""
        frame = self._frame(plan)
        if frame is None or not frame.ran:
            raise ExecutorViolation(f"plan {plan.step} was committed without a run")
        self._frames.remove(frame)
        for i, row in enumerate(frame.rows):
            sequence = row.sequence
            got = [t for t in np.atleast_1d(outcome.tokens[i]).tolist() if t != -1]
            ended = int(outcome.finish[i]) != 0
            sampled = sequence.tokens[len(sequence.request.tokens) + sequence.delivered :]
            if not sequence.live and got:
                raise ExecutorViolation(f"{sequence.id} had ended before plan {plan.step} was committed; delivered {got}")
            if got != sampled[: len(got)] or len(got) > len(row.new):
                raise ExecutorViolation(f"{sequence.id} in plan {plan.step}: sampled {row.new}, delivered {got}")
            if sequence.live and not ended and i not in failed and len(got) != len(row.new):
                raise ExecutorViolation(f"{sequence.id} in plan {plan.step} goes on: sampled {row.new}, delivered only {got}")
            sequence.delivered += len(got)
            if ended:
                sequence.live = False
                if self._sequences.get(sequence.id) is sequence:
                    del self._sequences[sequence.id]

    def rolled_back(self, plan: Plan) -> None:
        """Forget what a plan sampled. A plan that never ran also takes its deltas back; one that ran leaves them behind."""
        frame = self._frame(plan)
        if frame is None or frame is not self._frames[-1]:
            raise ExecutorViolation(f"plan {plan.step} was rolled back and is not the newest in flight")
        self._frames.pop()
        if frame.ran:
            for row in frame.rows:
                del row.sequence.tokens[row.before :]
            return
        for row_number, column, page in reversed(frame.undo):
            self._table[row_number, column] = page

    # -- what a test asks -----------------------------------------------------------------------------------------------

    def reference(self, request: Request, name: str, count: int, stop_at: int | None = None) -> list[int]:
        """The first `count` tokens that this request gives when nothing disturbs it, worked out from nothing. O(prompt + count)."""
        alone = SimulatedExecutor(1, 0, vocabulary=self.vocabulary, seed=self.seed)
        alone.add(request, (name,), stop_at=stop_at)
        sequence = alone._sequences[name]
        while sequence.sampled < count:
            sequence.extend([alone._sample(sequence)])
        return sequence.tokens[len(request.tokens) : len(request.tokens) + count]

    def pages_in_flight(self) -> set[int]:
        """Pages that rows of plans in flight attend to."""
        return {page for frame in self._frames for row in frame.rows for page in row.pages.tolist()}

    def pages_of(self, row: int, columns: int) -> list[int]:
        """Pages in the executor's own copy of a row of the block table."""
        have = self._table[row, :columns].tolist() if row < len(self._table) else []
        return list(have)

    def holds(self, space: Namespace, tokens: Sequence[int] | Tokens, pages: Sequence[int] | npt.NDArray[np.int32]) -> bool:
        """Whether the pages hold exactly the key and value of these tokens. O(tokens)."""
        want = stamps_of(space, tokens)
        return bool((self._memory[np.asarray(pages, np.int64)].reshape(-1)[: len(want)] == want).all())

    # -- the block table ------------------------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> list[tuple[int, int, int]]:
        undo = []
        deltas = plan.deltas
        for row, column, page in zip(deltas.row.tolist(), deltas.column.tolist(), deltas.page.tolist(), strict=True):
            if not 0 <= page < self.pages:
                raise ExecutorViolation(f"plan {plan.step} names page {page} of {self.pages}, at row {row} column {column}")
            if row < 0 or column < 0:
                raise ExecutorViolation(f"plan {plan.step} writes to row {row} column {column} of the block table")
            rows, columns = self._table.shape
            if row >= rows or column >= columns:
                grown = np.full((max(rows, 2 * row + 1), max(columns, 2 * column + 1)), -1, np.int32)
                grown[:rows, :columns] = self._table
                self._table = grown
            undo.append((row, column, int(self._table[row, column])))
            self._table[row, column] = page
        return undo

    def _bind(self, plan: Plan) -> list[_Row]:
        n = len(plan.rows)
        ids = plan.ids
        if not len(plan.starts) == len(plan.counts) == len(ids) == n or plan.decodes + len(plan.prefill) != n:
            raise ExecutorViolation(f"plan {plan.step}: rows, starts, counts and ids differ in length")
        if len(set(plan.rows.tolist())) != n or len(set(ids)) != n:
            raise ExecutorViolation(f"plan {plan.step} names a row twice: rows {plan.rows.tolist()}, ids {ids}")
        bound = []
        for i, name in enumerate(ids):
            sequence = self._sequences.get(name)
            if sequence is None:
                raise ExecutorViolation(f"plan {plan.step} names {name}, which is not live")
            table_row, start, count = int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i])
            last = True
            if i >= plan.decodes:
                chunk = plan.prefill[i - plan.decodes]
                if (chunk.row, chunk.start, chunk.length) != (table_row, start, count):
                    raise ExecutorViolation(f"plan {plan.step}: chunk of {name} and row {i} differ")
                last = chunk.last
            if count < 1 or start < 0:
                raise ExecutorViolation(f"plan {plan.step}: {name} computes {count} tokens from {start}")
            columns = pages_for(start + count, self.page_size)
            pages = self._table[table_row, :columns].copy() if table_row < len(self._table) else np.empty(0, np.int32)
            if len(pages) < columns or (pages < 0).any():
                raise ExecutorViolation(
                    f"plan {plan.step}: {name} reaches {start + count} tokens = {columns} pages; row {table_row} has {pages.tolist()}"
                )
            row = _Row(sequence, table_row, start, count, last, i < plan.decodes, pages)
            row.older = [r for f in self._frames for r in f.rows if r.sequence is sequence]
            bound.append(row)
        return bound

    def _same_table(self, frame: _Frame, table: npt.NDArray[np.int32]) -> None:
        for row in frame.rows:
            theirs = table[row.table_row, : len(row.pages)]
            if not np.array_equal(theirs, row.pages):
                raise ExecutorViolation(
                    f"plan {frame.plan.step}: row {row.table_row} ({row.sequence.id}) is {theirs.tolist()} in the scheduler's table "
                    f"and {row.pages.tolist()} in the copy built from deltas"
                )

    def _fenced_deltas(self, plan: Plan) -> None:
        """Rows in flight are only appended to, and what a plan in flight writes is given to nobody."""
        if not self._frames:
            return
        deltas = plan.deltas
        for frame in self._frames:
            by_row = {r.table_row: r for r in frame.rows}
            writes = {page: r for r in frame.rows for page in r.written(self.page_size)}
            for row, column, page in zip(deltas.row.tolist(), deltas.column.tolist(), deltas.page.tolist(), strict=True):
                mine = by_row.get(row)
                if mine is not None and column < len(mine.pages):
                    raise ExecutorViolation(
                        f"plan {plan.step} overwrites row {row} column {column} while plan {frame.plan.step} uses it for {mine.sequence.id}"
                    )
                if page in writes:
                    raise ExecutorViolation(
                        f"plan {plan.step} gives page {page} to row {row} while plan {frame.plan.step} writes it for "
                        f"{writes[page].sequence.id}"
                    )

    def _exclusive(self, frame: _Frame) -> None:
        """A page that a row writes is attended to by no other row, of this plan or of one in flight."""
        step = frame.plan.step
        for row in frame.rows:
            mine = row.written(self.page_size)
            for other_frame in (*self._frames, frame):
                for other in other_frame.rows:
                    if other_frame is not frame and other.table_row == row.table_row and other.sequence is not row.sequence:
                        raise ExecutorViolation(
                            f"plan {step} gives row {row.table_row} to {row.sequence.id} while plan {other_frame.plan.step} "
                            f"uses it for {other.sequence.id}"
                        )
                    if other.sequence is row.sequence:
                        continue
                    common = mine.intersection(other.pages.tolist())
                    if common:
                        raise ExecutorViolation(
                            f"page {min(common)} has two owners: plan {step} writes it for {row.sequence.id} and plan "
                            f"{other_frame.plan.step} attends to it for {other.sequence.id}"
                        )

    def _frame(self, plan: Plan) -> _Frame | None:
        return next((f for f in self._frames if f.plan is plan), None)

    # -- the forward pass -----------------------------------------------------------------------------------------------

    def _compute(self, plan: Plan, row: _Row) -> None:
        sequence = row.sequence
        row.before = len(sequence.tokens)
        now = self._table[row.table_row, : len(row.pages)]
        if not np.array_equal(now, row.pages):
            raise ExecutorViolation(f"row {row.table_row} ({sequence.id}) changed while plan {plan.step} was in flight")
        if not row.decode:
            self._prefill(plan, row)
        else:
            self._decode(plan, row)
        sequence.extend(row.new)

    def _prefill(self, plan: Plan, row: _Row) -> None:
        sequence = row.sequence
        end = row.start + row.count
        chunk = next(c for c in plan.prefill if c.row == row.table_row)
        if chunk.tokens.tolist() != sequence.tokens[row.start : end]:
            raise ExecutorViolation(f"plan {plan.step}: chunk of {sequence.id} at {row.start} has other tokens than the request")
        if row.last != (end == len(sequence.tokens)):
            raise ExecutorViolation(f"plan {plan.step}: chunk of {sequence.id} ends at {end} of {len(sequence.tokens)}, last={row.last}")
        self._attend(plan, row, row.start)
        self._write(row, row.start, sequence.stamps[row.start : end])
        if row.last:
            row.new = [self._sample(sequence)]

    def _decode(self, plan: Plan, row: _Row) -> None:
        sequence = row.sequence
        start = len(sequence.tokens) - 1
        rejected = sum(older.rejected for older in row.older)
        if sequence.sampled < 1 or row.start != start + rejected:
            raise ExecutorViolation(
                f"plan {plan.step}: {sequence.id} decodes from position {row.start}; its last token is at {start}, "
                f"{rejected} drafts in flight were rejected"
            )
        self._attend(plan, row, start)
        right = self._denoised(sequence, row.count) if row.blocked else self._accepted(sequence, row.count - 1)
        for _ in range(1 + right):
            sequence.extend([self._sample(sequence)])
        row.new = sequence.tokens[start + 1 :]
        row.rejected = row.count - 1 - right
        self._write(row, start, sequence.stamps[start : start + 1 + right])
        self._write(row, start + 1 + right, np.full(row.rejected, _REJECTED, np.uint64))
        del sequence.tokens[start + 1 :]

    def _denoised(self, sequence: _Sequence, slots: int) -> int:
        """Tokens after the first that this pass over a block of `slots` gives: all of them in the last pass, else -1 for none."""
        sequence.passes += 1
        if sequence.passes <= mixed(int(sequence.stamps[len(sequence.tokens) - 1]) ^ 0xB10C) % 3:
            return -1
        sequence.passes = 0
        return slots - 1

    def _attend(self, plan: Plan, row: _Row, until: int) -> None:
        if until == 0:
            return
        sequence = row.sequence
        seen = self._memory[row.pages[: pages_for(until, self.page_size)]].reshape(-1)[:until]
        wrong = np.flatnonzero(seen != sequence.stamps[:until])
        if len(wrong):
            at = int(wrong[0])
            page = int(row.pages[at // self.page_size])
            raise ExecutorViolation(
                f"plan {plan.step}: {sequence.id} attends to position {at} in page {page}, which holds something else "
                f"({len(wrong)} of {until} positions are wrong)"
            )

    def _write(self, row: _Row, start: int, stamps: Stamps) -> None:
        positions = np.arange(start, start + len(stamps))
        self._memory[row.pages[positions // self.page_size], positions % self.page_size] = stamps

    def _sample(self, sequence: _Sequence) -> int:
        """The next token: a function of the prefix, the request and the stop rule, and of nothing else."""
        token = mixed(int(sequence.stamps[len(sequence.tokens) - 1]) ^ sequence.salt) % self.vocabulary
        if sequence.stop_at is None:
            return token
        stops = sequence.request.stop_token_ids
        if sequence.sampled + 1 == sequence.stop_at:
            return min(stops)
        while token in stops:
            token += 1
        return token

    def _accepted(self, sequence: _Sequence, drafts: int) -> int:
        if drafts == 0:
            return 0
        return mixed(int(sequence.stamps[len(sequence.tokens) - 1]) ^ sequence.salt ^ 0xACCE97) % (drafts + 1)
