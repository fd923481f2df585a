"""Mixed batches from the life of a scheduler, run through one attention and through the reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import torch

from kvsched import PagePool, Request, Scheduler, SchedulerConfig, StepResult
from kvsched_kernels import Attention, Batch, BatchBuilder, PagedStore, ReferenceAttention

LAYERS = 2
PAGES_OF_TOKENS = 400
KINDS = ("decodes", "prefill", "both")
"""What a batch can hold; a life goes through all three."""


@attrs.frozen
class Shape:
    """Sizes of an attention."""

    page: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@attrs.frozen(eq=False)
class Step:
    """One step and layer: the batch, what went in, what came out, and what the reference gives in float32."""

    batch: Batch
    layer: int
    q: torch.Tensor
    out: torch.Tensor
    wanted: torch.Tensor


def kind(batch: Batch) -> str:
    """Which of `KINDS` a batch is."""
    if batch.decodes == batch.rows:
        return "decodes"
    return "both" if batch.decodes else "prefill"


def life(shape: Shape, make: Callable[[PagedStore], Attention], *, device: str = "cpu", seed: int = 0, requests: int = 5,
         longest: int = 60) -> Iterator[Step]:
    """Every step and layer of a scheduler that serves `requests` in a pool of its own, on `make(store)` and on the reference.

    The reference gets the same rounded inputs in float32. Slots that nothing was written to hold not-a-numbers: reading one shows.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    pages = PAGES_OF_TOKENS // shape.page
    scheduler = Scheduler(SchedulerConfig(page_size=shape.page, chunk_tokens=23, max_running=requests - 1), PagePool(pages, shape.page))
    for i in range(requests):
        prompt = [1] * int(rng.integers(1, longest))
        assert scheduler.submit(Request(f"r{i}", prompt, max_new_tokens=int(rng.integers(2, 9)), ignore_eos=True))
    sizes: dict[str, Any] = {"layers": LAYERS, "pages": pages, "page_size": shape.page, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    ours, plain = PagedStore(**sizes, dtype=shape.dtype, device=device), PagedStore(**sizes, dtype=torch.float32)
    for side in (*ours.k, *ours.v):
        side.fill_(float("nan"))
    attention, reference = make(ours), ReferenceAttention(plain, heads=shape.heads)
    builders = BatchBuilder(page_size=shape.page, device=device), BatchBuilder(page_size=shape.page)
    while scheduler.has_work():
        plan = scheduler.schedule()
        batch, copy = (builder.build(plan) for builder in builders)
        attention.begin(batch)
        reference.begin(copy)
        for layer in range(LAYERS):
            q, k, v = (torch.randn((batch.tokens, heads, shape.head_dim), generator=generator).to(shape.dtype)
                       for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
            wanted = reference.run(layer, q.float(), k.float(), v.float())
            there = q.to(device)
            yield Step(batch, layer, there, attention.run(layer, there, k.to(device), v.to(device)), wanted)
        scheduler.commit(plan, StepResult(tokens=[1] * len(plan)))
