"""Attention over pages in plain torch: the yardstick for the fast one, and what runs where there is no CUDA.

It reads what was written and nothing else: a slot past the end of a row, whatever stands there, has no effect.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvsched_kernels.batch import Batch
from kvsched_kernels.errors import KernelError, at_least_one
from kvsched_kernels.store import PagedStore


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query attention and its log-sum-exp.

    q: [rows, queries, heads, head_dim]. k, v: [rows, keys, kv_heads, head_dim]; heads is a multiple of kv_heads, and
    consecutive heads share one of k. allowed: bool [rows, queries, keys], which keys a query sees; what stands at a key that no
    query of the row sees may be anything, even no number. Returns [rows, queries, heads, head_dim]
    and float [rows, queries, heads], the natural logarithm of the sum of exponentials; a query that sees nothing gives
    0 and -inf. The softmax runs in float32 for half precision.
    """
    seen = allowed.any(1)
    return _attend(q, k, torch.where(seen[:, :, None, None], v, v.new_zeros(())), ~allowed, scale)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocked: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where every value is a number, with the mask turned round. The heads that share a key are queries of one product."""
    rows, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    share = heads // groups
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    query = (q.to(wide) * scale).view(rows, queries, groups, share, width).permute(0, 2, 3, 1, 4).reshape(rows * groups, share * queries, width)
    key = k.to(wide).permute(0, 2, 3, 1).reshape(rows * groups, width, keys)
    value = v.to(wide).permute(0, 2, 1, 3).reshape(rows * groups, keys, width)
    score = torch.bmm(query, key).view(rows, groups, share, queries, keys)
    score.masked_fill_(blocked[:, None, None], -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = score.sub_(torch.where(lse == -math.inf, lse.new_zeros(()), lse).unsqueeze(-1)).exp_()
    out = torch.bmm(weight.view(rows * groups, share * queries, keys), value).view(rows, groups, share, queries, width)
    out = out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, width).to(q.dtype)
    return out, lse.permute(0, 3, 1, 2).reshape(rows, queries, heads)


class ReferenceAttention:
    """`Attention` over a `PagedStore` in torch, on any device.

    store: where keys and values live. heads: query heads, a multiple of the store's kv_heads. scale: of the scores; None
    for 1 / sqrt(head_dim). Decodes run as one padded batch, prefill rows one by one.
    Cost: memory of the longest decode's length x decodes in a copy per layer.
    """

    def __init__(self, store: PagedStore, *, heads: int, scale: float | None = None) -> None:
        at_least_one(heads=heads)
        if heads % store.kv_heads:
            raise KernelError(f"heads must be a multiple of kv_heads = {store.kv_heads}, not {heads!r}")
        self.store = store
        self.heads = heads
        self.scale = 1 / math.sqrt(store.head_dim) if scale is None else scale
        self._batch: Batch | None = None
        self._pages = torch.zeros(0, dtype=torch.int64)
        self._blocked = torch.zeros(0, dtype=torch.bool)
        self._unseen = torch.zeros(0, dtype=torch.int64)
        self._chunks: list[tuple[slice, torch.Tensor, int, torch.Tensor]] = []

    def begin(self, batch: Batch) -> None:
        """Look up pages and masks of the batch, once for all layers."""
        store, d, device = self.store, batch.decodes, self.store.device
        self._batch = batch
        if d:
            lengths = batch.kv_len[:d].long()
            longest = int(batch.kv_len_host[:d].max())
            columns = -(-longest // store.page_size)
            held = np.diff(batch.kv_indptr_host[: d + 1])
            mask = torch.from_numpy(np.arange(columns) < held[:, None]).to(device)
            self._pages = torch.full((d, columns), store.scratch, dtype=torch.int64, device=device)
            self._pages[mask] = batch.kv_indices[: int(batch.kv_indptr_host[d])].long()
            blocked = torch.arange(columns * store.page_size, device=device) >= lengths[:, None]
            self._unseen = blocked.view(-1).nonzero()[:, 0]
            self._blocked = blocked.unsqueeze(1)
        self._chunks = []
        for i in range(d, batch.rows):
            begin, end = int(batch.qo_indptr_host[i]), int(batch.qo_indptr_host[i + 1])
            length = int(batch.kv_len_host[i])
            pages = batch.kv_indices[int(batch.kv_indptr_host[i]) : int(batch.kv_indptr_host[i + 1])].long()
            first = length - (end - begin)
            ahead = torch.arange(length, device=device) > torch.arange(first, length, device=device)[:, None]
            self._chunks.append((slice(begin, end), pages, length, ahead.unsqueeze(0)))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write, then attend. Raises `KernelError` before `begin`."""
        batch, store = self._batch, self.store
        if batch is None:
            raise KernelError("begin(batch) comes before run()")
        store.write(layer, batch.slots, k, v)
        keys, values = store.layer(layer)
        out = torch.empty_like(q)
        d = batch.decodes
        if d:
            shape = (d, -1, store.kv_heads, store.head_dim)
            key, value = keys[self._pages].view(shape), values[self._pages].view(shape)
            value.view(-1, store.kv_heads * store.head_dim).index_fill_(0, self._unseen, 0)  # of a copy: 0 x what stood there might be no number
            out[:d] = _attend(q[:d].unsqueeze(1), key, value, self._blocked, self.scale)[0][:, 0]
        for span, pages, length, ahead in self._chunks:
            key, value = (part[pages].view(1, -1, store.kv_heads, store.head_dim)[:, :length] for part in (keys, values))
            out[span] = _attend(q[span].unsqueeze(0), key, value, ahead, self.scale)[0][0]
        return out
