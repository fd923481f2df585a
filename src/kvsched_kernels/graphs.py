"""CUDA-graph capture of decode at bucketed batch sizes: a step of decodes is padded to a size that was captured, and replayed.

What lives here: buckets, padding, static buffers, capture and replay. What does not: kernels that can be captured
(`kvsched_kernels.flashinfer` has them), and which batches there are (the scheduler).

A captured graph reads and writes the addresses it was captured with, and its shapes are fixed. So a batch is copied into
buffers that stay where they are, and padded to the smallest bucket that holds it: a padded row is a decode of one token
at position 0 of the store's scratch page, which is nobody's. What a graph cannot run is run without one, and the answer says so.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import torch

from kvsched.plan import Deltas, Plan, Status
from kvsched.units import NO_INTS, NO_PAGES
from kvsched_kernels.attention import Attention
from kvsched_kernels.batch import Batch
from kvsched_kernels.errors import KernelError, at_least_one
from kvsched_kernels.store import PagedStore

Forward = Callable[[Batch, Attention], torch.Tensor]
"""The model: a batch and the attention to use give a tensor [rows, ...], one line for each row of the batch."""

WARM_UPS = 2
"""Runs before a capture, in which libraries choose algorithms and take workspaces: torch asks for a few."""

BEFORE_ANY = Plan(step=0, status=Status.IDLE, rows=NO_INTS, starts=NO_INTS, counts=NO_INTS, decodes=0, prefill=(),
                  deltas=Deltas(NO_INTS, NO_INTS, NO_PAGES), retracted=(), evicted=0, copies=(), admitted=(), decode_ids=tuple)
"""The plan of the batches that are captured: no step."""


class Capture(enum.Enum):
    """What becomes of a bucket."""

    CUDA = "cuda"  # captured when made, replayed in each step
    EAGER = "eager"  # run each time, on the same static buffers: the padding without the graph, on any device


class Used(enum.Enum):
    """How a batch was run."""

    GRAPH = "graph"  # padded, by replay of its bucket's graph
    STATIC = "static"  # padded, in the buffers of its bucket, without a graph
    NOT_DECODES = "not_decodes"  # eagerly: a row computes something else than one token (prefill, drafts)
    TOO_MANY_ROWS = "too_many_rows"  # eagerly: more rows than the largest bucket
    TOO_MANY_PAGES = "too_many_pages"  # eagerly: more pages, over all rows, than the static buffer holds


@attrs.frozen(eq=False)
class Ran:
    """The answer of `DecodeGraphs.run`.

    output: what the model gave, [rows, ...] without the padding. By a graph it is a view of a buffer that the next replay
    of the bucket overwrites: sample from it, or copy it, on the same stream. used: how it was run. bucket: the padded size, None
    where it was run eagerly.
    """

    output: torch.Tensor
    used: Used
    bucket: int | None


@runtime_checkable
class Capturable(Attention, Protocol):
    """An attention that can be captured: it has one of its kind for batches whose tensors stay in their places."""

    def for_graph(self, batch: Batch) -> Attention:
        """An attention for batches of the size of `batch`, all decodes, that reads the tensors of `batch` in `run`.

        `begin` gets each step's padded batch, outside of the graph; `run` is what is captured. The device tensors of
        `batch` are static; kv_indices has the greatest length there will be.
        """


@attrs.frozen(eq=False)
class _Bucket:
    """One size: its attention, and its graph with what the graph gives (None without capture)."""

    attention: Attention
    graph: Any
    output: torch.Tensor | None


class DecodeGraphs:
    """Runs batches of decodes at a few padded sizes.

    forward: the model; for capture it must read nothing but device tensors of the batch it gets, with no step that waits
    for the device. attention: what it runs on; for capture it must be `Capturable`. store: whose scratch page padded rows
    write to; on the device. buckets: sizes, ascending. indices: length of the static buffer of page ids, all rows together;
    rows that share pages count them each, so the pool's size is no bound. A batch needs its pages and one for each padded row.
    capture: `Capture.CUDA` captures every bucket now, largest first, so that the smaller ones use its memory again.

    Cost of `run`: seven small copies on the device, two more steps where rows are padded, and five where they became fewer.
    Raises `KernelError` for arguments that cannot work.
    """

    def __init__(self, forward: Forward, attention: Attention, store: PagedStore, *, buckets: Sequence[int], indices: int,
                 capture: Capture) -> None:
        at_least_one(indices=indices, **{f"buckets[{i}]": size for i, size in enumerate(buckets)})
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise KernelError(f"buckets must be sizes in ascending order, at least one, not {list(buckets)}")
        if indices < buckets[-1]:
            raise KernelError(f"indices must be at least the largest bucket, {buckets[-1]}, not {indices}: each row has a page")
        if capture is Capture.CUDA and store.device.type != "cuda":
            raise KernelError(f"Capture.CUDA needs a store on a CUDA device, not on {store.device}; Capture.EAGER runs anywhere")
        if capture is Capture.CUDA and not isinstance(attention, Capturable):
            raise KernelError(f"{type(attention).__name__} cannot be captured: it has no for_graph(batch)")
        self.forward = forward
        self.attention = attention
        self.buckets = tuple(buckets)
        self.indices = indices
        self.capture = capture
        self._scratch = store.scratch
        self._slot = store.scratch * store.page_size
        with torch.inference_mode(mode=False):  # tensors made in inference mode could not be written outside of it
            self._take_buffers(buckets[-1], store.device)
        pool = torch.cuda.graph_pool_handle() if capture is Capture.CUDA else None
        self._made = {size: self._make(size, pool) for size in reversed(self.buckets)}

    def _take_buffers(self, most: int, device: torch.device) -> None:
        def line(count: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        wide, narrow = torch.int64, torch.int32
        self._filled = 0  # leading rows that hold something else than padding
        self._token_ids, self._positions, self._slots = line(most, 0, wide), line(most, 0, wide), line(most, self._slot, wide)
        self._kv_len, self._last_page_len = line(most, 1, narrow), line(most, 1, narrow)
        self._kv_indices = line(self.indices, self._scratch, narrow)
        self._steps = torch.arange(most + 1, dtype=narrow, device=device)
        self._kv_indptr = self._steps.clone()
        self._last = torch.arange(most, dtype=wide, device=device)
        self._table_rows = line(most, 0, wide)

    def bucket_of(self, rows: int) -> int | None:
        """The smallest bucket that holds `rows`, or None."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else None

    @torch.no_grad()
    def run(self, batch: Batch) -> Ran:
        """One step: padded to its bucket, or eagerly, as the answer says. Either writes no slots but the batch's and scratch."""
        bucket = self.bucket_of(batch.rows)
        pages = int(batch.kv_indptr_host[batch.rows])
        if batch.decodes != batch.rows:
            return self._eagerly(batch, Used.NOT_DECODES)
        if bucket is None:
            return self._eagerly(batch, Used.TOO_MANY_ROWS)
        if pages + bucket - batch.rows > self.indices:
            return self._eagerly(batch, Used.TOO_MANY_PAGES)
        made = self._made[bucket]
        padded = self._fill(batch, bucket, pages)
        made.attention.begin(padded)
        if made.graph is not None and made.output is not None:
            made.graph.replay()
            return Ran(made.output[: batch.rows], Used.GRAPH, bucket)
        return Ran(self._checked(padded, made.attention)[: batch.rows], Used.STATIC, bucket)

    def _eagerly(self, batch: Batch, used: Used) -> Ran:
        self.attention.begin(batch)
        return Ran(self.forward(batch, self.attention), used, None)

    def _checked(self, padded: Batch, attention: Attention) -> torch.Tensor:
        output = self.forward(padded, attention)
        if output.dim() == 0 or len(output) != padded.rows:
            shape = list(output.shape)
            raise KernelError(f"forward must give one line for each of {padded.rows} rows, not a tensor of shape {shape}")
        return output

    def _fill(self, batch: Batch, bucket: int, pages: int) -> Batch:
        """Copy a batch into the static buffers, and pad it."""
        n = batch.rows
        stale = self._filled = max(self._filled, n)
        for static, given, padding in (
            (self._token_ids, batch.token_ids, 0), (self._positions, batch.positions, 0), (self._slots, batch.slots, self._slot),
            (self._kv_len, batch.kv_len, 1), (self._last_page_len, batch.last_page_len, 1),
        ):
            static[:n].copy_(given)
            if stale > n:
                static[n:stale].fill_(padding)
        self._kv_indptr[: n + 1].copy_(batch.kv_indptr)
        self._kv_indices[:pages].copy_(batch.kv_indices)
        self._filled = n
        if bucket > n:
            torch.add(self._steps[1 : bucket - n + 1], pages, out=self._kv_indptr[n + 1 : bucket + 1])
            self._kv_indices[pages : pages + bucket - n].fill_(self._scratch)
        return self._view(batch.plan, bucket, pages + bucket - n, _padded(batch.kv_indptr_host, bucket, pages),
                          _padded(batch.kv_len_host, bucket, None), _padded(batch.last_page_len_host, bucket, None))

    def _view(self, plan: Plan, bucket: int, pages: int, kv_indptr: Any, kv_len: Any, last_page_len: Any) -> Batch:
        """The static buffers at the size of a bucket, with host arrays of their own."""
        return Batch(
            plan=plan, rows=bucket, tokens=bucket, decodes=bucket, sampling=np.arange(bucket), starts=kv_len.astype(np.int64) - 1, max_q=1, max_kv=int(kv_len.max()),
            qo_indptr_host=np.arange(bucket + 1, dtype=np.int32), kv_indptr_host=kv_indptr, kv_len_host=kv_len,
            last_page_len_host=last_page_len, qo_indptr=self._steps[: bucket + 1], kv_indptr=self._kv_indptr[: bucket + 1],
            kv_len=self._kv_len[:bucket], last_page_len=self._last_page_len[:bucket], kv_indices=self._kv_indices[:pages],
            batch_indices=self._steps[:bucket], positions=self._positions[:bucket], slots=self._slots[:bucket],
            token_ids=self._token_ids[:bucket], last=self._last[:bucket], table_rows=self._table_rows[:bucket],
        )

    def _make(self, bucket: int, pool: Any) -> _Bucket:
        """A bucket, captured on padded rows alone: whatever it writes goes to the scratch page."""
        ones = np.ones(bucket, np.int32)
        empty = self._view(BEFORE_ANY, bucket, bucket, np.arange(bucket + 1, dtype=np.int32), ones, ones)
        attention: Attention = self.attention
        if isinstance(attention, Capturable):
            attention = attention.for_graph(attrs.evolve(empty, kv_indices=self._kv_indices))
        if self.capture is Capture.EAGER:
            return _Bucket(attention, None, None)
        with torch.no_grad():
            attention.begin(empty)
            main = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves the constructor unannotated
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._checked(empty, attention)
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._checked(empty, attention)
        return _Bucket(attention, graph, output)


def _padded(values: Any, size: int, pages: int | None) -> Any:
    """A host array at the size of its bucket: 1 for a padded row, or for kv_indptr a page more each, from `pages` on."""
    if pages is None:
        return np.concatenate([values, np.ones(size - len(values), np.int32)])
    return np.concatenate([values, np.arange(pages + 1, pages + 2 + size - len(values), dtype=np.int32)])
