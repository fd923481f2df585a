"""FlashInfer on a real device against the reference on the CPU. Without a device, or without what FlashInfer compiles its kernels
with, each test is skipped and says which; a failure of what is there is a failure."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest
import torch
from mixed import KINDS, Shape, kind, life

from kvsched import PagePool, Request, Scheduler, SchedulerConfig, StepResult
from kvsched_kernels import Batch, BatchBuilder, PagedStore
from kvsched_kernels.flashinfer import FlashInferAttention, merged_states
from kvsched_kernels.graphs import Capture, DecodeGraphs, Used
from kvsched_kernels.merge import gate_agreement, gate_determinism, merge

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Fixed before any run: two roundings of values around 1 to 11, and to 8 bits."""


def lacking() -> str | None:
    """What is not here and FlashInfer needs, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    compiler = shutil.which("nvcc") or (os.environ.get("CUDA_HOME") and shutil.which("nvcc", path=f"{os.environ['CUDA_HOME']}/bin"))
    if not compiler and importlib.util.find_spec("flashinfer_jit_cache") is None:
        return "FlashInfer has neither nvcc to compile its kernels nor a cache of compiled ones"
    return None


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(lacking() is not None, reason=f"no FlashInfer on CUDA: {lacking()}")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (8, 2, 128), (28, 4, 128)])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_mixed_batches_meet_the_reference(page: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    seen = set()
    for step in life(Shape(page, heads, kv_heads, head_dim, dtype), lambda kept: FlashInferAttention(kept, heads=heads), device="cuda"):
        gate_agreement(step.out.float(), step.wanted, tolerance=TOLERANCE[dtype])
        seen.add(kind(step.batch))
    assert seen == set(KINDS)


@pytest.mark.parametrize("page", [1, 16])
def test_decode_by_halves_of_the_keys_merges_to_the_whole(page: int) -> None:
    """A host that splits KV by tokens: two ranks hold one half of the pages each, and attend to those."""
    kept = PagedStore(layers=1, pages=64, page_size=page, kv_heads=2, head_dim=64, dtype=torch.float16, device="cuda")
    random = torch.Generator().manual_seed(0)
    for side in kept.layer(0):
        side.copy_(torch.randn(side.shape, generator=random).half())
    attention = FlashInferAttention(kept, heads=8)
    q = torch.randn((1, 8, 64), generator=random).half().cuda()
    parts = []
    for pages in (range(16), range(8), range(8, 16)):
        attention.begin(decode_over(list(pages), page))
        parts.append(attention.attend(0, q))
    outputs, lses = (torch.stack([part[i] for part in parts[1:]]) for i in range(2))
    gate_agreement(merge(outputs, lses), parts[0], tolerance=TOLERANCE[torch.float16])
    gate_agreement(merged_states(outputs, lses), parts[0], tolerance=TOLERANCE[torch.float16])
    for fn in (merge, merged_states):
        gate_determinism(fn, [outputs.cpu(), lses.cpu()], device="cuda")


def decode_over(pages: list[int], page: int) -> Batch:
    """A batch of one decode whose KV is exactly these pages, full."""
    scheduler = Scheduler(SchedulerConfig(page_size=page), PagePool(64, page))
    scheduler.submit(Request("r", [1] * (len(pages) * page - 1), max_new_tokens=4))
    builder = BatchBuilder(page_size=page, device="cuda")
    batch = None
    for _ in range(2):
        plan = scheduler.schedule()
        batch = builder.build(plan)
        scheduler.commit(plan, StepResult(tokens=[1] * len(plan)))
    assert batch is not None
    assert (batch.decodes, len(batch.kv_indices)) == (1, len(pages))
    batch.kv_indices.copy_(torch.tensor(pages, dtype=torch.int32))
    return batch


def test_states_of_which_nothing_was_seen_merge_to_zero() -> None:
    outputs, lses = torch.full((3, 2, 4, 64), torch.nan, dtype=torch.float16, device="cuda"), torch.full((3, 2, 4), -torch.inf, device="cuda")
    out, lse = merged_states(outputs, lses)
    assert out.tolist() == torch.zeros_like(out).tolist()
    assert lse.tolist() == lses[0].tolist()


def test_captured_decodes_meet_the_uncaptured() -> None:
    """The same life on one store each: through graphs at buckets, and without."""
    shape = Shape(16, 8, 2, 64, torch.float16)
    captured, plain = (run_life(shape, capture) for capture in (Capture.CUDA, None))
    assert len(captured) == len(plain)
    for (ours, used), (wanted, _) in zip(captured, plain, strict=True):
        gate_agreement(ours.float(), wanted.float(), tolerance=TOLERANCE[shape.dtype])
        assert used in (Used.GRAPH, Used.NOT_DECODES)
    assert {used for _, used in captured} == {Used.GRAPH, Used.NOT_DECODES}


def run_life(shape: Shape, capture: Capture | None) -> list[tuple[torch.Tensor, Used | None]]:
    """A one-layer model that is attention alone, over the life of a scheduler: what each step gave, and how it was run."""
    scheduler = Scheduler(SchedulerConfig(page_size=shape.page, chunk_tokens=32, max_running=6), PagePool(64, shape.page))
    for i in range(6):
        scheduler.submit(Request(f"r{i}", [1] * (5 + 7 * i), max_new_tokens=3 + i, ignore_eos=True))
    kept = PagedStore(layers=1, pages=64, page_size=shape.page, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype, device="cuda")
    attention = FlashInferAttention(kept, heads=shape.heads)
    table = torch.randn((64, shape.heads + 2 * shape.kv_heads, shape.head_dim), generator=torch.Generator().manual_seed(1)).to("cuda", shape.dtype)

    def forward(batch: Batch, using: object) -> torch.Tensor:
        mixed = table[(batch.token_ids + batch.positions) % len(table)]
        q, k, v = torch.split(mixed, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        assert hasattr(using, "run")
        out = using.run(0, q, k, v)
        assert isinstance(out, torch.Tensor)
        return out[batch.last]

    graphs = DecodeGraphs(forward, attention, kept, buckets=(1, 2, 4, 8), indices=64, capture=capture) if capture else None
    builder = BatchBuilder(page_size=shape.page, device="cuda")
    out: list[tuple[torch.Tensor, Used | None]] = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        batch = builder.build(plan)
        if graphs is None:
            attention.begin(batch)
            out.append((forward(batch, attention).clone(), None))
        else:
            ran = graphs.run(batch)
            out.append((ran.output.clone(), ran.used))
        builder.note(batch, torch.ones(len(batch.sampling), dtype=torch.int64, device="cuda"))
        scheduler.commit(plan, StepResult(tokens=[1] * len(plan)))
    return out
