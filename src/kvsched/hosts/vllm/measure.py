"""vLLM's own scheduler and kvsched in its place, side by side in one run: `python -m kvsched.hosts.vllm.measure step` or `replay`.

What lives here: both schedulers without an engine, driven through vLLM's interface, with results made beforehand; the adapter is
in the figures, the model is not. What does not: verdicts on the figures, which docs/performance.md gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvsched.hosts.vllm import KvschedScheduler
from kvsched.sim.trace import Arrival, read_trace
from kvsched.units import pages_for

SAMPLED = 7
KINDS = {"vllm": Scheduler, "kvsched": KvschedScheduler}
LONGEST = 131_072
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32_000, "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}
"""A model that is never loaded: the engine's configuration wants one."""


def build(kind: str, blocks: int, *, page_size: int, running: int, budget: int, own: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A scheduler as the engine builds it, and what the engine gives each request to name its blocks."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        config = EngineArgs(
            model=directory, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=LONGEST, max_num_seqs=running,
            max_num_batched_tokens=budget, block_size=page_size, dtype="float32", async_scheduling=False,
            additional_config={"kvsched": own or {}},
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
    scheduler = KINDS[kind](
        vllm_config=config, kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config), block_size=page_size, hash_block_size=page_size, log_stats=True,
    )
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return scheduler, get_request_block_hasher(page_size, function)


def ask(key: str, prompt: Sequence[int], new: int, hasher: Any, arrival: float = 0.0) -> Request:
    """A request that runs to its limit."""
    params = SamplingParams(max_tokens=new, stop_token_ids=[2], temperature=0.0, detokenize=False)
    return Request(request_id=key, prompt_token_ids=list(prompt), sampling_params=params, pooling_params=None, arrival_time=arrival,
                   block_hasher=hasher)


@attrs.define
class Client:
    """What the simulated workers know of a request. known: its tokens. furthest: of them computed, ever."""

    known: int
    furthest: int = 0


def computed(output: Any) -> Iterator[tuple[str, int, int]]:
    """Id, first position and number of tokens of each row."""
    counts = output.num_scheduled_tokens
    for data in output.scheduled_new_reqs:
        yield data.req_id, data.num_computed_tokens, counts[data.req_id]
    cached = output.scheduled_cached_reqs
    for key, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield key, start, counts[key]


def step(running: Sequence[int], prompt: int, steps: int, page_size: int, rounds: int = 3) -> Iterator[dict[str, Any]]:
    """Microseconds of schedule() + update_from_output() per steady decode step: medians, both in turns within each round."""
    for count in running:
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        pairs = {}
        new = rounds * steps + 64
        for kind in KINDS:
            blocks = count * (pages_for(prompt + page_size + new, page_size) + 1) + 1
            scheduler, hasher = build(kind, blocks, page_size=page_size, running=count, budget=max(1 << 20, count))
            for at in range(count):
                length = prompt + at % page_size  # crossings into a new page spread evenly over the steps
                scheduler.add_request(ask(f"r{at}", [(at * 7919 + place) % 30_000 + 3 for place in range(length)], new, hasher))
            for _ in range(20):
                _timed(scheduler)
            pairs[kind] = scheduler
        for _ in range(rounds):
            for kind, scheduler in pairs.items():
                found[kind] += [_timed(scheduler) for _ in range(steps)]
        both = {kind: statistics.median(sum(pair) for pair in times) * 1e6 for kind, times in found.items()}
        for kind, times in found.items():
            yield {
                "scheduler": kind, "running": count, "total_us": round(both[kind], 1),
                "schedule_us": round(statistics.median(first for first, _ in times) * 1e6, 1),
                "update_us": round(statistics.median(second for _, second in times) * 1e6, 1),
                "share_of_vllm": round(both[kind] / both["vllm"], 3),
            }


def _timed(scheduler: Any) -> tuple[float, float]:
    """Seconds of the two calls of one step; what the workers do lies between them."""
    begin = time.perf_counter()
    output = scheduler.schedule()
    middle = time.perf_counter()
    ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(req_ids=ids, req_id_to_index={key: at for at, key in enumerate(ids)}, sampled_token_ids=[[SAMPLED] for _ in ids])
    again = time.perf_counter()
    answer = scheduler.update_from_output(output, result)
    end = time.perf_counter()
    if sum(len(outputs.outputs) for outputs in answer.values()) != len(ids):
        raise RuntimeError("a decode gave no output")
    return middle - begin, end - again


def replay(kind: str, arrivals: Sequence[Arrival], pool_tokens: int, *, page_size: int = 16, running: int = 256, budget: int = 8192,
           t_base: float = 0.008, t_tok: float = 2.5e-5, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """A trace through one scheduler on a simulated clock: a step of n tokens takes t_base + t_tok * n seconds.

    recomputed: tokens computed again that had been computed before. cpu: seconds inside the scheduler, intake included.
    """
    scheduler, hasher = build(kind, pool_tokens // page_size, page_size=page_size, running=running, budget=budget, own=own)
    hasher = hasher if kind == "vllm" else None
    clients: dict[str, Client] = {}
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    done: dict[str, float] = {}
    clock = cpu = 0.0
    steps = preempted = tokens = recomputed = refused = at = 0
    while len(done) < len(arrivals):
        while at < len(arrivals) and arrivals[at].time_s <= clock:
            arrival = arrivals[at]
            request = ask(arrival.id, arrival.prompt().tolist(), max(arrival.max_new, 1), hasher, arrival.time_s)
            clients[arrival.id] = Client(request.num_prompt_tokens)
            arrived[arrival.id] = arrival.time_s
            begin = time.perf_counter()
            scheduler.add_request(request)
            cpu += time.perf_counter() - begin
            at += 1
        if not scheduler.has_requests():
            clock = max(clock, arrivals[at].time_s)
            continue
        begin = time.perf_counter()
        output = scheduler.schedule()
        cpu += time.perf_counter() - begin
        clock += t_base + t_tok * output.total_num_scheduled_tokens
        preempted += len(output.preempted_req_ids or ())
        tokens += output.total_num_scheduled_tokens
        ids, sampled = [], []
        for key, start, count in computed(output):
            client = clients[key]
            recomputed += max(min(start + count, client.furthest) - start, 0)
            client.furthest = max(client.furthest, start + count)
            samples = start + count == client.known
            client.known += samples
            ids.append(key)
            sampled.append([SAMPLED] if samples else [])
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={key: place for place, key in enumerate(ids)}, sampled_token_ids=sampled)
        begin = time.perf_counter()
        answer = scheduler.update_from_output(output, result)
        cpu += time.perf_counter() - begin
        steps += 1
        for outputs in answer.values():
            for record in outputs.outputs:
                refused += not record.new_token_ids
                first.setdefault(record.request_id, clock)
                if record.finish_reason is not None:
                    done[record.request_id] = clock
        if not ids and not answer:
            raise RuntimeError(f"nothing could run: {scheduler.get_request_counts()}")
    waits = sorted(first[key] - arrived[key] for key in first)
    return {
        "scheduler": kind, "pool_tokens": pool_tokens, "requests": len(arrivals), "refused": refused, "steps": steps, "preempted": preempted,
        "recomputed_tokens": recomputed, "computed_tokens": tokens, "ttft_p50_s": round(waits[len(waits) // 2], 2),
        "ttft_p99_s": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 2), "makespan_s": round(clock, 2),
        "cpu_us_per_step": round(cpu / steps * 1e6, 1), **({"settings": own} if own else {}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: one JSON line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m kvsched.hosts.vllm.measure", description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_subparsers(dest="what", required=True)
    steady = what.add_parser("step", help="a steady decode step")
    steady.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024])
    steady.add_argument("--prompt", type=int, default=512)
    steady.add_argument("--steps", type=int, default=200)
    steady.add_argument("--page-size", type=int, default=16)
    trace = what.add_parser("replay", help="a trace on a simulated clock")
    trace.add_argument("--trace", required=True)
    trace.add_argument("--format", default="mooncake")
    trace.add_argument("--limit", type=int)
    trace.add_argument("--pool-tokens", type=int, nargs="+", default=[262_144])
    trace.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of kvsched; adds a row")
    given = parser.parse_args(arguments)
    if given.what == "step":
        for row in step(given.running, given.prompt, given.steps, given.page_size):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        return
    arrivals = [arrival for arrival in read_trace(given.trace, given.format, limit=given.limit).arrivals
                if arrival.prompt_length + arrival.max_new <= LONGEST]
    for pool in given.pool_tokens:
        rows: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in KINDS]
        rows += [("kvsched", dict([setting.split("=", 1)])) for setting in given.set]
        for kind, own in rows:
            sys.stdout.write(json.dumps(replay(kind, arrivals, pool, own=own)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
