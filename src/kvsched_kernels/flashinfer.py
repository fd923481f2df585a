"""Attention over pages on CUDA, through the FlashInfer package, which is imported when an attention is made and not before.

What lives here: the one place that calls FlashInfer. Decodes at the head of a batch go through its decode wrapper, the other rows
through its prefill wrapper, and keys and values into the pages through its append. Every FlashInfer object is made by a
call on the name `library` and kept under one name; `tests/kernels/test_flashinfer_signatures.py` reads this file's calls
by those names and holds each against the installed package. What does not live here: the merge that runs anywhere
(`kvsched_kernels.merge`), and capture (`kvsched_kernels.graphs`).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvsched_kernels.batch import Batch
from kvsched_kernels.errors import KernelError, at_least_one
from kvsched_kernels.merge import base2_from_natural, check_parts, natural_from_base2
from kvsched_kernels.store import PagedStore

LAYOUT = "NHD"
"""FlashInfer's word for [pages, page_size, kv_heads, head_dim], the layout of `PagedStore`."""
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends for intermediate results of split keys."""
DTYPES = (torch.float16, torch.bfloat16)
"""Types that FlashInfer's decode and prefill kernels both take without scales."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions that both of them have."""
TENSOR_CORE_GROUP = 4
"""From this many query heads per KV head on, decode runs on tensor cores: below it most of a tile would be padding. The decode
kernel without them has groups of 1, 2, 3, 4, 6, 8 and 16 only; with them any."""


def load_library() -> Any:
    """The flashinfer package. Raises `KernelError` where it cannot be imported."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as why:
        raise KernelError(f"FlashInfer cannot be imported ({why}); install flashinfer-python, or use ReferenceAttention") from why


def _on_host(values: npt.NDArray[np.int32]) -> torch.Tensor:
    """A CPU tensor of its own: FlashInfer plans on the host, and given host arrays it need not read any from the device."""
    return torch.from_numpy(values.copy())


class _Planned:
    """Whether the last plan has left the host.

    A FlashInfer wrapper writes each plan into one pinned buffer, and the device copies it from there when its turn comes. A
    host that runs ahead of the device must not write the next plan before that.
    """

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves the constructor unannotated

    def wait(self) -> None:
        """Wait for the last marked plan; at once before the first."""
        if self._event is not None:
            self._event.synchronize()

    def mark(self) -> None:
        """Everything planned so far is what the next `wait` waits for."""
        if self._event is not None:
            self._event.record()


class FlashInferAttention:
    """`Attention` over a `PagedStore` on CUDA.

    store: where keys and values live; on a CUDA device, of a type in `DTYPES`, with a head_dim in `HEAD_DIMS`. heads: query
    heads, a multiple of the store's kv_heads. scale: of the scores; None for 1 / sqrt(head_dim). workspace_bytes: taken
    once, for both wrappers, which never run at the same time; each wrapper takes 8 MiB more on the device and on the host.
    library: what to call in place of the installed package, for tests; the device is not checked then.

    Raises `KernelError` for what FlashInfer cannot do, with what it can; nothing is taken then. The first run of a
    combination of types and sizes compiles kernels, unless the installation carries them.
    """

    def __init__(self, store: PagedStore, *, heads: int, scale: float | None = None, workspace_bytes: int = WORKSPACE_BYTES,
                 library: Any = None) -> None:
        at_least_one(heads=heads, workspace_bytes=workspace_bytes)
        if heads % store.kv_heads:
            raise KernelError(f"heads must be a multiple of kv_heads = {store.kv_heads}, not {heads!r}")
        if library is None and store.device.type != "cuda":
            raise KernelError(
                f"FlashInferAttention needs a store on a CUDA device, not on {store.device}; ReferenceAttention runs anywhere")
        if store.dtype not in DTYPES:
            raise KernelError(f"FlashInferAttention takes a store of {' or '.join(map(str, DTYPES))}, not of {store.dtype}")
        if store.head_dim not in HEAD_DIMS:
            raise KernelError(f"FlashInferAttention takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {store.head_dim}")
        self._library = library = load_library() if library is None else library
        self.store = store
        self.heads = heads
        self.scale = 1 / math.sqrt(store.head_dim) if scale is None else scale
        self.tensor_cores = heads // store.kv_heads >= TENSOR_CORE_GROUP
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=store.device)  # zeros: some kernels count in it
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self.workspace, kv_layout=LAYOUT, use_tensor_cores=self.tensor_cores)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer=self.workspace, kv_layout=LAYOUT)
        self._planned = _Planned(store.device)
        self._batch: Batch | None = None
        self._positions = torch.zeros(0, dtype=torch.int32)

    def begin(self, batch: Batch) -> None:
        """Plan both wrappers for a batch, once for all layers. Reads host arrays; waits for the last plan to leave the host."""
        store, d = self.store, batch.decodes
        pages = int(batch.kv_indptr_host[d])
        self._planned.wait()
        self._batch = batch
        self._positions = batch.positions.int()
        if d:
            self._decode.plan(
                indptr=_on_host(batch.kv_indptr_host[: d + 1]), indices=batch.kv_indices[:pages],
                last_page_len=_on_host(batch.last_page_len_host[:d]), num_qo_heads=self.heads, num_kv_heads=store.kv_heads,
                head_dim=store.head_dim, page_size=store.page_size, q_data_type=store.dtype, kv_data_type=store.dtype,
                sm_scale=self.scale)
        if batch.rows > d:  # the rest is a batch of its own: its first token is number 0, and so is its first page
            self._prefill.plan(
                qo_indptr=_on_host(batch.qo_indptr_host[d:] - batch.qo_indptr_host[d]),
                paged_kv_indptr=_on_host(batch.kv_indptr_host[d:] - batch.kv_indptr_host[d]),
                paged_kv_indices=batch.kv_indices[pages:], paged_kv_last_page_len=_on_host(batch.last_page_len_host[d:]),
                num_qo_heads=self.heads, num_kv_heads=store.kv_heads, head_dim_qk=store.head_dim, page_size=store.page_size,
                causal=True, q_data_type=store.dtype, kv_data_type=store.dtype, sm_scale=self.scale)
        self._planned.mark()

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write, then attend, as `Attention.run` says; q, k, v of the store's type. Raises `KernelError` before `begin`."""
        batch = self._begun(q)
        cache = self.store.layer(layer)
        library = self._library
        library.append_paged_kv_cache(
            append_key=k, append_value=v, batch_indices=batch.batch_indices, positions=self._positions, paged_kv_cache=cache,
            kv_indices=batch.kv_indices, kv_indptr=batch.kv_indptr, kv_last_page_len=batch.last_page_len, kv_layout=LAYOUT)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d = batch.decodes
        if d:
            self._decode.run(q=q[:d], paged_kv_cache=cache, out=out[:d])
        if batch.rows > d:
            self._prefill.run(q=q[d:], paged_kv_cache=cache, out=out[d:])
        return out

    def attend(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over what the batch's pages hold, and its log-sum-exp; nothing is written.

        For hosts that split the KV of a request by tokens: each rank attends to its own, and the partials are merged.
        q: [tokens, heads, head_dim]. Returns the output and the natural log-sum-exp, float32 [tokens, heads].
        """
        batch = self._begun(q)
        cache = self.store.layer(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        d = batch.decodes
        if d:
            self._decode.run(q=q[:d], paged_kv_cache=cache, out=out[:d], lse=lse[:d], return_lse=True)
        if batch.rows > d:
            self._prefill.run(q=q[d:], paged_kv_cache=cache, out=out[d:], lse=lse[d:], return_lse=True, lse_base="log2")
        return out, natural_from_base2(lse)

    def for_graph(self, batch: Batch) -> GraphDecodes:
        """The same attention for capture at the size of `batch`, whose tensors are static and large enough for every step."""
        return GraphDecodes(self, batch)

    def _begun(self, q: torch.Tensor) -> Batch:
        if self._batch is None:
            raise KernelError("begin(batch) comes before run()")
        if q.dtype != self.store.dtype:
            raise KernelError(f"q, k and v must be of the store's type, {self.store.dtype}, not {q.dtype}")
        return self._batch


class GraphDecodes:
    """`Attention` for one captured size: decodes alone, every tensor that a kernel reads in a fixed place.

    parent: whose store, heads, scale and workspace are used. batch: static tensors of the size; its decodes are the number
    of rows of every batch to come, and its kv_indices as long as they ever get. `begin` runs outside of the graph, before
    each replay, and puts a step's pages where the captured kernels read them. Takes 8 MiB on the device and on the host.
    """

    def __init__(self, parent: FlashInferAttention, batch: Batch) -> None:
        library = parent._library
        self.parent = parent
        self.rows = batch.rows
        self._static = batch
        self._positions = torch.zeros(batch.rows, dtype=torch.int32, device=parent.store.device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=parent.workspace, kv_layout=LAYOUT, use_cuda_graph=True, use_tensor_cores=parent.tensor_cores,
            paged_kv_indptr_buffer=batch.kv_indptr, paged_kv_indices_buffer=batch.kv_indices,
            paged_kv_last_page_len_buffer=batch.last_page_len)
        self._planned = _Planned(parent.store.device)

    def begin(self, batch: Batch) -> None:
        """Plan for a step. Raises `KernelError` for a batch of another size, or with rows that are no decodes."""
        if not batch.rows == batch.decodes == self.rows:
            raise KernelError(f"this attention was made for {self.rows} decodes, not for {batch.decodes} in {batch.rows} rows")
        store = self.parent.store
        self._planned.wait()
        self._positions.copy_(batch.positions)
        self._decode.plan(
            indptr=_on_host(batch.kv_indptr_host), indices=batch.kv_indices, last_page_len=_on_host(batch.last_page_len_host),
            num_qo_heads=self.parent.heads, num_kv_heads=store.kv_heads, head_dim=store.head_dim, page_size=store.page_size,
            q_data_type=store.dtype, kv_data_type=store.dtype, sm_scale=self.parent.scale)
        self._planned.mark()

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write, then attend: what is captured."""
        library, static, cache = self.parent._library, self._static, self.parent.store.layer(layer)
        library.append_paged_kv_cache(
            append_key=k, append_value=v, batch_indices=static.batch_indices, positions=self._positions, paged_kv_cache=cache,
            kv_indices=static.kv_indices, kv_indptr=static.kv_indptr, kv_last_page_len=static.last_page_len, kv_layout=LAYOUT)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode.run(q=q, paged_kv_cache=cache, out=out)
        return out


def merged_states(outputs: torch.Tensor, lses: torch.Tensor, *, library: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kvsched_kernels.merge.merge` gives, by FlashInfer's kernel: the same arguments, on CUDA.

    outputs: float16 or bfloat16 [parts, tokens, heads, head_dim] in rank order. lses: natural log-sum-exp [parts, tokens,
    heads]. FlashInfer reckons in base 2 and wants the parts behind the tokens: both are changed on the way in and out.
    Returns (output [tokens, heads, head_dim], natural lse float32 [tokens, heads]); 0 and -inf where no part saw a key.
    The kernel's order is fixed, so it passes the gate of determinism; its bytes are not those of `merge`.
    """
    check_parts(outputs, lses)
    if library is None and outputs.device.type != "cuda":
        raise KernelError(f"merged_states needs tensors on a CUDA device, not on {outputs.device}; merge runs anywhere")
    if outputs.dtype not in DTYPES:
        raise KernelError(f"merged_states takes outputs of {' or '.join(map(str, DTYPES))}, not of {outputs.dtype}")
    library = load_library() if library is None else library
    unseen = (lses == -torch.inf).unsqueeze(-1)  # the kernel multiplies by 0 what stands there, which must be a number then
    states = outputs.masked_fill(unseen, 0.0).transpose(0, 1).contiguous()
    scores = base2_from_natural(lses.float()).transpose(0, 1).contiguous()
    merged, lse = library.merge_states(v=states, s=scores)
    return merged, natural_from_base2(lse)
