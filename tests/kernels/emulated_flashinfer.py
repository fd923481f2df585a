"""The FlashInfer calls that the adapter makes, done in torch on the CPU: for the adapter's logic where there is no GPU.

What they compute follows from the package's documentation of each call. What they accept is not written here at all: each
call is bound to the signature of the installed package's own function, and refused where that would refuse it.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import flashinfer
import torch

from kvsched_kernels.reference import attend

Cache = tuple[torch.Tensor, torch.Tensor]


def bound(real: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by the name that the real function gives them, its defaults included. TypeError where it takes no such call."""
    arguments = inspect.signature(real).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


def rows(cache: Cache, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, row: int) -> Cache:
    """Keys and values of one row, [length, kv_heads, head_dim]."""
    pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
    length = (len(pages) - 1) * cache[0].shape[1] + int(last[row])
    keys, values = (side[pages].flatten(0, 1)[:length] for side in cache)
    return keys, values


class _Planned:
    """What both wrappers do: remember a plan, and attend row by row."""

    kind: Any
    plan_call: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(self.kind.__init__, self, *args, **kwargs)
        assert given["kv_layout"] == "NHD"
        assert given["backend"] == "auto"
        self.given = given
        self.planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = planned = bound(type(self).plan_call, self, *args, **kwargs)
        for key in ("indptr", "last_page_len", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
            tensor = planned.get(key)
            assert tensor is None or (tensor.device.type, tensor.dtype) == ("cpu", torch.int32), key

    def answer(self, given: dict[str, Any], spans: list[tuple[int, int]], causal: bool) -> Any:
        planned, q, cache = self.planned, given["q"], given["paged_kv_cache"]
        indptr, indices, last = (planned[key] for key in self.names)
        assert (q.dtype, cache[0].dtype) == (planned["q_data_type"], planned["kv_data_type"])
        assert q.shape[1:] == (planned["num_qo_heads"], cache[0].shape[3])
        assert cache[0].shape[1:3] == (planned["page_size"], planned["num_kv_heads"])
        assert len(q) == spans[-1][1]
        out = torch.empty_like(q) if given["out"] is None else given["out"]
        lse = torch.empty(q.shape[:2]) if given["lse"] is None else given["lse"]
        for row, (begin, end) in enumerate(spans):
            keys, values = rows(cache, indptr, indices, last, row)
            seen = torch.ones(end - begin, len(keys), dtype=torch.bool)
            seen = seen.tril(len(keys) - (end - begin)) if causal else seen
            some, natural = attend(q[begin:end].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), seen.unsqueeze(0), planned["sm_scale"])
            out[begin:end], lse[begin:end] = some[0], natural[0] / math.log(2)
        return (out, lse) if given["return_lse"] else out

    names: tuple[str, str, str]


class BatchDecodeWithPagedKVCacheWrapper(_Planned, flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    """One token per row. With use_cuda_graph, plan() copies into the buffers that were given, and run() reads those."""

    kind = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    plan_call = flashinfer.BatchDecodeWithPagedKVCacheWrapper._plan_impl
    names = ("indptr", "indices", "last_page_len")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        if self.given["use_cuda_graph"]:
            for name in self.names:
                buffer, value = self.given[f"paged_kv_{name}_buffer"], self.planned[name]
                assert name == "indices" or len(buffer) == len(value)
                buffer[: len(value)].copy_(value)
                self.planned[name] = buffer

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = bound(self.kind.run, self, *args, **kwargs)
        return self.answer(given, [(i, i + 1) for i in range(len(self.planned["last_page_len"]))], causal=False)


class BatchPrefillWithPagedKVCacheWrapper(_Planned, flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """Rows of any number of tokens, the last of which is the last position of the row."""

    kind = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    plan_call = flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = bound(self.kind.run, self, *args, **kwargs)
        assert given["lse_base"] == "log2"
        edges = self.planned["qo_indptr"].tolist()
        assert (edges[0], self.planned["paged_kv_indptr"][0].item()) == (0, 0)
        return self.answer(given, list(itertools.pairwise(edges)), causal=self.planned["causal"])


def append_paged_kv_cache(*args: Any, **kwargs: Any) -> None:
    """Write each token at its position of its row."""
    given = bound(flashinfer.append_paged_kv_cache, *args, **kwargs)
    keys, values = given["paged_kv_cache"]
    indptr, indices, page = given["kv_indptr"].tolist(), given["kv_indices"].tolist(), keys.shape[1]
    assert given["batch_indices"].dtype == given["positions"].dtype == torch.int32
    for token, (row, position) in enumerate(zip(given["batch_indices"].tolist(), given["positions"].tolist(), strict=True)):
        at = indices[indptr[row] + position // page]
        keys[at, position % page], values[at, position % page] = given["append_key"][token], given["append_value"][token]


def merge_states(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge [tokens, parts, heads, head_dim] by base-2 log-sum-exp [tokens, parts, heads]."""
    given = bound(flashinfer.merge_states, *args, **kwargs)
    assert given["v"].is_contiguous()
    assert given["s"].is_contiguous()
    score = given["s"].double()
    total = torch.logsumexp(score * math.log(2), 1) / math.log(2)
    weight = torch.exp2(score - total.unsqueeze(1).nan_to_num(neginf=0.0))
    return (weight.unsqueeze(-1) * given["v"].double()).sum(1).to(given["v"].dtype), total.float()
