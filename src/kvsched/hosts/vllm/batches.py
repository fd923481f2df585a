"""A kvsched plan as vLLM's SchedulerOutput.

What lives here: which rows are new, cached or resumed to the workers, which blocks they get appended, the counters of each.
What does not: decisions, and what comes back.

How the two count. A plan says for each row where the first token computed stands (`starts`) and how many there are
(`counts`): vLLM's num_computed_tokens before the step, and num_scheduled_tokens. A row of a decode that starts at position p
has p + 1 tokens known or on their way, so its num_output_tokens is p + 1 less the prompt, placeholders of plans in flight
included. A row in prefill has the output tokens of its last admission. Pages come with `plan.deltas`, in ascending columns of
each row; with `exchange_pages=False` they are only ever appended, as the workers do. vLLM's block 0 is its null block, which
the pool reserves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvsched.hosts.vllm.requests import Entry
from kvsched.plan import Chunk, Plan
from kvsched.units import Ints, Tokens

NEVER = -1


class Batches:
    """Makes one SchedulerOutput after the other.

    entries: live requests by id, shared with the scheduler. generated: tokens delivered to a live request. second_runner: whether
    the workers run vLLM's second model runner, to which a resumed request is a new one.
    """

    __slots__ = ("entries", "generated", "prompts", "scheduled", "second_runner", "_last_ids", "_last_rows")

    def __init__(self, entries: Mapping[str, Entry], generated: Callable[[str], Tokens], *, second_runner: bool) -> None:
        self.entries = entries
        self.generated = generated
        self.second_runner = second_runner
        self.prompts: Ints = np.zeros(64, dtype=np.int64)  # prompt tokens by table row
        self.scheduled: Ints = np.full(64, NEVER, dtype=np.int64)  # step of its last plan, by table row
        self._last_rows: Ints | None = None
        self._last_ids: list[str] = []

    def ids(self, plan: Plan) -> list[str]:
        """Ids of the rows, in row order. Rows that are the same array have the same ids, so a steady step looks nothing up."""
        if plan.prefill:
            return list(plan.ids)
        if plan.rows is not self._last_rows:
            self._last_ids, self._last_rows = list(plan.decode_ids), plan.rows
        return self._last_ids

    def output(self, plan: Plan, ids: list[str], finished: set[str], preempted: set[str]) -> SchedulerOutput:
        """What the workers are told of a step. finished, preempted: ids since the last one; handed over."""
        admitted = set(plan.admitted)
        decodes = plan.decodes
        blocks = blocks_of_rows(plan)
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        if decodes:
            self._decodes(plan, ids, blocks, cached)
        for chunk in plan.prefill:
            self._chunk(chunk, blocks.get(chunk.row, []), new, cached, admitted=chunk.id in admitted)
        if not self.second_runner:
            self._absent(plan, ids, admitted, cached)
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(zip(ids, plan.counts.tolist(), strict=True)),
            total_num_scheduled_tokens=plan.tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
        )

    def tokens(self, key: str) -> list[int]:
        """Prompt and delivered tokens of a live request. O(tokens)."""
        return [*self.entries[key].request.prompt_token_ids, *self.generated(key).tolist()]

    def _decodes(self, plan: Plan, ids: list[str], blocks: dict[int, list[int]], cached: Any) -> None:
        decodes = plan.decodes
        rows, starts = plan.rows[:decodes], plan.starts[:decodes]
        cached.req_ids = ids[:decodes]
        cached.num_computed_tokens = starts.tolist()
        cached.num_output_tokens = (starts + 1 - self.prompts[rows]).tolist()
        fresh: list[tuple[list[int]] | None] = [None] * decodes
        if blocks:
            crossing = np.fromiter(blocks, dtype=np.int64, count=len(blocks))
            at = np.minimum(rows.searchsorted(crossing), decodes - 1)
            for row, position, same in zip(crossing.tolist(), at.tolist(), (rows[at] == crossing).tolist(), strict=True):
                if same:
                    fresh[position] = (blocks[row],)
        cached.new_block_ids = fresh

    def _chunk(self, chunk: Chunk, blocks: list[int], new: list[Any], cached: Any, *, admitted: bool) -> None:
        entry = self.entries[chunk.id]
        if admitted:
            self._enter(chunk.row, entry.prompt)
            if self.second_runner or not entry.known:
                entry.known = True
                entry.request.num_computed_tokens = chunk.start
                prefill = self.tokens(chunk.id) if self.second_runner else None
                new.append(NewRequestData.from_request(entry.request, (blocks,), prefill))
                return
            cached.resumed_req_ids.add(chunk.id)
        cached.req_ids.append(chunk.id)
        cached.num_computed_tokens.append(chunk.start)
        cached.num_output_tokens.append(entry.base)
        cached.new_block_ids.append((blocks,) if blocks else None)

    def _enter(self, row: int, prompt: int) -> None:
        if row >= len(self.prompts):
            more = max(len(self.prompts), row + 1 - len(self.prompts))
            self.prompts = np.concatenate((self.prompts, np.zeros(more, dtype=np.int64)))
            self.scheduled = np.concatenate((self.scheduled, np.full(more, NEVER, dtype=np.int64)))
        self.prompts[row] = prompt
        self.scheduled[row] = NEVER  # whoever had the row before

    def _absent(self, plan: Plan, ids: list[str], admitted: set[str], cached: Any) -> None:
        """All tokens of the rows that the workers know and did not compute in the last step: they left the workers' batch."""
        rows = plan.rows
        away = (self.scheduled[rows] != plan.step - 1).nonzero()[0].tolist()
        self.scheduled[rows] = plan.step
        for at in away:
            key = ids[at]
            if key not in admitted or key in cached.resumed_req_ids:
                cached.all_token_ids[key] = self.tokens(key)


def blocks_of_rows(plan: Plan) -> dict[int, list[int]]:
    """Pages that the plan appends, by table row. Python runs per row that got any."""
    deltas = plan.deltas
    if not len(deltas):
        return {}
    rows, pages = deltas.row, deltas.page.tolist()
    cuts = [0, *((rows[1:] != rows[:-1]).nonzero()[0] + 1).tolist(), len(pages)]
    blocks: dict[int, list[int]] = {}
    for row, begin, end in zip(rows[cuts[:-1]].tolist(), cuts, cuts[1:], strict=False):
        blocks.setdefault(row, []).extend(pages[begin:end])
    return blocks
