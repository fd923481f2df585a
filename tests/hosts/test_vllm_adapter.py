"""What vLLM asks of its scheduler beside steps: refusals, stops, priorities, sharing, pauses, resets, statistics, events."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make test-hosts")

from rig import EOS, Session, Workers, configure, drive, hasher, make_request, ours, theirs, work, workload
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import Request, RequestStatus

from kvsched.errors import InvalidResult, OutOfOrder


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


def run(scheduler: Any, requests: list[Any], *, depth: int = 1, **more: Any) -> Session:
    return drive(scheduler, [(0, request) for request in requests], Workers(scheduler.core.config.page_size if hasattr(scheduler, "core") else 16),
                 depth=depth, **more)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", ["length", "error"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_cannot_fit_ends_at_once_with_the_numbers(model: Path, depth: int, refusals: str) -> None:
    config = configure(model, blocks=21, asynchronous=depth == 2, additional_config={"kvsched": {"refusals": refusals}})
    requests = [make_request("long", prompt(0, 400), max_tokens=8), make_request("short", prompt(1, 30), max_tokens=8, eos=None)]
    session = run(ours(config), requests, depth=depth)
    long, short = session.texts["long"], session.texts["short"]
    assert (long.tokens, long.finish) == ([], refusals)
    assert long.stop == "kvsched refused the request: never_fits, it needs 26 pages and there can be 20"
    assert len(short.tokens) == 8


def test_vllms_own_scheduler_waits_for_that_prompt_for_ever(model: Path) -> None:
    scheduler = theirs(configure(model, blocks=21))
    requests = [make_request("long", prompt(0, 400), max_tokens=8), make_request("short", prompt(1, 30), max_tokens=8)]
    with pytest.raises(AssertionError, match=r"no end after 500 turns: \(0, 2\)"):
        run(scheduler, requests, limit=500)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(model: Path) -> None:
    session = run(ours(configure(model, blocks=200, longest=128)), [make_request("long", prompt(0, 128), max_tokens=8)])
    assert session.texts["long"].stop == "kvsched refused the request: context_limit, it needs 136 tokens and there can be 128"


def unsupported() -> dict[str, Any]:
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    params.update_from_generation_config({}, EOS)
    plain: dict[str, Any] = {"prompt_token_ids": prompt(0, 20), "pooling_params": None}
    return {
        "structured output": Request("x", sampling_params=params, **plain),
        "streaming input": make_request("x", prompt(0, 20), request={"resumable": True}),
        "pooling requests": Request("x", prompt_token_ids=prompt(0, 20), sampling_params=None, pooling_params=PoolingParams(task="embed")),
        "multimodal inputs": make_request("x", prompt(0, 20), request={"mm_features": [object()]}),
        "prompt embeddings": make_request("x", prompt(0, 20), request={"prompt_is_token_ids": [True] * 20}),
    }


@pytest.mark.parametrize("feature", ["structured output", "streaming input", "pooling requests", "multimodal inputs", "prompt embeddings"])
def test_a_request_for_what_is_not_done_ends_as_an_error_by_name(model: Path, feature: str) -> None:
    scheduler = ours(configure(model, blocks=100))
    session = run(scheduler, [unsupported()[feature], make_request("other", prompt(2, 20), max_tokens=3, eos=None)])
    assert session.texts["x"].finish == "error"
    assert session.texts["x"].stop.startswith(f"kvsched does not do this inside vLLM: {feature}")
    assert len(session.texts["other"].tokens) == 3
    assert not scheduler.requests


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_ends_where_vllm_ends_it(model: Path, depth: int) -> None:
    """End of sequence, stop tokens, ignored ends, the limit of the request and of the model, repetition."""
    config = configure(model, blocks=400, longest=200, asynchronous=depth == 2)
    text = run(theirs(config), [make_request("long", prompt(0, 50), config, max_tokens=140, ignore_eos=True)], depth=depth).texts["long"].tokens
    stop = text[9]
    sampled: list[dict[str, Any]] = [
        {"eos": stop}, {"eos": stop, "ignore_eos": True}, {"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "ignore_eos": True},
        {"stop_token_ids": [stop], "eos": stop}, {"eos": stop, "max_tokens": 10}, {"max_tokens": 9, "eos": stop}, {"max_tokens": 1},
        {"max_tokens": 1000, "eos": None}, {"eos": stop, "min_tokens": 30, "max_tokens": 60}, {"max_tokens": 150, "eos": None},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2), "max_tokens": 140, "eos": None},
    ]
    found = []
    for kind in (theirs, ours):
        requests = [make_request(f"r{at}", prompt(0, 50), config, **{"max_tokens": 140, **one}) for at, one in enumerate(sampled)]
        found.append(run(kind(config), requests, depth=depth).texts)
    assert found[0] == found[1]
    assert {text.finish for text in found[1].values()} >= {"stop", "length"}
    assert len(found[1]["r8"].tokens) == 150


@pytest.mark.parametrize("depth", [1, 2])
def test_repetition_is_detected_as_vllm_does(model: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rig.stamped", lambda stamp, token: (stamp + 1) % 3 + 7)  # a model that goes round in circles
    config = configure(model, blocks=400, asynchronous=depth == 2)
    detection = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
    texts = [
        run(kind(config), [make_request("r", prompt(0, 300), config, max_tokens=60, eos=None, repetition_detection=detection, min_tokens=least)], depth=depth).texts["r"]
        for least in (0, 20) for kind in (theirs, ours)
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert (texts[1].finish, texts[1].stop) == ("repetition", "repetition_detected")
    assert len(texts[1].tokens) < len(texts[3].tokens) < 60


def test_a_finished_requests_pages_are_reused(model: Path) -> None:
    """Text that was generated counts for the next turn of a conversation; an aborted request leaves its pages too."""
    scheduler, workers = ours(configure(model, blocks=100), stats=True), Workers(16)
    first = drive(scheduler, [(0, make_request("one", prompt(0, 40), max_tokens=60, eos=None))], workers).texts["one"].tokens
    again = make_request("two", prompt(0, 40) + first + prompt(9, 30), max_tokens=2)
    stats = drive(scheduler, [(0, again)], workers).records[0].prefill_stats
    assert stats.num_cached_tokens == 96  # 40 + 60 - 1 slots were written, six whole pages
    assert (stats.num_computed_tokens, stats.num_cache_creation_tokens) == (34, 32)
    drive(scheduler, [(0, make_request("three", prompt(3, 40), max_tokens=60, eos=None))], workers, aborts={40: ["three"]})
    assert scheduler.core.occupancy["private"] == 0
    third = drive(scheduler, [(0, make_request("four", prompt(3, 40) + workers.sampled["three"][:30], max_tokens=2))], workers)
    assert third.records[0].prefill_stats.num_cached_tokens == 64


# -- order and sharing ------------------------------------------------------------------------------------------------


def test_priorities_order_the_queue_and_spare_the_best(model: Path) -> None:
    config = configure(model, blocks=100, seqs=1, scheduling_policy="priority")
    requests = [make_request(f"p{priority}", prompt(priority, 20), max_tokens=2, arrival=float(at), request={"priority": priority})
                for at, priority in enumerate((5, 1, 3))]
    order = list(dict.fromkeys(record.request_id for record in run(ours(config), requests).records))
    assert order == ["p1", "p3", "p5"]
    config = configure(model, blocks=22, seqs=8, scheduling_policy="priority")
    requests = [make_request(f"p{at}", prompt(at, 60), max_tokens=100, ignore_eos=False, eos=None, stop_token_ids=[511], arrival=float(at),
                             request={"priority": at % 2}) for at in range(6)]
    scheduler = ours(config, stats=True)
    run(scheduler, requests)
    assert scheduler.core.totals["retractions"] > 0
    assert max(request.num_preemptions for request in requests if request.priority) >= max(
        request.num_preemptions for request in requests if not request.priority)


def lora(number: int, name: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"adapters/{name}")


def test_salts_and_adapters_share_only_with_their_own(model: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": lora(1, "x")}, {"lora_request": lora(2, "y")},
        {"lora_request": lora(1, "x"), "cache_salt": "a"},
    ]
    hits = {}
    for kind in (theirs, ours):
        config = configure(model, blocks=400, seqs=1, enable_lora=False)
        scheduler = kind(config)
        named = hasher(config)
        requests = [make_request(f"{at}.{turn}", prompt(0, 100), block_hasher=named, max_tokens=2, request=one)
                    for turn in range(2) for at, one in enumerate(kinds)]
        session = run(scheduler, requests)
        hits[kind] = {record.request_id: record.prefill_stats.num_cached_tokens for record in session.records if record.prefill_stats}
    assert hits[ours] == hits[theirs]
    assert [hits[ours][f"{at}.0"] for at in range(6)] == [0] * 6
    assert [hits[ours][f"{at}.1"] for at in range(6)] == [96] * 6


def test_the_limit_of_adapters_in_one_batch(model: Path) -> None:
    config = configure(model, blocks=400)
    config.lora_config = type("Lora", (), {"max_loras": 2})()
    scheduler = ours(config)
    assert scheduler.core.config.max_adapters == 2
    requests = [make_request(f"r{at}", prompt(at, 20), max_tokens=4, eos=None, request={"lora_request": lora(at + 1, f"n{at}")}) for at in range(4)]
    most = 0
    numbers = {request.request_id: request.lora_request.lora_int_id for request in requests}

    def look(turn: int, it: Any) -> None:
        nonlocal most
        most = max(most, len({numbers[key] for key in it.running}))

    assert {len(text.tokens) for text in run(scheduler, requests, each=look).texts.values()} == {4}
    assert most == 2


def test_a_request_that_must_not_read_the_cache(model: Path) -> None:
    scheduler = ours(configure(model, blocks=100, seqs=1))
    requests = [make_request("one", prompt(0, 60), max_tokens=2), make_request("two", prompt(0, 60), max_tokens=2, prompt_logprobs=1)]
    assert requests[1].skip_reading_prefix_cache
    cached = [record.prefill_stats.num_cached_tokens for record in run(scheduler, requests).records if record.prefill_stats]
    assert cached == [0, 0]


def test_outputs_go_to_the_client_that_asked(model: Path) -> None:
    scheduler = ours(configure(model, blocks=100), finished_sets=True)
    workers = Workers(16)
    for at in range(6):
        scheduler.add_request(make_request(f"r{at}", prompt(at, 20), max_tokens=1 + at, eos=None, client=at % 3))
    scheduler.add_request(make_request("big", prompt(0, 1024), client=2))
    ended: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    while scheduler.has_requests():
        output = scheduler.schedule()
        for client, outputs in scheduler.update_from_output(output, work(workers, output)).items():
            assert {int(record.request_id[1:]) % 3 for record in outputs.outputs if record.request_id != "big"} <= {client}
            ended[client] |= outputs.finished_requests or set()
    assert ended == {0: {"r0", "r3"}, 1: {"r1", "r4"}, 2: {"r2", "r5", "big"}}


# -- control ----------------------------------------------------------------------------------------------------------


def step(scheduler: Any, workers: Workers) -> tuple[Any, dict[int, Any]]:
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, work(workers, output))


def test_pause_states(model: Path) -> None:
    scheduler, workers = ours(configure(model, blocks=100)), Workers(16)
    scheduler.add_request(make_request("a", prompt(0, 20), max_tokens=20, eos=None))
    step(scheduler, workers)
    scheduler.add_request(make_request("b", prompt(1, 20), max_tokens=20, eos=None))
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.pause_state == PauseState.PAUSED_NEW
    assert scheduler.get_num_unfinished_requests() == 1
    assert list(step(scheduler, workers)[0].num_scheduled_tokens) == ["a"]
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.has_requests()
    assert step(scheduler, workers)[0].num_scheduled_tokens == {}
    assert scheduler.get_request_counts() == (1, 1)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.get_num_unfinished_requests() == 2
    assert set(step(scheduler, workers)[0].num_scheduled_tokens) == {"a", "b"}


def test_prefills_are_put_off_while_somebody_decodes(model: Path) -> None:
    scheduler, workers = ours(configure(model, blocks=100, budget=64)), Workers(16)
    scheduler.add_request(make_request("a", prompt(0, 20), max_tokens=3, eos=None))
    output = scheduler.schedule(throttle_prefills=True)
    assert output.num_scheduled_tokens == {"a": 20}, "nobody decodes, so nothing is put off"
    scheduler.update_from_output(output, work(workers, output))
    scheduler.add_request(make_request("b", prompt(1, 100), max_tokens=3, eos=None))
    step(scheduler, workers)
    output = scheduler.schedule(throttle_prefills=True)
    assert output.num_scheduled_tokens == {"a": 1}, "b is between two chunks"
    scheduler.update_from_output(output, work(workers, output))
    assert step(scheduler, workers)[0].num_scheduled_tokens == {"b": 37}


@pytest.mark.parametrize("depth", [1, 2])
def test_resetting_the_prefix_cache(model: Path, depth: int) -> None:
    """Refused while requests hold pages; with leave to preempt them it works at any moment, and texts stay the same."""
    config = configure(model, blocks=100, asynchronous=depth == 2)
    lengths = {"a": 40, "b": 70}

    def requests() -> list[Any]:
        return [make_request(key, prompt(length, length), max_tokens=30, eos=None) for key, length in lengths.items()]

    plain = run(ours(config), requests(), depth=depth)
    scheduler = ours(config, stats=True)
    answers: list[bool] = []

    def look(turn: int, it: Any) -> None:
        if turn == 10:
            answers.append(it.reset_prefix_cache())
        if turn == 15:
            answers.append(it.reset_prefix_cache(reset_running_requests=True))

    session = run(scheduler, requests(), depth=depth, each=look)
    assert answers == [False, True]
    assert session.texts == plain.texts
    assert scheduler.core.totals["retractions"] == 2
    assert scheduler.core.totals["cached_tokens"] == 0, "nothing of before is read again"
    assert any(stats.prefix_cache_stats.reset for stats in session.stats)
    resumed = [record for record in session.records if record.events and EngineCoreEventType.PREEMPTED in [event.type for event in record.events]]
    assert len(resumed) == 2
    assert scheduler.reset_prefix_cache()
    assert scheduler.core.occupancy["free"] == 99


def test_an_update_for_another_output_changes_nothing(model: Path) -> None:
    scheduler, workers = ours(configure(model, blocks=100)), Workers(16)
    scheduler.add_request(make_request("a", prompt(0, 20), max_tokens=3, eos=None))
    output = scheduler.schedule()
    result = work(workers, output)
    with pytest.raises(OutOfOrder, match="oldest output of schedule"):
        scheduler.update_from_output(theirs(configure(model, blocks=100)).schedule(), result)
    result.sampled_token_ids = [[]]
    with pytest.raises(InvalidResult, match="the model runner gave no token"):
        scheduler.update_from_output(output, result)


def test_finish_requests_answers_with_those_it_ended(model: Path) -> None:
    scheduler, workers = ours(configure(model, blocks=100)), Workers(16)
    requests = [make_request(key, prompt(at, 20), max_tokens=9) for at, key in enumerate("abcd")]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler, workers)
    assert scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == [requests[0]]
    assert scheduler.finish_requests(["a", "b", "b", "x"], RequestStatus.FINISHED_STOPPED) == [requests[1]]
    assert requests[1].status == RequestStatus.FINISHED_STOPPED
    assert scheduler.schedule().finished_req_ids == {"a", "b"}
    assert scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == requests[2:]
    assert scheduler.has_finished_requests()


# -- statistics and events --------------------------------------------------------------------------------------------


def test_statistics_are_those_of_vllm(model: Path) -> None:
    """With room for everybody the two do the same in each step, so each step's statistics agree."""
    config = configure(model, blocks=2000, seqs=8, budget=64)
    sessions = []
    for kind in (theirs, ours):
        named = hasher(config)
        requests = [make_request(f"r{at}", tokens, block_hasher=named, arrival=float(at), **{**sampling, "ignore_eos": True})
                    for at, (tokens, sampling) in enumerate(workload(3, 40, longest=150, most_new=20, head=60))]
        sessions.append(run(kind(config, stats=True), requests))
    theirs_, mine = ([(s.num_running_reqs, s.num_waiting_reqs, s.prefix_cache_stats.requests, s.prefix_cache_stats.queries) for s in session.stats]
                     for session in sessions)
    assert mine == theirs_
    cached = [[record.prefill_stats.num_cached_tokens for record in session.records if record.prefill_stats] for session in sessions]
    assert sum(cached[1]) > 0
    usage = [stats.kv_cache_usage for stats in sessions[1].stats]
    assert 0 < max(usage) < 1
    assert usage[-1] == 0
    assert max(abs(a.kv_cache_usage - b.kv_cache_usage) for a, b in zip(*(session.stats for session in sessions), strict=True)) < 0.02


def test_no_statistics_where_they_are_off(model: Path) -> None:
    scheduler = ours(configure(model, blocks=100))
    assert run(scheduler, [make_request("a", prompt(0, 20))]).stats == []
    assert scheduler.make_stats() is None


def replayed(events: list[Any]) -> set[Any]:
    """The blocks that are cached, as who hears the events knows it."""
    known: set[Any] = set()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in known
            assert not known & set(event.block_hashes)
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            known |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert set(event.block_hashes) <= known
            known -= set(event.block_hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            known.clear()
    return known


@pytest.mark.parametrize("blocks", [2000, 40])
def test_cache_events_name_the_blocks_as_vllm_does(model: Path, blocks: int) -> None:
    told: dict[Any, list[Any]] = {}
    for kind in (theirs, ours):
        config = configure(model, blocks=blocks, seqs=8, budget=64)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        scheduler = kind(config)
        heard: list[Any] = []
        publisher = scheduler.publisher if kind is ours else scheduler.kv_event_publisher
        publisher.publish = lambda batch, heard=heard: heard.extend(batch.events)
        named = hasher(config)
        extras: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"lora_request": lora(1, "x")}]
        requests = [make_request(f"r{at}", tokens, block_hasher=named, request=extras[at % 3], **{**sampling, "ignore_eos": True, "stop_token_ids": None})
                    for at, (tokens, sampling) in enumerate(workload(3, 60, longest=150, most_new=20, head=60))]
        run(scheduler, requests)
        told[kind] = heard
    cached = replayed(told[ours])
    assert len(cached) == scheduler.core.occupancy["cached"] if blocks == 40 else len(cached) > 100
    if blocks == 2000:
        stored = [{(hash_, tuple(event.extra_keys or ()), event.lora_name, event.lora_id) for event in told[kind] if isinstance(event, BlockStored)
                   for hash_ in event.block_hashes[:1] if event.parent_block_hash is None} for kind in (theirs, ours)]
        assert {hash_ for hash_, *_ in stored[1]} == {hash_ for hash_, *_ in stored[0]}
        everything = [{hash_ for event in told[kind] if isinstance(event, BlockStored) for hash_ in event.block_hashes} for kind in (theirs, ours)]
        assert everything[1] == everything[0]
    assert scheduler.reset_prefix_cache()
    run(scheduler, [make_request("last", prompt(0, 5), max_tokens=1)])
    assert isinstance(told[ours][-1], AllBlocksCleared) or replayed(told[ours]) == set()


def test_blocks_computed_twice_side_by_side_are_named_once(model: Path) -> None:
    """Two prompts that begin alike, in one step: the second keeps its copies until its end, and then only the rest is new."""
    config = configure(model, blocks=100, budget=512)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    scheduler = ours(config)
    heard: list[Any] = []
    scheduler.publisher.publish = lambda batch: heard.extend(batch.events)
    requests = [make_request(f"r{at}", prompt(0, 64) + prompt(at + 1, 36), config, max_tokens=2, eos=None) for at in range(2)]
    run(scheduler, requests)
    expected = [[maybe_convert_block_hash(hash_) for hash_ in request.block_hashes] for request in requests]
    assert replayed(heard) == {hash_ for hashes in expected for hash_ in hashes}
    assert [len(event.block_hashes) for event in heard] == [6, 2]
    assert heard[1].parent_block_hash == expected[0][3]
