"""Padding of decodes to buckets, where no graph is needed to see it: the same buffers, run eagerly. What a graph adds is in
`test_flashinfer_gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import emulated_flashinfer
import pytest
import torch

from kvsched import PagePool, Plan, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
from kvsched_kernels import Attention, Batch, BatchBuilder, KernelError, PagedStore, ReferenceAttention
from kvsched_kernels.flashinfer import FlashInferAttention, GraphDecodes
from kvsched_kernels.graphs import Capture, DecodeGraphs, Used

PAGE, PAGES, LAYERS, HEADS, KV_HEADS, WIDTH, VOCABULARY = 4, 48, 2, 4, 2, 8, 32


class Model:
    """A few layers of attention between two tables: enough that a wrong key anywhere changes the logits."""

    def __init__(self, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> None:
        random = torch.Generator().manual_seed(3)
        self.tokens = torch.randn((VOCABULARY, HEADS + 2 * KV_HEADS, width), generator=random, dtype=torch.float64).to(dtype)
        self.places = torch.randn((256, HEADS + 2 * KV_HEADS, width), generator=random, dtype=torch.float64).to(dtype)
        self.head = torch.randn((HEADS * width, VOCABULARY), generator=random, dtype=torch.float64).to(dtype)
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        self.seen.append((batch.rows, *(tensor.data_ptr() for tensor in (batch.token_ids, batch.positions, batch.slots, batch.kv_indptr))))
        mixed = self.tokens[batch.token_ids] + self.places[batch.positions]
        for layer in range(LAYERS):
            q, k, v = mixed[:, :HEADS], mixed[:, HEADS : HEADS + KV_HEADS], mixed[:, HEADS + KV_HEADS :]
            out = attention.run(layer, q.contiguous(), k.contiguous(), v.contiguous())
            mixed = mixed + torch.cat([out, out[:, : 2 * KV_HEADS]], 1)
        return mixed[batch.last, :HEADS].flatten(1) @ self.head


def new_store(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> PagedStore:
    return PagedStore(layers=LAYERS, pages=PAGES, page_size=PAGE, kv_heads=KV_HEADS, head_dim=width, dtype=dtype)


def steps(requests: int = 6, **config: Any) -> Iterator[tuple[Scheduler, Plan]]:
    """Plans of a scheduler whose requests come in and end one by one: the number of decodes rises and falls."""
    scheduler = Scheduler(SchedulerConfig(page_size=PAGE, max_running=5, chunk_tokens=16, **config), PagePool(PAGES, PAGE), RadixCache(PAGE))
    for i in range(requests):
        prompt = [(7 * i + j) % VOCABULARY for j in range(3 + 5 * i)]
        assert scheduler.submit(Request(f"r{i}", prompt, max_new_tokens=2 + 3 * (requests - i), ignore_eos=True))
    while scheduler.has_work():
        yield scheduler, scheduler.schedule()


class Side:
    """One way to serve: a store, a builder, and what runs a batch."""

    def __init__(self, graphed: bool, dtype: torch.dtype = torch.float64, **more: Any) -> None:
        self.model, self.store, self.builder = Model(dtype), new_store(dtype), BatchBuilder(page_size=PAGE)
        for tensor in (*self.store.k, *self.store.v):
            tensor.fill_(math.nan)
        self.attention = ReferenceAttention(self.store, heads=HEADS)
        options: dict[str, Any] = {"buckets": (1, 2, 4, 8), "indices": 64, "capture": Capture.EAGER, **more}
        self.graphs = DecodeGraphs(self.model, self.attention, self.store, **options) if graphed else None

    def step(self, plan: Plan) -> tuple[torch.Tensor, Used | None, Batch]:
        batch = self.builder.build(plan)
        if self.graphs is None:
            self.attention.begin(batch)
            return self.model(batch, self.attention), None, batch
        ran = self.graphs.run(batch)
        return ran.output, ran.used, batch


def finish(scheduler: Scheduler, plan: Plan, logits: torch.Tensor, *sides: tuple[Side, Batch]) -> None:
    """Greedy: the next tokens, for the scheduler and for each side."""
    tokens = torch.zeros(len(plan), dtype=torch.int64)
    tokens[torch.from_numpy(sides[0][1].sampling)] = logits.argmax(-1)
    for side, batch in sides:
        side.builder.note(batch, logits.argmax(-1))
    scheduler.commit(plan, StepResult(tokens=tokens.numpy()))


def test_padded_logits_are_the_unpadded_ones_and_padding_writes_to_the_scratch_page_alone() -> None:
    padded, plain = Side(graphed=True), Side(graphed=False)
    buckets = set()
    for scheduler, plan in steps():
        before = [tensor.clone() for tensor in (*padded.store.k, *padded.store.v)]
        logits, used, batch = padded.step(plan)
        wanted, _, other = plain.step(plan)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        assert used is (Used.STATIC if batch.decodes == batch.rows else Used.NOT_DECODES)
        assert padded.graphs is not None
        bucket = padded.graphs.bucket_of(batch.rows) if used is Used.STATIC else batch.rows
        buckets.add((batch.rows, bucket))
        allowed = set(batch.slots.tolist()) | ({padded.store.scratch * PAGE} if bucket != batch.rows else set())
        for old, new in zip(before, (*padded.store.k, *padded.store.v), strict=True):
            changed = (old != new) & ~(old.isnan() & new.isnan())
            assert set(changed.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()) <= allowed
        finish(scheduler, plan, wanted, (padded, batch), (plain, other))
    assert {(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)} <= buckets
    for ours, theirs in zip((*padded.store.k, *padded.store.v), (*plain.store.k, *plain.store.v), strict=True):
        torch.testing.assert_close(ours[:PAGES], theirs[:PAGES], rtol=0, atol=1e-10, equal_nan=True)


def test_a_padded_batch_is_the_batch_and_rows_of_one_token_on_the_scratch_page() -> None:
    shown: list[Batch] = []

    def show(batch: Batch, _: Attention) -> torch.Tensor:
        shown.append(batch)
        return torch.zeros(len(batch.last), VOCABULARY)

    side = Side(graphed=True, buckets=(2, 4, 8))
    assert side.graphs is not None
    side.graphs.forward = show
    for scheduler, plan in steps():
        batch = side.builder.build(plan)
        ran = side.graphs.run(batch)
        padded = shown.pop()
        finish(scheduler, plan, ran.output, (side, batch))
        if ran.bucket is None:
            assert padded is batch
            continue
        more, pages = ran.bucket - batch.rows, len(batch.kv_indices)
        slot = side.store.scratch * PAGE
        wanted = {
            "token_ids": batch.token_ids.tolist() + [0] * more, "positions": batch.positions.tolist() + [0] * more,
            "slots": batch.slots.tolist() + [slot] * more, "kv_len": batch.kv_len.tolist() + [1] * more,
            "last_page_len": batch.last_page_len.tolist() + [1] * more, "kv_indices": batch.kv_indices.tolist() + [side.store.scratch] * more,
            "kv_indptr": batch.kv_indptr.tolist() + [pages + i + 1 for i in range(more)], "qo_indptr": list(range(ran.bucket + 1)),
            "batch_indices": list(range(ran.bucket)), "last": list(range(ran.bucket)),
        }
        for key, value in wanted.items():
            assert getattr(padded, key).tolist() == value, key
            assert getattr(padded, key).dtype == getattr(batch, key).dtype, key
            if hasattr(padded, f"{key}_host"):
                assert getattr(padded, f"{key}_host").tolist() == value, key
                assert getattr(padded, f"{key}_host").dtype == getattr(batch, f"{key}_host").dtype, key
        assert (padded.rows, padded.tokens, padded.decodes, padded.max_q) == (ran.bucket,) * 3 + (1,)
        assert (padded.max_kv, padded.plan) == (batch.max_kv, batch.plan)
        assert (padded.sampling.tolist(), len(padded.table_rows)) == (list(range(ran.bucket)), ran.bucket)
        assert (len(ran.output), ran.used) == (batch.rows, Used.STATIC)


def test_a_bucket_sees_its_own_addresses_in_every_step() -> None:
    side = Side(graphed=True, buckets=(8,))
    for scheduler, plan in steps():
        logits, used, batch = side.step(plan)
        if used is not Used.STATIC:
            side.model.seen.pop()
        finish(scheduler, plan, logits, (side, batch))
    assert len(side.model.seen) > 5
    assert len(set(side.model.seen)) == 1


@pytest.mark.parametrize("requests", [1, 3])
def test_an_attention_made_for_graphs_gives_the_same(requests: int) -> None:
    """The decode wrapper for graphs, emulated: it reads buffers that plan() fills, at the size of the bucket."""
    model = Model(torch.float16, 64)
    made = []
    for graphed in (True, False):
        store = new_store(torch.float16, 64)
        attention = FlashInferAttention(store, heads=HEADS, workspace_bytes=64, library=emulated_flashinfer)
        builder, outputs = BatchBuilder(page_size=PAGE), []
        graphs = DecodeGraphs(model, attention, store, buckets=(4,), indices=64, capture=Capture.EAGER)
        assert isinstance(graphs._made[4].attention, GraphDecodes)
        for scheduler, plan in steps(requests):
            batch = builder.build(plan)
            if graphed:
                ran = graphs.run(batch)
                outputs.append(ran.output)
                assert ran.used in (Used.STATIC, Used.NOT_DECODES)
            else:
                attention.begin(batch)
                outputs.append(model(batch, attention))
            builder.note(batch, torch.full((len(batch.sampling),), 5))
            scheduler.commit(plan, StepResult(tokens=[5] * len(plan)))
        made.append(outputs)
    for ours, wanted in zip(*made, strict=True):
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-3 * scale)


def test_an_attention_made_for_graphs_refuses_another_size() -> None:
    store = new_store(torch.float16, 64)
    attention = FlashInferAttention(store, heads=HEADS, workspace_bytes=64, library=emulated_flashinfer)
    graphs = DecodeGraphs(Model(torch.float16, 64), attention, store, buckets=(4,), indices=64, capture=Capture.EAGER)
    for _, plan in steps(2):
        with pytest.raises(KernelError, match="was made for 4 decodes, not for 0 in 2 rows"):
            graphs._made[4].attention.begin(BatchBuilder(page_size=PAGE).build(plan))
        break


def test_the_smallest_bucket_that_holds_the_rows() -> None:
    graphs = Side(graphed=True, buckets=(2, 3, 8)).graphs
    assert graphs is not None
    assert [graphs.bucket_of(rows) for rows in range(1, 10)] == [2, 2, 3, 8, 8, 8, 8, 8, None]


@pytest.mark.parametrize(("options", "used"), [
    ({"buckets": (1, 2, 3)}, Used.TOO_MANY_ROWS),
    ({"buckets": (8,), "indices": 9}, Used.TOO_MANY_PAGES),
])
def test_what_does_not_fit_is_run_eagerly_and_says_so(options: dict[str, Any], used: Used) -> None:
    side, plain = Side(graphed=True, **options), Side(graphed=False)
    seen = set()
    for scheduler, plan in steps():
        logits, how, batch = side.step(plan)
        wanted, _, other = plain.step(plan)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        seen.add(how)
        finish(scheduler, plan, wanted, (side, batch), (plain, other))
    assert used in seen
    assert Used.NOT_DECODES in seen


def test_the_last_page_that_fits_is_used() -> None:
    """A batch needs its own pages and one for each padded row."""
    side = Side(graphed=True, buckets=(4,), indices=6)
    assert side.graphs is not None
    for scheduler, plan in steps(1):
        batch = side.builder.build(plan)
        ran = side.graphs.run(batch)
        assert ran.bucket == (4 if ran.used is Used.STATIC else None)
        if batch.decodes:
            assert ran.used is (Used.STATIC if len(batch.kv_indices) <= 3 else Used.TOO_MANY_PAGES)
        finish(scheduler, plan, ran.output, (side, batch))


def test_drafts_are_no_plain_decodes() -> None:
    side = Side(graphed=True)
    for scheduler, plan in steps(1, lookahead_tokens=2):
        wide = int(plan.counts.max()) if plan.decodes else 1
        batch = side.builder.build(plan, torch.zeros((plan.decodes, 2), dtype=torch.int64).numpy() if wide > 1 else None)
        assert side.graphs is not None
        ran = side.graphs.run(batch)
        assert ran.used is (Used.STATIC if plan.decodes and wide == 1 else Used.NOT_DECODES)
        side.builder.note(batch, torch.zeros(len(batch.sampling), dtype=torch.int64))
        scheduler.commit(plan, StepResult(tokens=[[0, 0, 0]] * len(plan)))


@pytest.mark.parametrize(("options", "message"), [
    ({"buckets": ()}, "buckets must be sizes in ascending order, at least one"),
    ({"buckets": (4, 2)}, r"buckets must be sizes in ascending order, at least one, not \[4, 2\]"),
    ({"buckets": (2, 2)}, "ascending order"),
    ({"buckets": (0, 2)}, r"buckets\[0\] must be an integer of at least 1, not 0"),
    ({"indices": 0}, "indices must be an integer of at least 1"),
    ({"indices": 7}, "indices must be at least the largest bucket, 8, not 7"),
    ({"capture": Capture.CUDA}, "Capture.CUDA needs a store on a CUDA device, not on cpu"),
])
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Side(graphed=True, **options)


def test_an_attention_that_reads_lengths_on_the_host_cannot_be_captured() -> None:
    store = PagedStore(layers=1, pages=1, page_size=1, kv_heads=1, head_dim=1, dtype=torch.float32)
    attention = ReferenceAttention(store, heads=1)
    store.device = torch.device("cuda")  # as if it were there: the attention is looked at before anything is captured
    with pytest.raises(KernelError, match=r"ReferenceAttention cannot be captured: it has no for_graph\(batch\)"):
        DecodeGraphs(Model(), attention, store, buckets=(1,), indices=4, capture=Capture.CUDA)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2), torch.zeros(())])
def test_a_model_that_forgets_a_row_is_caught(wrong: torch.Tensor) -> None:
    store = new_store()
    attention, builder = ReferenceAttention(store, heads=HEADS), BatchBuilder(page_size=PAGE)
    graphs = DecodeGraphs(lambda _batch, _attention: wrong, attention, store, buckets=(4,), indices=64, capture=Capture.EAGER)
    for scheduler, plan in steps(1):
        batch = builder.build(plan)
        if batch.decodes:
            with pytest.raises(KernelError, match=r"forward must give one line for each of 4 rows, not a tensor of shape"):
                graphs.run(batch)
            break
        scheduler.commit(plan, StepResult(tokens=[1] * len(plan)))
