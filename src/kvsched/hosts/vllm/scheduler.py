"""`KvschedScheduler`: vLLM's scheduler interface in front of a kvsched `Scheduler`.

What lives here: which call of vLLM's becomes which call of kvsched's, and the little that vLLM wants to be told in between
(finished and preempted ids, statistics, pause states). What does not: decisions, and the translation of plans and results
(`batches`, `outputs`, `requests`).

Every schedule() of vLLM's is one plan, an empty one included, and every update_from_output() commits the oldest; so two plans
are in flight under async scheduling, and the tokens that vLLM calls placeholders are those that a plan in flight will sample.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.perf import ModelMetrics
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import RequestStatus

from kvsched.errors import ConfigError, OutOfOrder
from kvsched.hosts.drift import differences
from kvsched.hosts.refusals import sentence
from kvsched.hosts.vllm.batches import Batches
from kvsched.hosts.vllm.contract import CONTRACT
from kvsched.hosts.vllm.events import TellingCache
from kvsched.hosts.vllm.outputs import as_result, complete, records, share_rare
from kvsched.hosts.vllm.requests import Entry, refused_feature, status_of, to_kvsched
from kvsched.hosts.vllm.settings import settings
from kvsched.memory import PagePool, RadixCache
from kvsched.plan import Agreed, Plan
from kvsched.request import Finish
from kvsched.scheduler import Scheduler
from kvsched.units import aligned
from kvsched.verdict import Refused

log = init_logger("vllm.kvsched")
NULL_BLOCKS = 1
"""vLLM's block 0 fills the unused part of its block tables and is nobody's."""
NOBODY_NEW, NO_PREFILL = Agreed(admit=0), Agreed(prefill_tokens=0)


class Flight(NamedTuple):
    """A plan in flight, with what vLLM was given for it and the ids of its rows; None where it was given nothing to do."""

    output: SchedulerOutput
    plan: Plan | None
    ids: list[str]


class KvschedScheduler(SchedulerInterface):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """For vLLM's `--scheduler-cls`, decoder-only text models. See docs/hosts.md.

    Raises `ConfigError` at start-up for everything it does not do, by name, and for a vLLM whose interface is another one.
    A request that can never fit, or that asks for what is not done, ends at once; its stop reason says why, with the numbers.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, structured_output_manager: Any, block_size: int,
                 hash_block_size: int | None = None, mm_registry: Any = None, include_finished_set: bool = False,
                 log_stats: bool = False) -> None:
        del structured_output_manager, mm_registry
        drifted = differences(CONTRACT)
        if drifted:
            raise ConfigError("this vLLM is not the one that the adapter was written for: " + "; ".join(drifted))
        self.settings = settings(vllm_config, kv_cache_config, block_size, hash_block_size, os.environ)
        self.connector = self.ec_connector = None  # vLLM reads both without asking
        self.log_stats = log_stats
        self.max_model_len: int = vllm_config.model_config.max_model_len
        config = self.settings.scheduler
        caching = bool(vllm_config.cache_config.enable_prefix_caching)
        cache = RadixCache(block_size, eviction=self.settings.eviction) if caching else None
        events = vllm_config.kv_events_config
        self.telling: TellingCache | None = None
        if cache is not None and events is not None and events.enable_kv_cache_events:
            self.telling = TellingCache(cache, vllm_config.cache_config.prefix_caching_hash_algo)
        self.publisher = EventPublisherFactory.create(events, vllm_config.parallel_config.data_parallel_index)
        self.core = Scheduler(config, PagePool(kv_cache_config.num_blocks, block_size, NULL_BLOCKS), self.telling or cache)
        self.caching = caching
        self.requests: dict[str, Entry] = {}
        self.running: set[str] = set()  # residents
        self.batches = Batches(self.requests, self.core.generated, second_runner=vllm_config.use_v2_model_runner)
        self.flight: deque[Flight] = deque()
        self.clients: Counter[int] = Counter()  # live requests per client
        self.due: set[str] = set()  # whose next output carries more than a token
        self.watched: dict[str, Entry] = {}
        self.finished_req_ids: set[str] = set()
        self.finished_of_client: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self.preempted: set[str] = set()
        self.refused: list[tuple[int, EngineCoreOutput]] = []
        self.paused = PauseState.UNPAUSED
        self.flush_due = False
        self.decoding = False  # whether the last plan leaves anybody to decode
        self.prefix_stats = PrefixCacheStats()
        mfu = log_stats and vllm_config.observability_config.enable_mfu_metrics
        self.perf = ModelMetrics(vllm_config) if mfu else None
        log.info("kvsched schedules: %s, %d pages of %d tokens, prefix cache %s", config, self.core.ceiling, block_size,
                 self.settings.eviction if caching else "off")

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Take a request, or end it in the next output with the reason."""
        feature = refused_feature(request)
        if feature is not None:
            self._refuse(request, f"kvsched does not do this inside vLLM: {feature}", RequestStatus.FINISHED_ERROR)
            return
        answer = self.core.submit(to_kvsched(request, self.max_model_len))
        if isinstance(answer, Refused):
            length = self.settings.refusals == "length"
            self._refuse(request, sentence(answer), RequestStatus.FINISHED_IGNORED if length else RequestStatus.FINISHED_ERROR)
            return
        entry = self.requests[request.request_id] = Entry(request)
        self.clients[entry.client] += 1
        if entry.watched:
            self.watched[request.request_id] = entry
        if self.telling is not None:
            self.telling.introduce(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Any]:
        """The client went away, or found a stop string. What was computed stays in the prefix cache, as in vLLM's own."""
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended = []
        for key in dict.fromkeys(request_ids):
            entry = self.requests.get(key)
            if entry is not None:
                self.core.finish(key)
                entry.request.status = finished_status
                self._forget(key, entry)
                ended.append(entry.request)
        return ended

    def _refuse(self, request: Any, why: str, status: RequestStatus) -> None:
        request.status = status
        log.warning("%s: %s", request.request_id, why)
        self.refused.append((request.client_index, EngineCoreOutput(
            request.request_id, [], finish_reason=request.get_finished_reason(), stop_reason=why, events=request.take_events(),
        )))
        self._gone(request.request_id, request.client_index)

    def _forget(self, key: str, entry: Entry) -> None:
        """A live request is one no more."""
        del self.requests[key]
        self.running.discard(key)
        self.due.discard(key)
        self.watched.pop(key, None)
        self.clients[entry.client] -= 1
        if not self.clients[entry.client]:
            del self.clients[entry.client]
        self._gone(key, entry.client)

    def _gone(self, key: str, client: int) -> None:
        self.finished_req_ids.add(key)
        if self.finished_of_client is not None:
            self.finished_of_client[client].add(key)

    # -- the step -------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One plan, as vLLM's workers take it. throttle_prefills: no prefill while anybody decodes."""
        if self.flush_due:  # a plan more would keep the cache from being emptied
            return self._nothing()
        agreed = NOBODY_NEW if self.paused == PauseState.PAUSED_NEW else NO_PREFILL if throttle_prefills and self.decoding else None
        plan = self.core.schedule(agreed)
        self.decoding = bool(plan.decodes) or any(chunk.last for chunk in plan.prefill)
        if plan.retracted or plan.admitted:
            self._moved(plan)
        ids = self.batches.ids(plan)
        output = self.batches.output(plan, ids, self.finished_req_ids, self.preempted)
        self.finished_req_ids, self.preempted = set(), set()
        self.flight.append(Flight(output, plan, ids))
        return output

    def _nothing(self) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, output.preempted_req_ids = self.finished_req_ids, self.preempted
        self.finished_req_ids, self.preempted = set(), set()
        self.flight.append(Flight(output, None, []))
        return output

    def _moved(self, plan: Plan) -> None:
        """Who lost its pages in this step, and who started."""
        now = time.monotonic()
        for key in plan.retracted:
            self._preempted(key, now)
        starts = {chunk.id: chunk.start for chunk in plan.prefill}
        for key in plan.admitted:
            entry = self.requests[key]
            request, hit = entry.request, starts[key]
            request.status = RequestStatus.RUNNING
            self.running.add(key)
            self.due.add(key)
            entry.base = len(self.core.generated(key)) if entry.known else 0
            if request.prefill_stats and not request.num_preemptions:
                request.prefill_stats.set(entry.prompt, hit, 0)
            if self.log_stats:
                request.record_event(EngineCoreEventType.SCHEDULED, now)
                if self.caching and not request.skip_reading_prefix_cache:
                    self.prefix_stats.record(entry.prompt + entry.base, hit, preempted=request.num_preemptions > 0)

    def _preempted(self, key: str, now: float) -> None:
        request = self.requests[key].request
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.running.discard(key)
        self.preempted.add(key)
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, now)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Commit the oldest plan, and say what it delivered to whom."""
        if not self.flight or self.flight[0].output is not scheduler_output:
            raise OutOfOrder("update_from_output takes the oldest output of schedule() that it has not had yet")
        _, plan, ids = self.flight.popleft()
        found = [] if plan is None else self._commit(plan, ids, model_runner_output)
        if self.flush_due and not self.core.in_flight:
            self._flush()
        return self._answer(found, scheduler_output, model_runner_output)

    def _commit(self, plan: Plan, ids: list[str], runner: Any) -> list[tuple[int, list[EngineCoreOutput]]]:
        """Take in a step's result. Returns what was delivered, for each client."""
        result = as_result(plan, ids, runner, self.watched, self.max_model_len)
        outcome = self.core.commit(plan, result)
        found = records(ids, outcome)
        for at in [at for at, key in enumerate(ids) if key in self.due] if self.due else ():
            record = found[at]
            if record is not None:
                entry = self.requests[record.request_id]
                complete(record, entry, runner, aligned(entry.prompt, self.core.config.page_size) if self.caching else 0)
                if not entry.careful:
                    self.due.discard(record.request_id)
        if runner.num_nans_in_logits is not None or runner.sampling_masks is not None:
            share_rare(found, runner)
        groups = self._by_client(found)
        if outcome.ended:
            repeated = frozenset(result.finished or ())
            for at in outcome.finish.nonzero()[0].tolist():
                self._end(ids[at], Finish(int(outcome.finish[at])), int(outcome.tokens[at]), found[at], repeated=at in repeated)
        return groups

    def _end(self, key: str, finish: Finish, token: int, record: EngineCoreOutput | None, *, repeated: bool) -> None:
        entry = self.requests[key]
        entry.request.status, entry.request.stop_reason = status_of(entry, finish, token, repeated=repeated)
        self._forget(key, entry)
        if record is not None:
            record.finish_reason = entry.request.get_finished_reason()
            record.stop_reason = entry.request.stop_reason

    def _by_client(self, found: list[EngineCoreOutput | None]) -> list[tuple[int, list[EngineCoreOutput]]]:
        """Who gets which records."""
        delivered = [record for record in found if record is not None]
        if delivered and len(self.clients) == 1:
            return [(next(iter(self.clients)), delivered)]
        groups: dict[int, list[EngineCoreOutput]] = {}
        for record in delivered:
            groups.setdefault(self.requests[record.request_id].client, []).append(record)
        return list(groups.items())

    def _answer(self, groups: list[tuple[int, list[EngineCoreOutput]]], scheduler_output: SchedulerOutput,
                runner: Any) -> dict[int, EngineCoreOutputs]:
        """What goes to each client, with what goes with a step: refusals, finished ids, cache events, statistics."""
        answer = {client: EngineCoreOutputs(outputs=outputs) for client, outputs in groups}
        for client, record in self.refused:
            answer.setdefault(client, EngineCoreOutputs()).outputs.append(record)
        self.refused.clear()
        if self.finished_of_client:
            for client, gone in self.finished_of_client.items():
                answer.setdefault(client, EngineCoreOutputs()).finished_requests = gone
            self.finished_of_client.clear()
        if self.telling is not None and (told := self.telling.take()):
            self.publisher.publish(KVEventBatch(ts=time.time(), events=told))
        perf = self.perf.get_step_perf_stats_per_gpu(scheduler_output) if self.perf is not None and self.perf.is_enabled() else None
        stats = self.make_stats(cudagraph_stats=runner.cudagraph_stats, perf_stats=perf)
        if stats is not None:
            if not answer:
                answer[0] = EngineCoreOutputs()
            next(iter(answer.values())).scheduler_stats = stats
        return answer

    # -- what vLLM asks -------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        """Requests that could run now: none when paused, residents alone when nobody new may start."""
        if self.paused == PauseState.PAUSED_ALL:
            return 0
        return len(self.running if self.paused == PauseState.PAUSED_NEW else self.requests)

    def has_finished_requests(self) -> bool:
        """Whether the workers, or a client whose request was refused, have something to be told."""
        return bool(self.finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.running), len(self.requests) - len(self.running)

    def get_kv_cache_usage(self) -> float:
        """The share of pages that cannot be taken without preempting somebody, from 0 to 1."""
        pages = self.core.occupancy
        return 1 - (pages["free"] + pages["cached"]) / pages["usable"]

    def make_stats(self, spec_decoding_stats: Any = None, kv_connector_stats: Any = None, cudagraph_stats: Any = None,
                   perf_stats: Any = None, ec_connector_stats: Any = None) -> SchedulerStats | None:
        """The statistics of one step; None when they are switched off."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        prefix, self.prefix_stats = self.prefix_stats, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=self.get_kv_cache_usage(), prefix_cache_stats=prefix,
            spec_decoding_stats=spec_decoding_stats, kv_connector_stats=kv_connector_stats, ec_connector_stats=ec_connector_stats,
            cudagraph_stats=cudagraph_stats, perf_stats=perf_stats,
        )

    def get_kv_event_publisher_config(self) -> Any:
        """Where cache events are published; None when they are not."""
        return self.publisher.get_publisher_config()

    # -- control --------------------------------------------------------------------------------------------------

    @property
    def pause_state(self) -> PauseState:
        """UNPAUSED, PAUSED_NEW (nobody starts), or PAUSED_ALL (nothing runs)."""
        return self.paused

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pages stay where they are: PAUSED_ALL holds them."""
        self.paused = pause_state
        if pause_state == PauseState.PAUSED_ALL:
            self.core.pause("hold")
        else:
            self.core.resume()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. False while requests hold pages, unless they may be preempted.

        With steps in flight, whose pages cannot be given to anybody yet, nothing starts until they end, and the cache is
        emptied then: no request that runs later reads what was cached before.
        """
        del reset_connector  # there is none, which vLLM counts as reset
        if reset_running_requests:
            now = time.monotonic()
            for key in self.core.pause("retract"):
                self._preempted(key, now)
            if self.core.in_flight:
                self.flush_due = True
                return True
        return self._flush()

    def _flush(self) -> bool:
        self.flush_due = False
        flushed = self.core.flush()
        if self.paused != PauseState.PAUSED_ALL:
            self.core.resume()
        if not flushed:
            log.warning("the prefix cache was not reset: %s", flushed.reason)
            return False
        self.prefix_stats.reset = True
        if self.telling is not None:
            self.telling.cleared()
        return True

    def shutdown(self) -> None:
        """Stop publishing."""
        self.publisher.shutdown()

    # -- what has no meaning here ---------------------------------------------------------------------------------

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """No request with a grammar is ever scheduled."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """There are no drafts."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """There are no drafts."""

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""
