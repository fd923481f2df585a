"""kvsched as the scheduler of transformers' continuous batching: equal tokens, early refusals, and what is refused by name."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

if "KVSCHED_HOSTS" not in os.environ:
    pytest.skip("run by make test-hosts, with the transformers that vLLM brings", allow_module_level=True)

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import requests as host_requests
from transformers.generation.continuous_batching import scheduler as host

from kvsched.errors import ConfigError, HostError
from kvsched.hosts.drift import differences
from kvsched.hosts.transformers import CONTRACT, FROM_HOST, KvschedScheduler, register

EOS = 2
VOCABULARY = 512


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny model whose text depends on every earlier token."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                         vocab_size=VOCABULARY, initializer_range=0.25, eos_token_id=EOS)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """transformers' table of schedulers as it was."""
    before = dict(host.SCHEDULER_MAPPING)
    yield
    host.SCHEDULER_MAPPING.clear()
    host.SCHEDULER_MAPPING.update(before)


def batching(kind: str, blocks: int, **more: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(scheduler_type=kind, num_blocks=blocks, **{
        "page_size": 16, "max_batch_tokens": 64, "max_requests_per_batch": 16, "use_async_batching": False, **more})


def greedy(new: int, **more: Any) -> Any:
    make: Any = GenerationConfig
    return make(**{"max_new_tokens": new, "do_sample": False, "eos_token_id": EOS, **more})


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    draw = random.Random(seed)
    heads = [[draw.randrange(3, VOCABULARY) for _ in range(100)] for _ in range(3)]
    found = []
    for _ in range(count):
        length = draw.randint(1, longest)
        shared = draw.choice(heads)[: draw.randint(0, min(100, length - 1))] if draw.random() < 0.6 else []
        found.append(shared + [draw.randrange(3, VOCABULARY) for _ in range(length - len(shared))])
    return found


def generate(llama: Any, asked: list[list[int]], config: ContinuousBatchingConfig, generation: Any) -> tuple[dict[str, Any], Any]:
    """Outputs by id, and the scheduler that made them."""
    with llama.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config) as manager:
        ids = manager.add_requests(asked, max_new_tokens=generation.max_new_tokens)
        wanted = len(ids) * manager.num_return_sequences
        found: dict[str, Any] = {}
        begin = time.monotonic()
        while len(found) < wanted:
            assert time.monotonic() - begin < 240
            output = manager.get_result(timeout=1)
            if output is None:
                assert manager.background_thread_status.fatal_error is None, manager.background_thread_status.fatal_error
            elif output.is_finished():
                found[output.request_id] = output
        scheduler = manager.batch_processor.scheduler
    return found, scheduler


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("blocks", [400, 18])
def test_the_same_tokens_as_its_own_scheduler(llama: Any, blocks: int, sharing: bool) -> None:
    register()
    asked = prompts(1, 60, 150)
    texts = {}
    for kind in ("fifo", "kvsched"):
        outputs, scheduler = generate(llama, asked, batching(kind, blocks, allow_block_sharing=sharing), greedy(40))
        assert [output.error for output in outputs.values() if output.error] == []
        texts[kind] = {key: output.generated_tokens for key, output in outputs.items()}
    assert texts["kvsched"] == texts["fifo"]
    totals = scheduler.core.totals
    assert totals["finished"] == 60
    assert (totals["cached_tokens"] > 0) == sharing or blocks == 18
    assert (totals["retractions"] > 0) == (blocks == 18)
    scheduler.core.check()
    assert not scheduler.states
    assert not scheduler.active_requests
    assert not scheduler.waiting_requests
    assert not scheduler.allocator.block_table


def test_a_request_that_outgrows_the_pool_is_refused_before_it_starts(llama: Any) -> None:
    """transformers' own scheduler computes what fits and then fails."""
    register()
    asked = [prompts(2, 1, 40)[0] * 2]
    late, _ = generate(llama, asked, batching("fifo", 6), greedy(300, eos_token_id=-1))
    failed = late["req_0"]
    assert failed.error is not None
    assert len(failed.generated_tokens) > 10
    early, _ = generate(llama, asked, batching("kvsched", 6), greedy(300, eos_token_id=-1))
    pages = -(-(len(asked[0]) + 299) // 16)
    assert early["req_0"].error == f"kvsched refused the request: never_fits, it needs {pages} pages and there can be 6"
    assert early["req_0"].generated_tokens == []


def test_a_refused_request_stands_in_nobodys_way(llama: Any) -> None:
    register()
    asked = [[5] * 200, [6] * 30]
    outputs, _ = generate(llama, asked, batching("kvsched", 8), greedy(5))
    assert "never_fits" in outputs["req_0"].error
    assert len(outputs["req_1"].generated_tokens) in range(1, 6)


@pytest.mark.parametrize("sharing", [True, False])
def test_several_samples_of_one_prompt(llama: Any, sharing: bool) -> None:
    register()
    asked = prompts(3, 4, 90)
    outputs, scheduler = generate(llama, asked, batching("kvsched", 200, allow_block_sharing=sharing), greedy(10, num_return_sequences=3, do_sample=True, top_k=1))
    assert len(outputs) == 12
    for at in range(4):
        texts = {tuple(output.generated_tokens) for key, output in outputs.items() if key.split("__")[0] == f"req_{at}"}
        assert len(texts) == 1, "samples among one token are equal"
    assert scheduler.core.totals["cached_tokens"] > 0 or not sharing


def test_reads_beyond_the_hosts_budget_go_into_several_batches(llama: Any) -> None:
    """Shared pages count for each who reads them, and the host has room for as many reads as it has slots."""
    register(hold_shared_prefill=True)
    head = prompts(4, 1, 90)[0] * 3
    head = (head * 10)[:96]
    asked = [[*head, at + 10] for at in range(12)]
    expected, _ = generate(llama, asked, batching("fifo", 400), greedy(6))
    outputs, scheduler = generate(llama, asked, batching("kvsched", 22), greedy(6))
    assert scheduler.cache.max_tokens_read < 12 * 96
    assert {key: output.generated_tokens for key, output in outputs.items()} == {key: output.generated_tokens for key, output in expected.items()}


def test_a_cancelled_request_leaves_nothing_behind(llama: Any) -> None:
    register()
    with llama.continuous_batching_context_manager(generation_config=greedy(400, eos_token_id=-1),
                                                   continuous_batching_config=batching("kvsched", 200)) as manager:
        manager.add_request([5, 6, 7], request_id="gone", max_new_tokens=400, streaming=True)
        manager.add_request([5, 6, 8], request_id="kept", max_new_tokens=30)
        assert manager.get_result("gone", timeout=60) is not None
        manager.cancel_request("gone")
        begin = time.monotonic()
        while (kept := manager.get_result("kept", timeout=1)) is None or not kept.is_finished():
            assert time.monotonic() - begin < 120
        manager.add_request([5, 6, 9], request_id="last", max_new_tokens=2)  # its batch comes after the cancellation
        while (last := manager.get_result("last", timeout=1)) is None or not last.is_finished():
            assert time.monotonic() - begin < 120
        scheduler = manager.batch_processor.scheduler
        assert "gone" not in scheduler.states
        assert len(kept.generated_tokens) == 30
    assert scheduler.core.totals["aborted"] == 1
    scheduler.core.check()


def test_a_request_that_is_cancelled_between_two_batches_of_one_plan(llama: Any) -> None:
    """Driven as the host's loop drives it, with the model's answers made up."""
    register()
    processor = made(llama, batching("kvsched", 50))
    scheduler = processor.scheduler
    for at in range(3):
        scheduler.add_waiting_request(host_requests.RequestState(f"r{at}", [5 + at] * 20, max_new_tokens=4))
    computed = []
    cancelled = False
    while scheduler.has_pending_requests():
        batch, _, tokens, _ = scheduler.schedule_batch(64, 30)  # room to read one request's 20 tokens
        assert tokens == sum(entry.query_length for entry in batch)
        computed.append([entry.state.request_id for entry in batch])
        if not cancelled and computed[-1] == ["r0"]:
            scheduler.set_request_cancellation("r1")
            assert [state.request_id for state in scheduler.clear_cancelled_requests()] == ["r1"]
            cancelled = True
        for entry in batch:
            entry.state.position_offset += entry.query_length
            if entry.has_new_token and entry.state.update_and_check_completion(9, None):
                scheduler.finish_request(entry.state.request_id)
    assert computed[:3] == [["r0", "r1", "r2"], ["r0"], ["r2"]]
    assert scheduler.core.totals == {**scheduler.core.totals, "finished": 2, "aborted": 1}
    scheduler.core.check()


def test_a_manager_that_is_kept_starts_anew(llama: Any) -> None:
    register()
    asked = prompts(5, 6, 60)
    texts = []
    for _ in range(2):
        outputs = llama.generate_batch(asked, generation_config=greedy(8), continuous_batching_config=batching("kvsched", 100), progress_bar=False,
                                       persistent_manager=True)
        texts.append([output.generated_tokens for output in outputs.values()])
    llama.destroy_cached_continuous_batching_manager()
    assert texts[0] == texts[1]


# -- what is refused --------------------------------------------------------------------------------------------------


def made(llama: Any, config: ContinuousBatchingConfig) -> Any:
    """A scheduler built as the manager builds it, without a running loop."""
    manager = llama.init_continuous_batching(generation_config=greedy(4), continuous_batching_config=config)
    return manager._create_batch_processor()


def test_asynchronous_batching_is_refused_by_name(llama: Any) -> None:
    register()
    processor = made(llama, batching("kvsched", 50))
    state = host_requests.RequestState("r", [5, 6, 7], max_new_tokens=4)
    processor.scheduler.add_waiting_request(state)
    batch, *shape = processor.scheduler.schedule_batch(64, 800)
    processor.inputs_and_outputs.prepare_batch_tensors(batch, processor.logit_processor, *shape, use_padding=False)
    with pytest.raises(HostError, match=r"asynchronous batching \(use_async_batching\)"):
        processor.scheduler.schedule_batch(64, 800)


def test_a_safety_margin_is_refused_by_name(llama: Any) -> None:
    register()
    with pytest.raises(ConfigError, match="a safety_margin; its admission setting takes that place"):
        made(llama, batching("kvsched", 50, safety_margin=0.2))


def test_sliding_windows_are_refused_by_name(llama: Any) -> None:
    register()
    cache = made(llama, batching("kvsched", 50)).cache
    cache.cache_allocators = {"full_attention": None, "sliding_attention": None}
    with pytest.raises(ConfigError, match="attention of the kinds full_attention, sliding_attention"):
        KvschedScheduler(cache, None, 4)


@pytest.mark.parametrize("key", sorted(FROM_HOST))
def test_what_the_host_sets_is_not_set_twice(key: str) -> None:
    settings: dict[str, Any] = {key: 1}
    with pytest.raises(ConfigError, match=f"{key} cannot be set for kvsched inside transformers"):
        register("other", **settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"heads": "skip"}, "heads: no setting of kvsched"), ({"head": "other"}, "head must be one of"), ({"order": "fair"}, "carry no tenant"),
    ({"eviction": "random"}, "eviction"),
])
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register("other", **settings)
    assert "other" not in host.SCHEDULER_MAPPING


def test_settings_reach_the_scheduler(llama: Any) -> None:
    kind = register("mine", eviction="slru", admission="guaranteed")
    scheduler = made(llama, batching("mine", 50)).scheduler
    assert type(scheduler) is kind
    now = scheduler.core.config
    assert (now.page_size, now.max_running, now.max_step_tokens, now.admission) == (16, 16, 64, "guaranteed")
    assert scheduler.core.ceiling == 50
    assert scheduler.eviction == "slru"


# -- drift ------------------------------------------------------------------------------------------------------------


def test_transformers_is_what_the_adapter_was_written_for() -> None:
    found = differences(CONTRACT)
    assert not found, "\n" + "\n".join(found)


def test_planted_changes_are_all_named_and_stop_the_start(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(llama, batching("fifo", 50)).cache

    def schedule_batch(self, budget): ...  # type: ignore[no-untyped-def]  # a foreign signature

    monkeypatch.setattr(host.Scheduler, "schedule_batch", schedule_batch)
    monkeypatch.delattr(host.Scheduler, "clear_cancelled_requests")
    monkeypatch.delattr(host_requests, "FutureRequestState")
    with pytest.raises(ConfigError) as caught:
        KvschedScheduler(cache, None, 4)
    text = str(caught.value)
    assert "Scheduler.schedule_batch: takes (self, budget) and not (self, token_budget, cache_budget)" in text
    assert "scheduler.Scheduler: has no clear_cancelled_requests" in text
    assert "requests.FutureRequestState: is gone" in text
