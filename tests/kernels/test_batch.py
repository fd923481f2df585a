"""Batches against a plain reading of the plan, through whole lives of a scheduler; the reference attention against a dense one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
from kvsched.plan import Plan
from kvsched_kernels import Batch, BatchBuilder, KernelError, PagedStore, ReferenceAttention
from kvsched_kernels.reference import attend


def plainly(plan: Plan, table: Any, newest: dict[int, int], page: int) -> dict[str, list[int]]:
    """What the tensors must be: the plan read row by row."""
    out: dict[str, list[int]] = {key: [] for key in ("token_ids", "positions", "slots", "kv_indices", "batch_indices", "kv_len", "last_page_len", "last")}
    out |= {"qo_indptr": [0], "kv_indptr": [0]}
    for i in range(len(plan)):
        row, start, count = int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i])
        chunk = plan.prefill[i - plan.decodes] if i >= plan.decodes else None
        out["token_ids"] += [newest[row]] if chunk is None else chunk.tokens.tolist()
        for position in range(start, start + count):
            out["positions"].append(position)
            out["slots"].append(int(table[row, position // page]) * page + position % page)
            out["batch_indices"].append(i)
        columns = math.ceil((start + count) / page)
        out["kv_indices"] += table[row, :columns].tolist()
        out["kv_len"].append(start + count)
        out["last_page_len"].append(start + count - (columns - 1) * page)
        out["qo_indptr"].append(out["qo_indptr"][-1] + count)
        out["kv_indptr"].append(out["kv_indptr"][-1] + columns)
        if chunk is None or chunk.last:
            out["last"].append(out["qo_indptr"][-1] - 1)
    return out


def compare(batch: Batch, want: dict[str, list[int]]) -> None:
    for key, value in want.items():
        assert getattr(batch, key).tolist() == value, key
        if hasattr(batch, f"{key}_host"):
            assert getattr(batch, f"{key}_host").tolist() == value, key
    assert (batch.max_q, batch.max_kv) == (int(max(np.diff(want["qo_indptr"]))), max(want["kv_len"]))
    assert batch.tokens == want["qo_indptr"][-1]


@settings(max_examples=30, deadline=None)
@given(page=st.sampled_from([1, 3, 16]), chunk=st.sampled_from([2, 7, 64]), depth=st.sampled_from([1, 2]), seed=st.integers(0, 2**16),
       caching=st.booleans())
def test_a_batch_says_what_the_plan_says(page: int, chunk: int, depth: int, seed: int, caching: bool) -> None:
    rng = np.random.default_rng(seed)
    config = SchedulerConfig(page_size=page, max_running=5, chunk_tokens=chunk, max_step_tokens=40, max_in_flight=depth, conservativeness=0.0)
    scheduler = Scheduler(config, PagePool(-(-90 // page), page), RadixCache(page) if caching else None)
    for i in range(12):
        assert scheduler.submit(Request(f"r{i}", rng.integers(0, 3, rng.integers(1, 40)), max_new_tokens=int(rng.integers(0, 30))))
    builder, flying = BatchBuilder(page_size=page), []
    newest: dict[int, int] = {}
    while scheduler.has_work():
        plan = pickle.loads(pickle.dumps(scheduler.schedule()))  # the builder lives on what can be sent
        builder.apply(plan)
        tokens = rng.integers(0, 3, max(len(plan), 1))
        if len(plan):
            want = plainly(plan, scheduler.block_table, newest, page)
            batch = builder.build(plan)
            compare(batch, want)
            builder.note(batch, torch.from_numpy(tokens[batch.sampling]))
            newest |= {int(plan.rows[i]): int(tokens[i]) for i in batch.sampling}
        flying.append((scheduler.in_flight[-1], StepResult(tokens=tokens[: len(plan)])))
        while flying and (len(flying) == depth or not len(plan)):
            scheduler.commit(*flying.pop(0))
    scheduler.check()


def test_drafts_follow_the_last_token() -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=4, lookahead_tokens=2), PagePool(64, 4))
    for name, new in (("a", 9), ("b", 2)):
        scheduler.submit(Request(name, [1, 2, 3], max_new_tokens=new))
    builder = BatchBuilder(page_size=4)
    plan = scheduler.schedule()
    builder.note(builder.build(plan), torch.tensor([7, 8]))
    scheduler.commit(plan, StepResult(tokens=[[7, 0, 0], [8, 0, 0]]))
    plan = scheduler.schedule()
    assert plan.counts.tolist() == [3, 1]  # b may write no more: its drafts would lie beyond its limit
    with pytest.raises(KernelError, match=r"drafts must be integers \[2, at least 2\]"):
        builder.build(plan)
    with pytest.raises(KernelError, match="an array of shape"):
        builder.build(plan, np.zeros((2, 1), np.int64))
    batch = builder.build(plan, np.array([[20, 21], [30, 31]]))
    assert batch.token_ids.tolist() == [7, 20, 21, 8]
    assert batch.positions.tolist() == [3, 4, 5, 3]
    assert batch.decodes == 0


def test_a_plan_that_ran_and_is_rolled_back_leaves_no_token() -> None:
    scheduler, builder = Scheduler(SchedulerConfig(page_size=4, max_in_flight=2), PagePool(16, 4)), BatchBuilder(page_size=4)
    scheduler.submit(Request("r", [10], max_new_tokens=9))
    first = scheduler.schedule()
    builder.note(builder.build(first), torch.tensor([11]))
    scheduler.commit(first, StepResult([11]))
    one, two = scheduler.schedule(), scheduler.schedule()
    for plan, token in ((one, 12), (two, 13)):
        builder.note(builder.build(plan), torch.tensor([token]))
    with pytest.raises(KernelError, match="plan 2 is not the newest that was noted; that is plan 3"):
        builder.take_back(one)
    for plan in (two, one):
        scheduler.rollback(plan)
        builder.take_back(plan)
        builder.take_back(plan)
    again = builder.build(scheduler.schedule())
    assert again.token_ids.tolist() == [11]
    assert again.positions.tolist() == [1]


@pytest.mark.parametrize("depth", [1, 2])
def test_rejected_drafts_in_flight_move_the_next_step_back(depth: int) -> None:
    """The plan made while drafts are in flight assumes that all are taken; the batch knows better."""
    rng = np.random.default_rng(depth)
    config = SchedulerConfig(page_size=4, lookahead_tokens=2, max_in_flight=depth, max_running=3)
    scheduler, builder, flying = Scheduler(config, PagePool(40, 4)), BatchBuilder(page_size=4), []
    for i in range(6):
        scheduler.submit(Request(f"r{i}", [1] * (1 + i), max_new_tokens=25))
    text: dict[str, list[int]] = {f"r{i}": [1] * (1 + i) for i in range(6)}
    while scheduler.has_work():
        plan = scheduler.schedule()
        builder.apply(plan)
        tokens, accepted = np.zeros((len(plan), 3), np.int64), np.zeros(len(plan), np.int64)
        if plan:
            batch = builder.build(plan, np.full((plan.decodes, 2), 9) if plan.decodes else None)
            for i, key in enumerate(plan.ids):
                begin, end = batch.qo_indptr_host[i : i + 2]
                if i < plan.decodes and key in text:
                    assert int(batch.positions[begin]) == len(text[key]) - 1
                    assert int(batch.token_ids[begin]) == text[key][-1]
                    accepted[i] = rng.integers(0, end - begin)
                    tokens[i] = rng.integers(0, 99, 3)
                    text[key] += tokens[i, : 1 + accepted[i]].tolist()
                elif i >= plan.decodes and plan.prefill[i - plan.decodes].last:
                    tokens[i] = rng.integers(0, 99, 3)
                    text[key].append(int(tokens[i, 0]))
            builder.note(batch, torch.from_numpy(tokens[np.arange(len(plan)), accepted][batch.sampling]), accepted[batch.sampling])
        flying.append((plan, StepResult(tokens=tokens, accepted=accepted)))
        while flying and (len(flying) == depth or not plan):
            for end in scheduler.commit(*flying.pop(0)).ended:
                text.pop(end.id)
    scheduler.check()


def test_an_empty_plan_has_no_batch() -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=4), PagePool(64, 4))
    plan = scheduler.schedule()
    builder = BatchBuilder(page_size=4)
    builder.apply(plan)
    with pytest.raises(KernelError, match=r"plan 1 has no rows \(idle\)"):
        builder.build(plan)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "16", None])
def test_sizes_are_checked(size: Any) -> None:
    with pytest.raises(KernelError, match="page_size must be an integer of at least 1"):
        BatchBuilder(page_size=size)
    for key in ("layers", "pages", "page_size", "kv_heads", "head_dim"):
        sizes: dict[str, Any] = {"layers": 1, "pages": 1, "page_size": 1, "kv_heads": 1, "head_dim": 1, key: size}
        with pytest.raises(KernelError, match=f"{key} must be an integer of at least 1"):
            PagedStore(**sizes, dtype=torch.float32)


def test_a_store_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(KernelError, match=r"dtype must be one of torch\.float64.*not torch\.int8"):
        PagedStore(layers=1, pages=1, page_size=1, kv_heads=1, head_dim=1, dtype=torch.int8)
    store = PagedStore(layers=1, pages=1, page_size=1, kv_heads=2, head_dim=1, dtype=torch.float32)
    with pytest.raises(KernelError, match="heads must be a multiple of kv_heads = 2, not 3"):
        ReferenceAttention(store, heads=3)
    with pytest.raises(KernelError, match="begin"):
        ReferenceAttention(store, heads=2).run(0, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a whole sequence, head by head, the plain way: [tokens, heads, head_dim]."""
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        mine = head // (q.shape[1] // k.shape[1])
        for t in range(len(q)):
            weight = torch.softmax(k[: t + 1, mine] @ q[t, head] / math.sqrt(q.shape[2]), 0)
            out[t, head] = weight @ v[: t + 1, mine]
    return out


@settings(max_examples=15, deadline=None)
@given(page=st.sampled_from([1, 4, 16]), chunk=st.sampled_from([3, 9, 64]), groups=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
       seed=st.integers(0, 2**16))
def test_attention_over_pages_is_attention_over_the_sequence(page: int, chunk: int, groups: tuple[int, int], seed: int) -> None:
    heads, kv_heads = groups
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    lengths = {f"r{i}": (int(rng.integers(1, 30)), int(rng.integers(1, 12))) for i in range(4)}
    whole = {name: [torch.randn(sum(both), h, 8, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
             for name, both in lengths.items()}
    want = {name: dense(*tensors) for name, tensors in whole.items()}
    scheduler = Scheduler(SchedulerConfig(page_size=page, chunk_tokens=chunk, max_running=3), PagePool(200, page))
    store = PagedStore(layers=2, pages=200, page_size=page, kv_heads=kv_heads, head_dim=8, dtype=torch.float64)
    for layer in range(2):  # what nobody wrote must not matter
        store.k[layer].fill_(math.nan)
        store.v[layer].fill_(math.inf)
    for name, (prompt, new) in lengths.items():
        scheduler.submit(Request(name, [1] * prompt, max_new_tokens=new))
    builder, attention = BatchBuilder(page_size=page), ReferenceAttention(store, heads=heads)
    while scheduler.has_work():
        plan = scheduler.schedule()
        batch = builder.build(plan)
        attention.begin(batch)
        spans = [(name, int(plan.starts[i]), int(plan.starts[i] + plan.counts[i])) for i, name in enumerate(plan.ids)]
        for layer in range(2):
            q, k, v = (torch.cat([whole[name][part][a:b] for name, a, b in spans]) for part in range(3))
            out = attention.run(layer, q, k, v)
            expected = torch.cat([want[name][a:b] for name, a, b in spans])
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        scheduler.commit(plan, StepResult(tokens=[1] * len(plan)))
    assert bool(torch.isnan(store.k[0][store.scratch]).all())


def test_a_query_that_sees_nothing_gives_zero() -> None:
    q, k = torch.ones(1, 2, 2, 4), torch.ones(1, 3, 1, 4)
    allowed = torch.tensor([[[True, False, True], [False, False, False]]])
    out, lse = attend(q, k, k * 3, allowed, 0.5)
    assert out[0, 0].tolist() == [[3.0] * 4] * 2
    assert out[0, 1].tolist() == [[0.0] * 4] * 2
    assert lse[0, 0].tolist() == pytest.approx([2 + math.log(2)] * 2)
    assert lse[0, 1].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_keeps_its_type(dtype: torch.dtype) -> None:
    q = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    k = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    allowed = torch.ones(2, 1, 5, dtype=torch.bool)
    out, lse = attend(q, k, k, allowed, 0.3)
    exact, _ = attend(q.double(), k.double(), k.double(), allowed, 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 3e-3)
