"""What a model asks of attention over pages. Only the protocol lives here; `reference` and `flashinfer` have it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from kvsched_kernels.batch import Batch


@runtime_checkable
class Attention(Protocol):
    """Causal attention of the rows of a batch over their pages, layer by layer."""

    def begin(self, batch: Batch) -> None:
        """Prepare for a batch: once per step, before the layers."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v [tokens, kv_heads, head_dim] to the batch's slots, then attend with q [tokens, heads, head_dim].

        A token attends to every position of its row up to its own. Returns [tokens, heads, head_dim].
        """
