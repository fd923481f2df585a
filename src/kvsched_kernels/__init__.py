"""A plan as tensors, and attention over pages: the thin adapter between a kvsched plan and a forward pass.

What lives here: the paged key and value store, the tensors of one step, attention over them (FlashInfer on CUDA, a torch
reference anywhere), merging of partial attention, page copies, graph capture, a memory meter. No decision is made here, and
no model is known here.
"""

from __future__ import annotations

from kvsched_kernels.attention import Attention
from kvsched_kernels.batch import Batch, BatchBuilder
from kvsched_kernels.errors import KernelError
from kvsched_kernels.flashinfer import FlashInferAttention
from kvsched_kernels.graphs import DecodeGraphs
from kvsched_kernels.merge import merge
from kvsched_kernels.meter import MemoryMeter
from kvsched_kernels.offload import HostPages, copy_pages
from kvsched_kernels.reference import ReferenceAttention
from kvsched_kernels.store import PagedStore

__all__ = ["Attention", "Batch", "BatchBuilder", "DecodeGraphs", "FlashInferAttention", "HostPages", "KernelError", "MemoryMeter",
           "PagedStore", "ReferenceAttention", "copy_pages", "merge"]
