"""The paged key and value store: two tensors per layer, and their bytes.

What does not live here: who owns a page (the scheduler), and which token goes where (`kvsched_kernels.batch`).
"""

from __future__ import annotations

import torch

from kvsched_kernels.errors import KernelError, at_least_one

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types a store can have. Quantized caches need scales, which this one does not keep."""


class PagedStore:
    """Keys and values of every layer, [pages + 1, page_size, kv_heads, head_dim] each (NHD), zeros at first.

    layers, pages, page_size, kv_heads, head_dim: integers of at least 1. dtype: one of `FLOATS`. Page ids are the
    scheduler's, 0 to pages - 1. The page after them is `scratch`: nobody's, and what a padded row writes to.
    Raises `KernelError` naming what was wrong and what is allowed. Cost: the memory is taken here, once.

    >>> store = PagedStore(layers=2, pages=8, page_size=16, kv_heads=2, head_dim=4, dtype=torch.float32)
    >>> store.k[0].shape, store.scratch, store.bytes
    (torch.Size([9, 16, 2, 4]), 8, 18432)
    """

    def __init__(self, *, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        at_least_one(layers=layers, pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim)
        if dtype not in FLOATS:
            raise KernelError(f"dtype must be one of {', '.join(map(str, FLOATS))}, not {dtype!r}")
        self.layers, self.pages, self.page_size = layers, pages, page_size
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.device = torch.device(device)
        shape = (pages + 1, page_size, kv_heads, head_dim)
        self.k = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(layers))
        self.v = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(layers))

    @property
    def scratch(self) -> int:
        """Page id of the page that belongs to nobody."""
        return self.pages

    @property
    def bytes(self) -> int:
        """Bytes of both tensors of all layers, the scratch page included."""
        return sum(tensor.nbytes for tensor in (*self.k, *self.v))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        return self.k[index], self.v[index]

    def write(self, index: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put keys and values [tokens, kv_heads, head_dim] of one layer at slots int64 [tokens] (page x page_size + offset)."""
        self.k[index].view(-1, self.kv_heads, self.head_dim).index_copy_(0, slots, k)
        self.v[index].view(-1, self.kv_heads, self.head_dim).index_copy_(0, slots, v)
