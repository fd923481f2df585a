"""The adapter's own logic where there is no GPU: what it cuts out of a batch for which FlashInfer call, and what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import emulated_flashinfer
import pytest
import torch
from mixed import KINDS, Shape, kind, life

import kvsched_kernels.flashinfer as adapter
from kvsched_kernels import KernelError, PagedStore
from kvsched_kernels.flashinfer import FlashInferAttention, load_library, merged_states
from kvsched_kernels.merge import gate_agreement, gate_determinism, merge

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings of values around 1 to 11, and to 8 bits."""


def store(dtype: torch.dtype = torch.float16, head_dim: int = 64, kv_heads: int = 2) -> PagedStore:
    return PagedStore(layers=1, pages=8, page_size=4, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def emulated(kept: PagedStore, heads: int) -> FlashInferAttention:
    return FlashInferAttention(kept, heads=heads, workspace_bytes=64, library=emulated_flashinfer)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(2, 2, torch.float16), (6, 2, torch.bfloat16), (8, 1, torch.float16)])
def test_mixed_batches_meet_the_reference(page: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    shape = Shape(page, heads, kv_heads, 64, dtype)
    seen = set()
    for step in life(shape, lambda kept: emulated(kept, heads)):
        gate_agreement(step.out.float(), step.wanted, tolerance=TOLERANCE[dtype])
        seen.add(kind(step.batch))
    assert seen == set(KINDS)


def test_attention_with_its_log_sum_exp_writes_nothing_and_is_natural() -> None:
    made: list[FlashInferAttention] = []

    def make(kept: PagedStore) -> FlashInferAttention:
        made.append(emulated(kept, 4))
        return made[0]

    for step in life(Shape(16, 4, 2, 64, torch.float16), make):
        attention = made[0]
        cache = attention.store.layer(step.layer)
        before = [side.clone() for side in cache]
        out, lse = attention.attend(step.layer, step.q)
        assert torch.equal(out, step.out)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, cache, strict=True))
        keys, _ = emulated_flashinfer.rows(cache, step.batch.kv_indptr, step.batch.kv_indices, step.batch.last_page_len, 0)
        seen = len(keys) - int(step.batch.qo_indptr_host[1]) + 1  # the row's first token sees as much
        scores = keys[:seen, 0].float() @ step.q[0, 0].float() / math.sqrt(64)
        assert lse[0, 0].item() == pytest.approx(torch.logsumexp(scores, 0).item(), abs=1e-3)
        assert lse.dtype == torch.float32


@pytest.mark.parametrize("heads", [2, 6, 8, 16])
def test_tensor_cores_decode_where_groups_are_wide(heads: int) -> None:
    attention = emulated(store(), heads)
    assert attention.tensor_cores is (heads >= 8)
    assert attention._decode.given["use_tensor_cores"] is attention.tensor_cores


def test_the_workspace_is_taken_once_and_is_zero() -> None:
    attention = emulated(store(), 4)
    spaces = [wrapper.given["float_workspace_buffer"] for wrapper in (attention._decode, attention._prefill)]
    assert all(space is attention.workspace for space in spaces)
    assert (attention.workspace.nbytes, int(attention.workspace.sum())) == (64, 0)


def test_the_scale_is_the_hosts_where_it_names_one() -> None:
    assert emulated(store(), 4).scale == 1 / 8
    assert FlashInferAttention(store(), heads=4, scale=0.5, workspace_bytes=64, library=emulated_flashinfer).scale == 0.5


@pytest.mark.parametrize(("kept", "heads", "message"), [
    (store(), 4, "needs a store on a CUDA device, not on cpu; ReferenceAttention runs anywhere"),
    (store(), 3, "heads must be a multiple of kv_heads = 2, not 3"),
    (store(), 0, "heads must be an integer of at least 1"),
])
def test_what_flashinfer_cannot_do_is_refused(kept: PagedStore, heads: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        FlashInferAttention(kept, heads=heads)


@pytest.mark.parametrize(("kept", "message"), [
    (store(torch.float32), r"takes a store of torch\.float16 or torch\.bfloat16, not of torch\.float32"),
    (store(head_dim=80), "takes a head_dim of 64, 128, 256, not 80"),
])
def test_types_and_sizes_without_a_kernel_are_refused(kept: PagedStore, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        emulated(kept, 4)


def test_a_missing_package_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(adapter, "importlib", SimpleNamespace(import_module=absent))
    with pytest.raises(KernelError, match=r"FlashInfer cannot be imported \(No module named 'flashinfer'\); install flashinfer-python"):
        load_library()


def test_running_comes_after_begin_and_in_the_type_of_the_store() -> None:
    attention = emulated(store(), 4)
    token, kv = torch.zeros(1, 4, 64, dtype=torch.float16), torch.zeros(1, 2, 64, dtype=torch.float16)
    with pytest.raises(KernelError, match=r"begin\(batch\) comes before run"):
        attention.run(0, token, kv, kv)
    for step in life(Shape(4, 4, 2, 64, torch.float16), lambda kept: emulated(kept, 4), requests=2):
        attention.begin(step.batch)
        with pytest.raises(KernelError, match=r"must be of the store's type, torch\.float16, not torch\.float32"):
            attention.run(0, token.float(), kv.float(), kv.float())
        break


# States merged by FlashInfer.


def partials(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lses = torch.randn((3, 5, 2), generator=generator)
    lses[1, 2] = lses[:, 4] = -torch.inf
    outputs = torch.randn((3, 5, 2, 64), generator=generator).to(torch.float16)
    outputs[1, 2] = torch.nan
    return [outputs, lses]


def by_flashinfer(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merged_states(outputs, lses, library=emulated_flashinfer)


def test_merged_states_are_what_merge_gives() -> None:
    inputs = partials(2)
    out, lse = by_flashinfer(*inputs)
    gate_agreement((out, lse), merge(*inputs), tolerance=2e-3)
    gate_determinism(by_flashinfer, inputs)
    assert out[4].tolist() == torch.zeros(2, 64).tolist()
    assert lse[4].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize(("outputs", "lses", "message"), [
    (torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1), "needs tensors on a CUDA device, not on cpu; merge runs anywhere"),
    (torch.zeros(2, 3, 64), torch.zeros(2, 3), "outputs must be"),
])
def test_states_that_flashinfer_cannot_merge_are_refused(outputs: torch.Tensor, lses: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        merged_states(outputs, lses)


def test_states_of_other_types_are_refused() -> None:
    with pytest.raises(KernelError, match=r"takes outputs of torch\.float16 or torch\.bfloat16, not of torch\.float32"):
        by_flashinfer(torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1))
