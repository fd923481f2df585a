"""kvsched as the scheduler of transformers' continuous batching: `register()`, then `scheduler_type="kvsched"`.

kvsched decides order, admission, chunks, prefix reuse, eviction and retraction, and owns the pages; transformers runs the model
and samples. See docs/hosts.md for versions, settings and what is refused.

What lives here: the whole adapter. A plan becomes a list of FutureRequestState, a page id a block id in the block table of
transformers' cache. Nothing comes back through a call: the host appends a sampled token to the request's own record, so the next
schedule_batch() reads it there and commits the plan before. transformers' own pool, its content hashes and its offloading to
the CPU have nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
from transformers.generation.continuous_batching import scheduler as host
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState, RequestStatus

from kvsched.config import SchedulerConfig
from kvsched.errors import ConfigError, HostError
from kvsched.hosts.drift import Contract, Expected, differences, names
from kvsched.hosts.refusals import sentence
from kvsched.memory import PagePool, RadixCache
from kvsched.plan import Chunk, Plan, StepResult
from kvsched.request import Request
from kvsched.scheduler import Scheduler
from kvsched.verdict import Refused

FULL = "full_attention"
NOTHING = 0
"""Stands in a result for rows that sample nothing, or whose request the host has ended."""
FROM_HOST = {
    "page_size": "set page_size of the ContinuousBatchingConfig", "max_running": "set its max_requests_per_batch",
    "max_step_tokens": "set its max_batch_tokens", "max_in_flight": "asynchronous batching is not supported",
    "lookahead_tokens": "speculative decoding is not supported", "fair_weights": "transformers' requests carry no tenant",
    "pin_limit_pages": "transformers' requests carry no pin", "max_adapters": "transformers' requests carry no adapter",
    "exchange_pages": "the block table is ours", "max_partial_prefills": "chunks are bounded by max_batch_tokens",
}
"""Keys of `SchedulerConfig` that cannot be given to `register`, and why."""

_MODULE = "transformers.generation.continuous_batching"
CONTRACT: Contract = {
    f"{_MODULE}.scheduler": Expected(members=names("SCHEDULER_MAPPING Scheduler")),
    f"{_MODULE}.scheduler.Scheduler": Expected(
        signature="(cache, safety_margin, max_requests_per_batch)", abstract=names("schedule_batch"),
        members=names("active_requests waiting_requests waiting_requests_order starved_requests block_new_requests _requests_to_cancel "
                      "_requests_to_fork reset add_waiting_request finish_request clear_cancelled_requests has_pending_requests")),
    f"{_MODULE}.scheduler.Scheduler.schedule_batch": Expected(signature="(self, token_budget, cache_budget)"),
    f"{_MODULE}.scheduler.Scheduler.add_waiting_request": Expected(signature="(self, state)"),
    f"{_MODULE}.scheduler.Scheduler.finish_request": Expected(signature="(self, request_id)"),
    f"{_MODULE}.continuous_api.ContinuousBatchProcessor": Expected(reads=("scheduler", names(
        "active_requests add_waiting_request block_new_requests clear_cancelled_requests finish_request get_active_request_static_outputs "
        "has_pending_requests reset schedule_batch set_request_cancellation starved_requests waiting_requests waiting_requests_order "
        "_requests_to_fork"))),
    f"{_MODULE}.requests.FutureRequestState": Expected(signature="(state, has_new_token, complete_blocks, query_length)"),
    f"{_MODULE}.requests.RequestStatus": Expected(values=names("PENDING PREFILLING DECODING FINISHED FAILED")),
    f"{_MODULE}.requests.RequestState": Expected(
        fields=names("request_id initial_tokens max_new_tokens num_children tokens_to_process generated_tokens position_offset "
                     "remaining_prefill_tokens _eos_token_ids _new_tokens_limit"),
        members=names("status fork update_and_check_completion current_len")),
    f"{_MODULE}.requests": Expected(members=names("TMP_TOKEN_ID")),
    f"{_MODULE}.cache.PagedAttentionCache": Expected(members=names(
        "cache_allocators pool max_batch_tokens max_blocks_per_request max_decode_fast_path_length allow_block_sharing mark_complete_blocks")),
    f"{_MODULE}.cache.PagedAttentionCache.mark_complete_blocks": Expected(signature="(self, state, complete_blocks)"),
    f"{_MODULE}.cache_allocators.FullAttentionCacheAllocator": Expected(members=names(
        "block_table tokens_per_page num_blocks blocks_per_sector free_blocks")),
    f"{_MODULE}.cache_allocators.cache_pool.CachePool": Expected(members=names("num_reserved_sectors")),
}
"""What the adapter relies on of transformers. Written down from 5.19.0, and the same in 5.24.0."""


class RequestRefused(HostError):
    """A request that can never be served; the message has the numbers. transformers hands it to the client as the request's error."""


class KvschedScheduler(host.Scheduler):
    """The scheduler that `register` puts into transformers' table. One thread of the host owns it.

    Raises `ConfigError` when made for everything it does not do, by name, and for a transformers whose members are others.
    """

    settings: dict[str, Any] = {}  # noqa: RUF012  # set once, in the subclass that `register` makes
    eviction = "lru"

    def __init__(self, cache: Any, safety_margin: float | None, max_requests_per_batch: int) -> None:
        drifted = differences(CONTRACT)
        if drifted:
            raise ConfigError("this transformers is not the one that the adapter was written for: " + "; ".join(drifted))
        kinds = list(cache.cache_allocators)
        if kinds != [FULL]:
            raise ConfigError(f"kvsched does not do this inside transformers: attention of the kinds {', '.join(kinds)} ({FULL} only)")
        if safety_margin is not None:
            raise ConfigError("kvsched does not do this inside transformers: a safety_margin; its admission setting takes that place")
        self.allocator = cache.cache_allocators[FULL]
        self.config = SchedulerConfig(
            page_size=self.allocator.tokens_per_page, max_running=max_requests_per_batch, max_step_tokens=cache.max_batch_tokens, **self.settings,
        )
        super().__init__(cache, 0.0, max_requests_per_batch)

    def reset(self) -> None:
        """A new generation loop: nobody is known, nothing is cached."""
        super().reset()
        self.allocator.block_table.clear()
        trash = self.cache.pool.num_reserved_sectors * self.allocator.blocks_per_sector
        size = self.config.page_size
        pool = PagePool(self.allocator.num_blocks + trash, size, reserved_pages=trash)
        self.core = Scheduler(self.config, pool, RadixCache(size, eviction=self.eviction) if self.cache.allow_block_sharing else None)
        self.plan: Plan | None = None
        self.parts: deque[list[int]] = deque()  # positions in the plan that are not yet computed, batch by batch
        self.states: dict[str, Any] = {}
        self.fresh: list[Any] = []  # what the last batch was to sample

    # -- what the host calls --------------------------------------------------------------------------------------

    def add_waiting_request(self, state: Any) -> None:
        """Take a request, children included. Raises `RequestRefused`, which the host makes the request's error."""
        children, state.num_children = state.num_children, 0
        answer = self.core.submit(Request(
            state.request_id, state.initial_tokens, max_new_tokens=state.max_new_tokens, stop_token_ids=frozenset(state._eos_token_ids),
            ignore_eos=not state._eos_token_ids,
        ))
        if isinstance(answer, Refused):
            raise RequestRefused(sentence(answer))
        state.max_new_tokens = state._new_tokens_limit = answer.max_new_tokens  # no limit given: what context and pool allow
        super().add_waiting_request(state)
        self.states[state.request_id] = state
        for child in range(children):
            self.add_waiting_request(state.fork(f"{state.request_id}__child#{child}"))

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        """Commit what was computed, and name the next rows.

        An empty list means that nobody is left; None, by which a scheduler asks the host to move requests to the CPU, is never
        returned. token_budget: what the configuration was made from. Raises `HostError` under asynchronous batching.
        """
        del token_budget
        if any(state.tokens_to_process == [TMP_TOKEN_ID] and state.status == RequestStatus.DECODING for state in self.fresh):
            raise HostError("kvsched does not do this inside transformers: asynchronous batching (use_async_batching)")
        while True:
            if self.plan is not None and not self.parts:
                self._commit(self.plan)
            if self.plan is None:
                self.plan = self._next_plan()
                if self.plan is None:
                    return [], False, 0, 0
                self.parts.extend(self._split(self.plan, cache_budget))
            ids = self.plan.ids
            part = [at for at in self.parts.popleft() if ids[at] in self.states]  # some may have been cancelled since
            if part:
                return self._batch(self.plan, part)

    def has_pending_requests(self) -> bool:
        """Whether anybody is left. When nobody is, the last plan is committed here: the host does not ask for another."""
        pending: bool = super().has_pending_requests()
        if not pending and self.plan is not None:
            self.parts.clear()  # rows of requests that are gone
            self._commit(self.plan)
        return pending

    def finish_request(self, request_id: str) -> None:
        """The host found the request at its end, or failed it; the commit hears of it."""
        self.allocator.block_table.pop(request_id, None)
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Requests whose clients went away."""
        for request_id in self._requests_to_cancel:
            self.allocator.block_table.pop(request_id, None)
        gone: list[Any] = super().clear_cancelled_requests()
        for state in gone:
            self.core.abort(state.request_id)
            self.states.pop(state.request_id, None)
        return gone

    # -- inside ---------------------------------------------------------------------------------------------------

    def _next_plan(self) -> Plan | None:
        """The next plan with rows; None when there is no work. Raises `HostError` where nothing moves, which would be our mistake."""
        while self.core.has_work():
            plan = self.core.schedule()
            if plan:
                self._apply(plan)
                return plan
            self.core.commit(plan, StepResult([]))
            if self.core.stalled:
                raise HostError(f"nothing can run: {[self.core.explain(key) for key in self.states]}")
        return None

    def _commit(self, plan: Plan) -> None:
        """Every part of the plan is computed: read what was sampled, and who ended."""
        tokens, finished, failed = [], [], []
        for at, key in enumerate(plan.ids):
            state = self.states.get(key)
            samples = at < plan.decodes or plan.prefill[at - plan.decodes].last
            tokens.append(state.generated_tokens[-1] if samples and state is not None and state.generated_tokens else NOTHING)
            if state is not None and state.status == RequestStatus.FINISHED:
                finished.append(at)
            elif state is not None and state.status == RequestStatus.FAILED:
                failed.append(at)
        outcome = self.core.commit(plan, StepResult(np.array(tokens, dtype=np.int64), finished=finished, failed=failed))
        for ended in outcome.ended:
            state = self.states.pop(ended.id)
            if state.status not in (RequestStatus.FINISHED, RequestStatus.FAILED):
                raise HostError(f"{ended.id} ended for kvsched ({ended.finish.name}) and goes on for transformers: {state!r}")
        self.plan = None

    def _apply(self, plan: Plan) -> None:
        """Bring the host's records to where the plan is: who waits, who is active, which blocks each has."""
        for key in plan.retracted:
            self._queue_again(key)
        for key in plan.admitted:
            state = self.states[key]
            self.waiting_requests.pop(key, None)
            self.waiting_requests_order.remove(key)
            self.active_requests[key] = state
            self.allocator.block_table[key] = []
        names_by_row = dict(zip(plan.rows.tolist(), plan.ids, strict=True))
        deltas, table = plan.deltas, self.allocator.block_table
        for row, column, page in zip(deltas.row.tolist(), deltas.column.tolist(), deltas.page.tolist(), strict=True):
            blocks = table[names_by_row[row]]
            if column < len(blocks):
                blocks[column] = page  # exchanged for the cache's copy
            else:
                blocks.append(page)

    def _queue_again(self, key: str) -> None:
        """A retracted request is a waiting one, whose prompt and text are computed anew as far as the cache has lost them."""
        self.allocator.block_table.pop(key, None)
        state = self.active_requests.pop(key)
        self.waiting_requests[key] = state
        self.waiting_requests_order.append(key)

    def _split(self, plan: Plan, cache_budget: int) -> list[list[int]]:
        """Batches that each read as many cached tokens as the host has room for. One, but where many share long prefixes."""
        parts: list[list[int]] = []
        room = 0
        fast = self._fast(range(len(plan)), plan)
        for at, start in enumerate(plan.starts.tolist()):
            if not parts or (start > room and not fast):
                parts.append([])
                room = cache_budget
            parts[-1].append(at)
            room -= start
        return parts

    def _fast(self, positions: Iterable[int], plan: Plan) -> bool:
        """Whether the host's kernel for single tokens can take these rows."""
        if self.cache.max_blocks_per_request <= 0:
            return False
        longest = self.cache.max_decode_fast_path_length
        return all(int(plan.counts[at]) == 1 and int(plan.starts[at]) < longest for at in positions)

    def _batch(self, plan: Plan, part: list[int]) -> tuple[list[FutureRequestState], bool, int, int]:
        """One batch of the host, its requests made ready."""
        ids = plan.ids
        batch = []
        self.fresh = []
        for at in part:
            state = self.states[ids[at]]
            last = True
            if at >= plan.decodes:
                chunk = plan.prefill[at - plan.decodes]
                last = chunk.last
                self._prefill(state, chunk)
            if last:
                self.fresh.append(state)
            batch.append(FutureRequestState(state, last, {}, int(plan.counts[at])))
        tokens, read = int(plan.counts[part].sum()), int(plan.starts[part].sum())
        return batch, self._fast(part, plan), tokens, read

    def _prefill(self, state: Any, chunk: Chunk) -> None:
        everything = state.initial_tokens + state.generated_tokens
        end = chunk.start + chunk.length
        state.tokens_to_process = everything[chunk.start : end]
        state.remaining_prefill_tokens = everything[end:]
        state.position_offset = chunk.start
        state.status = RequestStatus.DECODING if chunk.last else RequestStatus.PREFILLING


def register(name: str = "kvsched", *, eviction: str = "lru", **settings: Any) -> type[KvschedScheduler]:
    """Make `scheduler_type=name` of a ContinuousBatchingConfig mean kvsched, and return the class that it names.

    eviction: policy of the prefix cache. settings: keys of `SchedulerConfig`. Raises `ConfigError` for one that is wrong.
    """
    for key in settings:
        if key in FROM_HOST:
            raise ConfigError(f"{key} cannot be set for kvsched inside transformers: {FROM_HOST[key]}")
    if settings.get("order") == "fair":
        raise ConfigError("order cannot be 'fair': transformers' requests carry no tenant")
    unknown = settings.keys() - {field.name for field in attrs.fields(SchedulerConfig)}
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no setting of kvsched")
    SchedulerConfig(page_size=1, **settings)
    RadixCache(1, eviction=eviction)
    made: type[KvschedScheduler] = type("KvschedScheduler", (KvschedScheduler,), {"settings": settings, "eviction": eviction, "__module__": __name__})
    host.SCHEDULER_MAPPING[name] = made
    return made
