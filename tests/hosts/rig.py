"""What the tests of the hosts share: a tiny model, vLLM's configuration without an engine, and simulated workers.

Imported only where vLLM is installed. The workers do with a SchedulerOutput what vLLM's first model runner does with it, by
its rules and no more: rows of a persistent batch, blocks appended or replaced, and a stamp of all tokens so far written into
each slot, which every later step verifies before it reads it. A sampled token is a function of the tokens before it alone, so
any two schedulers that are right give the same text.
"""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvsched.hosts.vllm import KvschedScheduler

EOS = 2
VOCABULARY = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1,
    "eos_token_id": EOS, "tie_word_embeddings": False,
}


def make_model(directory: Path) -> Path:
    """A two-layer Llama with random weights, wide enough that its text depends on every earlier token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig.from_dict({**CONFIG, "initializer_range": 0.25})
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory


def configure(model: Path, *, blocks: int, block_size: int = 16, seqs: int = 64, budget: int = 128, longest: int = 1024,
              caching: bool = True, asynchronous: bool = False, **more: Any) -> VllmConfig:
    """vLLM's configuration as the engine would make it, with the KV cache sized. asynchronous: whatever the platform says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = EngineArgs(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=longest, max_num_seqs=seqs,
        max_num_batched_tokens=budget, enable_prefix_caching=caching, block_size=block_size, dtype="float32",
        async_scheduling=False, **more,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    return config


def layout(blocks: int, block_size: int) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def make_scheduler(kind: type, config: VllmConfig, *, stats: bool = False, finished_sets: bool = False) -> Any:
    """A scheduler built as the engine builds it."""
    size = config.cache_config.block_size
    return kind(
        vllm_config=config, kv_cache_config=layout(config.cache_config.num_gpu_blocks, size),
        structured_output_manager=StructuredOutputManager(config), block_size=size, hash_block_size=size,
        include_finished_set=finished_sets, log_stats=stats,
    )


def ours(config: VllmConfig, **more: Any) -> Any:
    """kvsched as the scheduler."""
    return make_scheduler(KvschedScheduler, config, **more)


def theirs(config: VllmConfig, **more: Any) -> Any:
    """The scheduler that vLLM itself would take."""
    return make_scheduler(AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler, config, **more)


def hasher(config: VllmConfig) -> Any:
    """What the engine gives its requests so that their blocks have names."""
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(config.cache_config.block_size, function)


def make_request(key: str, prompt: list[int], config: VllmConfig | None = None, *, eos: int | None = EOS, client: int = 0,
                 arrival: float = 0.0, block_hasher: Any = None, request: dict[str, Any] | None = None, **sampling: Any) -> Request:
    """A request as it reaches the scheduler. config: given for requests whose blocks are hashed."""
    params = SamplingParams(temperature=0.0, detokenize=False, **{"max_tokens": 16, **sampling})
    params.update_from_generation_config({}, None if params.ignore_eos else eos)
    if block_hasher is None and config is not None:
        block_hasher = hasher(config)
    return Request(
        request_id=key, prompt_token_ids=prompt, sampling_params=params, pooling_params=None, client_index=client,
        arrival_time=arrival, block_hasher=block_hasher, **(request or {}),
    )


# -- workers ----------------------------------------------------------------------------------------------------------


def stamped(stamp: int, token: int) -> int:
    """The stamp of one more token: a number that depends on all tokens so far."""
    return hash((stamp, token)) & 0x7FFFFFFFFFFF


@attrs.define
class Row:
    """What the workers know of a request: its tokens, whether sampled here or sent, and its blocks."""

    tokens: list[int]
    prompt: int
    salt: int
    blocks: list[int]


@attrs.define
class Workers:
    """The workers' memory: rows by id, which of them are in the batch, and one stamp per slot of each block."""

    block_size: int
    second: bool = False
    rows: dict[str, Row] = attrs.field(factory=dict)
    batch: set[str] = attrs.field(factory=set)
    slots: dict[tuple[int, int], int] = attrs.field(factory=dict)
    sampled: dict[str, list[int]] = attrs.field(factory=dict)
    steps: int = 0


def work(workers: Workers, output: Any) -> ModelRunnerOutput:
    """One step of the simulated workers. Asserts that what they are told fits what they know."""
    scheduled = output.num_scheduled_tokens
    assert output.total_num_scheduled_tokens == sum(scheduled.values())
    for key in output.finished_req_ids:
        workers.rows.pop(key, None)
        workers.batch.discard(key)
    if workers.second:
        for key in output.preempted_req_ids:
            workers.rows.pop(key, None)
    cached = output.scheduled_cached_reqs
    workers.batch -= workers.batch - (scheduled.keys() - cached.resumed_req_ids)
    starts: dict[str, int] = {}
    for data in output.scheduled_new_reqs:
        assert workers.second or data.req_id not in workers.rows
        tokens = data.prefill_token_ids if workers.second else data.prompt_token_ids
        salt = hash((data.lora_request.lora_name if data.lora_request else None,))
        workers.rows[data.req_id] = Row(list(tokens), len(data.prompt_token_ids), salt, list(data.block_ids[0]))
        workers.batch.add(data.req_id)
        starts[data.req_id] = data.num_computed_tokens
    assert len({len(column) for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)}) == 1
    for key, new, start, outputs in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True):
        _known_row(workers, key, new, outputs, cached)
        starts[key] = start
    assert starts.keys() == scheduled.keys()
    workers.steps += bool(scheduled)
    sampled = {key: _compute(workers, key, starts[key], count) for key, count in scheduled.items()}
    ids = sorted(scheduled)  # not the scheduler's order, as in a persistent batch
    return ModelRunnerOutput(req_ids=ids, req_id_to_index={key: at for at, key in enumerate(ids)}, sampled_token_ids=[sampled[key] for key in ids])


def _known_row(workers: Workers, key: str, new: Any, outputs: int, cached: Any) -> None:
    row = workers.rows[key]
    if key in cached.resumed_req_ids:
        assert new is not None
        row.blocks = list(new[0])
    elif new is not None:
        row.blocks += new[0]
    if key not in workers.batch:  # it was preempted, or left out of the last step
        if not workers.second:
            everything = cached.all_token_ids[key]
            assert everything[: row.prompt] == row.tokens[: row.prompt]
            row.tokens = everything[: row.prompt] + (everything[-outputs:] if outputs else [])
        workers.batch.add(key)
    assert outputs == len(row.tokens) - row.prompt, (key, outputs, len(row.tokens) - row.prompt)


def _compute(workers: Workers, key: str, start: int, count: int) -> list[int]:
    """Verify what lies before, write what is computed, and sample if that was the last known token."""
    row, size = workers.rows[key], workers.block_size
    assert count >= 1
    assert start + count <= len(row.tokens), f"{key}: {count} tokens from {start} on, and {len(row.tokens)} are known"
    assert len(row.blocks) * size >= start + count, f"{key}: {len(row.blocks)} blocks for {start + count} tokens"
    assert 0 not in row.blocks, f"{key}: the null block"
    stamp = row.salt
    for position in range(start):
        stamp = stamped(stamp, row.tokens[position])
        found = workers.slots.get((row.blocks[position // size], position % size))
        assert found == stamp, f"{key}: position {position} of block {row.blocks[position // size]} holds something else"
    for position in range(start, start + count):
        stamp = stamped(stamp, row.tokens[position])
        workers.slots[row.blocks[position // size], position % size] = stamp
    if start + count < len(row.tokens):
        return []
    token = stamp % 61 if stamp % 7 else 3 + stamp % (VOCABULARY - 3)
    row.tokens.append(token)
    workers.sampled.setdefault(key, []).append(token)
    return [token]


# -- an engine's loop -------------------------------------------------------------------------------------------------


@attrs.define
class Text:
    """What a client got of one request."""

    tokens: list[int] = attrs.field(factory=list)
    finish: str | None = None
    stop: Any = None
    client: int | None = None


@attrs.define
class Session:
    """What came of a drive: the text of each request, and what happened on the way."""

    texts: dict[str, Text]
    steps: int = 0
    preempted: int = 0
    stats: list[Any] = attrs.field(factory=list)
    records: list[Any] = attrs.field(factory=list)


def drive(scheduler: Any, arrivals: Iterable[tuple[int, Request]], workers: Workers, *, depth: int = 1,
          aborts: dict[int, list[str]] | None = None, each: Callable[[int, Any], None] | None = None, limit: int = 20_000) -> Session:
    """The order of calls of vLLM's engine: `step` for depth 1, `step_with_batch_queue` for depth 2.

    arrivals: (turn, request), ascending. aborts: ids by turn, which come between a step's execution and its update. each: called
    with the turn before each one. A turn is one call of the engine's loop.
    """
    waiting = deque(arrivals)
    session = Session({request.request_id: Text() for _, request in waiting})
    queue: deque[tuple[Any, Any]] = deque()
    turn = 0
    while waiting or queue or scheduler.has_requests():
        assert turn < limit, f"no end after {turn} turns: {scheduler.get_request_counts()}"
        while waiting and waiting[0][0] <= turn:
            scheduler.add_request(waiting.popleft()[1])
        if each is not None:
            each(turn, scheduler)
        leaving = (aborts or {}).get(turn, [])
        turn += 1
        if scheduler.has_requests():
            output = scheduler.schedule(False)
            session.preempted += len(output.preempted_req_ids or ())
            executed = output.total_num_scheduled_tokens > 0
            session.steps += executed
            queue.appendleft((output, work(workers, output)))
            if depth > len(queue) and (executed or scheduler.has_requests()):
                scheduler.finish_requests(leaving, RequestStatus.FINISHED_ABORTED)
                continue
        scheduler.finish_requests(leaving, RequestStatus.FINISHED_ABORTED)
        if queue:
            _heard(session, scheduler.update_from_output(*queue.pop()))
    return session


def _heard(session: Session, answer: dict[int, Any]) -> None:
    for client, outputs in answer.items():
        if outputs.scheduler_stats is not None:
            session.stats.append(outputs.scheduler_stats)
        for record in outputs.outputs:
            session.records.append(record)
            text = session.texts[record.request_id]
            assert text.finish is None, f"{record.request_id} had ended"
            assert record.new_token_ids or record.finish_reason is not None
            text.tokens += record.new_token_ids
            text.client = client
            if record.finish_reason is not None:
                text.finish, text.stop = str(record.finish_reason), record.stop_reason


def workload(seed: int, count: int, *, longest: int, most_new: int, heads: int = 6, head: int = 300) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share beginnings, of 1 to `longest` tokens, each with its sampling parameters."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, VOCABULARY) for _ in range(head)] for _ in range(heads)]
    found = []
    for _ in range(count):
        length = draw.choice((draw.randint(1, longest), draw.randint(1, min(64, longest))))
        shared = draw.choice(beginnings)[: draw.randint(0, min(head, length - 1))] if draw.random() < 0.6 else []
        prompt = shared + [draw.randrange(3, VOCABULARY) for _ in range(length - len(shared))]
        sampling: dict[str, Any] = {"max_tokens": draw.randint(1, most_new), "ignore_eos": draw.random() < 0.5}
        if draw.random() < 0.3:
            sampling["stop_token_ids"] = draw.sample(range(3, VOCABULARY), 20)
        found.append((prompt, sampling))
    return found
