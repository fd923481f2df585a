"""The forward pass: a plan goes in, sampled tokens come out. Runs in the engine's device thread, one plan at a time.

What lives here: plan to tensors, the model, sampling, and what a failure means. What does not: any decision.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch

from kvsched.plan import Plan, StepResult
from kvsched_kernels import Attention, BatchBuilder, PagedStore, ReferenceAttention
from reference_server.sampling import GREEDY, Sampler, Sampling, perplexed

log = logging.getLogger("reference_server")


class Geometry(Protocol):
    """What the executor and the engine need to know of a model's config."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


class Model(Protocol):
    """What the executor runs: `reference_server.model.Llama` is one."""

    @property
    def config(self) -> Any:
        """A `Geometry`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, last: torch.Tensor) -> torch.Tensor:
        """Logits [m, vocabulary] after the tokens at `last`."""


class ModelExecutor:
    """Runs plans through a model over a paged store of its own (`kvsched.protocols.Executor`).

    model: see `Model`. pages, page_size: the scheduler's pool.
    """

    def __init__(self, model: Model, *, pages: int, page_size: int) -> None:
        config: Geometry = model.config
        self.model = model
        self.store = PagedStore(layers=config.layers, pages=pages, page_size=page_size, kv_heads=config.kv_heads,
                                head_dim=config.head_dim, dtype=model.dtype, device=model.device)
        self.builder = BatchBuilder(page_size=page_size, device=model.device)
        self.attention = _attention(self.store, config.heads)
        self.sampler = Sampler()
        self._sampling: dict[str, tuple[Sampling, int]] = {}

    def add(self, key: str, sampling: Sampling, child: int = 0) -> None:
        """A request may appear in plans from now on. child: which of its parent's samples it is."""
        self._sampling[key] = (sampling, child)

    def drop(self, key: str) -> None:
        """A request has ended. It may still stand in a plan under way."""
        self._sampling.pop(key, None)

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan. A model that raises fails every row of it; logits that are not finite fail their own row."""
        if not plan:
            self.builder.apply(plan)
            return StepResult(tokens=[])
        n = len(plan)
        with torch.inference_mode():
            batch = self.builder.build(plan)
            for chunk in plan.prefill:
                sampling, child = self._sampling.get(chunk.id, (GREEDY, 0))
                self.sampler.bind(chunk.row, sampling, child)
            tokens = np.zeros(n, np.int64)
            try:
                self.attention.begin(batch)
                # The last token of every row, those that sample nothing included: it has attended to all that the row wrote, so
                # what is no number there is seen before it goes into the prefix cache.
                ends = batch.last if len(batch.sampling) == n else batch.qo_indptr[1:].long() - 1
                logits = self.model(batch.token_ids, batch.positions, self.attention, ends)
                bad = perplexed(logits)
                if bad.any():
                    logits = torch.where(torch.from_numpy(bad).to(logits.device)[:, None], torch.zeros_like(logits), logits)
                if len(batch.sampling):
                    if len(batch.sampling) < n:
                        logits = logits[torch.from_numpy(batch.sampling).to(logits.device)]
                    rows, after = plan.rows[batch.sampling], (plan.starts + plan.counts)[batch.sampling]
                    chosen = self.sampler.choose(logits, rows, after)
                    self.builder.note(batch, chosen)
                    tokens[batch.sampling] = chosen.cpu().numpy()
            except Exception:  # whatever a model raises: its requests fail, and the server goes on
                log.exception("step %d failed with %d rows", plan.step, n)
                return StepResult(tokens=tokens, failed=np.arange(n))
        if bad.any():
            log.error("step %d: logits of %d rows are not finite", plan.step, int(bad.sum()))
            return StepResult(tokens=tokens, failed=np.flatnonzero(bad))
        return StepResult(tokens=tokens)


def _attention(store: PagedStore, heads: int) -> Attention:
    if store.device.type == "cuda":
        from kvsched_kernels.flashinfer import FlashInferAttention  # noqa: PLC0415  # FlashInfer is there on CUDA machines only

        return FlashInferAttention(store, heads=heads)
    return ReferenceAttention(store, heads=heads)
