"""Law I1: merged partials are the unsplit attention, in rank order, and both gates can fail."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched_kernels import PagedStore, reference
from kvsched_kernels.errors import KernelError
from kvsched_kernels.merge import (
    GateFailed,
    NotDeterministic,
    NotInAgreement,
    base2_from_natural,
    gate_agreement,
    gate_determinism,
    in_rank_order,
    merge,
    natural_from_base2,
)

TOLERANCE = 1e-10
"""Law I1: a sharded merge meets a monolithic softmax to this in float64."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax over all keys: q [tokens, heads, dim], k and v [keys, heads, dim], mask [tokens, keys] of what is seen."""
    scores = torch.einsum("thd,khd->thk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1) if k.shape[0] else torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.einsum("thk,khd->thd", weights, v), lse


def sample(seed: int, tokens: int, keys: int, heads: int, dim: int, spread: float = 1.0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, dim), (keys, heads, dim), (keys, heads, dim))
    return [torch.randn(shape, generator=random, dtype=torch.float64) * spread for shape in shapes]


def sharded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials of the shards between `cuts`, stacked."""
    edges = [0, *cuts, k.shape[0]]
    parts = [attend(q, k[a:b], v[a:b], mask[:, a:b]) for a, b in itertools.pairwise(edges)]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_sharded_merge_meets_a_monolithic_softmax(data: st.DataObject) -> None:
    tokens, keys, heads, dim = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (1, 40), (1, 3), (1, 8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=5)))
    causal = data.draw(st.booleans())
    q, k, v = sample(data.draw(st.integers(0, 1000)), tokens, keys, heads, dim, data.draw(st.sampled_from([0.01, 1.0, 30.0])))
    mask = torch.ones((tokens, keys), dtype=torch.bool).tril(keys - tokens) if causal else torch.ones((tokens, keys), dtype=torch.bool)
    unsplit = attend(q, k, v, mask)
    merged = merge(*sharded(q, k, v, mask, cuts))
    gate_agreement(merged, unsplit, tolerance=TOLERANCE)
    assert not merged[0].isnan().any()


def test_a_shard_of_which_nothing_is_seen_contributes_nothing() -> None:
    outputs = torch.tensor([[[[3.0, 4.0]]], [[[math.nan, math.inf]]]], dtype=torch.float64)
    lses = torch.tensor([[[0.5]], [[-math.inf]]], dtype=torch.float64)
    out, lse = merge(outputs, lses)
    assert out.tolist() == [[[3.0, 4.0]]]
    assert lse.tolist() == [[0.5]]


def test_where_no_part_saw_a_key_the_result_is_zero() -> None:
    out, lse = merge(torch.full((3, 2, 1, 4), math.nan), torch.full((3, 2, 1), -math.inf))
    assert out.tolist() == torch.zeros(2, 1, 4).tolist()
    assert lse.tolist() == [[-math.inf], [-math.inf]]


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    outputs = torch.tensor([1.0, 2.0, 5.0]).reshape(3, 1, 1, 1)
    for lses, expected in (([1e4, 1e4, -1e4], 1.5), ([-1e4, -1e4, -1e4], 8 / 3), ([3e38, -3e38, 0.0], 1.0)):
        out, lse = merge(outputs, torch.tensor(lses).reshape(3, 1, 1))
        assert out.item() == pytest.approx(expected, rel=1e-6)
        assert math.isfinite(lse.item())


def test_a_not_a_number_is_not_hidden() -> None:
    out, _ = merge(torch.tensor([1.0, math.nan]).reshape(2, 1, 1, 1), torch.zeros(2, 1, 1))
    assert out.isnan().all()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_in_float32_and_the_output_has_the_type_of_the_parts(kind: torch.dtype) -> None:
    q, k, v = sample(5, 3, 24, 2, 8)
    mask = torch.ones((3, 24), dtype=torch.bool)
    outputs, lses = sharded(q, k, v, mask, [5, 11])
    out, lse = merge(outputs.to(kind), lses.to(torch.float32))
    assert (out.dtype, lse.dtype) == (kind, torch.float32)
    gate_agreement(out, attend(q, k, v, mask)[0], tolerance=4 * torch.finfo(kind).eps)


def test_the_sum_is_in_rank_order_and_another_order_gives_other_bytes() -> None:
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn((4, 8, 2, 16), generator=random)
    lses = torch.randn((4, 8, 2), generator=random)
    parts = {rank: (outputs[rank], lses[rank]) for rank in range(4)}
    expected = merge(outputs, lses)
    others = 0
    for order in itertools.permutations(range(4)):
        arrived = {rank: parts[rank] for rank in order}
        ours = merge(*in_rank_order(arrived))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), order
        by_arrival = merge(outputs[list(order)], lses[list(order)])
        gate_agreement(by_arrival, expected, tolerance=1e-5)  # the same sum
        others += not torch.equal(by_arrival[0], expected[0])  # in other bytes
    assert others > 0


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_pages_dealt_to_ranks_merge_to_the_attention_over_all(ranks: int) -> None:
    """What a host does that splits KV by tokens: a rank holds every n-th page of each row, and of a short row some hold none."""
    page, heads, kv_heads, width = 4, 6, 2, 8
    store = PagedStore(layers=1, pages=16, page_size=page, kv_heads=kv_heads, head_dim=width, dtype=torch.float64)
    random = torch.Generator().manual_seed(4)
    for side in store.layer(0):
        side.copy_(torch.randn(side.shape, generator=random, dtype=torch.float64))
    q = torch.randn((2, 1, heads, width), generator=random, dtype=torch.float64)
    tables, lengths = ([9, 3, 14, 0, 7], [5]), (18, 2)

    def over(deal: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of both rows over the pages that a rank was dealt: [rows, heads, width] and [rows, heads]."""
        answers = []
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            positions = torch.arange(len(table) * page).view(-1, page)[deal].flatten()
            keys, values = (side[torch.tensor(table[deal], dtype=torch.int64)].flatten(0, 1).unsqueeze(0) for side in store.layer(0))
            answers.append(reference.attend(q[row : row + 1], keys, values, (positions < length).view(1, 1, -1), width**-0.5))
        return torch.cat([out[:, 0] for out, _ in answers]), torch.cat([lse[:, 0] for _, lse in answers])

    arrived = {rank: over(slice(rank, None, ranks)) for rank in reversed(range(ranks))}
    gate_agreement(merge(*in_rank_order(arrived)), over(slice(None)), tolerance=TOLERANCE)


def test_every_rank_must_have_sent_its_part() -> None:
    part = (torch.zeros(1, 1, 2), torch.zeros(1, 1))
    with pytest.raises(KernelError, match=r"has \[0, 3\], missing \[1, 2\]"):
        in_rank_order({3: part, 0: part})
    with pytest.raises(KernelError, match="at least one rank"):
        in_rank_order({})


def test_logarithms_are_changed_explicitly() -> None:
    natural = torch.tensor([0.0, 1.5, -math.inf], dtype=torch.float64)
    assert base2_from_natural(natural)[1].item() == pytest.approx(1.5 / math.log(2))
    assert torch.allclose(natural_from_base2(base2_from_natural(natural)), natural)
    q, k, v = sample(9, 2, 30, 2, 4)
    mask = torch.ones((2, 30), dtype=torch.bool)
    outputs, lses = sharded(q, k, v, mask, [7, 20])
    wrong = merge(outputs, base2_from_natural(lses))
    with pytest.raises(NotInAgreement):
        gate_agreement(wrong[0], attend(q, k, v, mask)[0], tolerance=TOLERANCE)


@pytest.mark.parametrize(("outputs", "lses", "message"), [
    (torch.zeros(2, 3, 4), torch.zeros(2, 3), r"outputs must be \[parts, tokens, heads, head_dim\]"),
    (torch.zeros(0, 3, 1, 4), torch.zeros(0, 3, 1), "at least one part"),
    (torch.zeros(2, 3, 1, 4), torch.zeros(2, 1, 3), r"lses must be \[parts, tokens, heads\] = \[2, 3, 1\], not \[2, 1, 3\]"),
    (torch.zeros(2, 3, 1, 4, dtype=torch.int32), torch.zeros(2, 3, 1), "must be floating point, not torch.int32"),
    (torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, device="meta"), "must be on one device, not on cpu and meta"),
])
def test_parts_that_do_not_fit_are_named(outputs: torch.Tensor, lses: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        merge(outputs, lses)


def test_no_tokens_merge_to_no_tokens() -> None:
    out, lse = merge(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3))
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))


# The gates.


def parts(seed: int) -> list[torch.Tensor]:
    q, k, v = sample(seed, 4, 32, 2, 8)
    outputs, lses = sharded(q, k, v, torch.ones((4, 32), dtype=torch.bool), [9, 17])
    return [outputs.float(), lses.float()]


@pytest.mark.parametrize("seed", range(3))
def test_the_merge_passes_the_gate_of_determinism(seed: int) -> None:
    gate_determinism(merge, parts(seed))


def test_a_merge_in_order_of_arrival_fails_the_gate_of_determinism() -> None:
    arrivals = itertools.cycle(([0, 1, 2], [2, 1, 0]))

    def by_arrival(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = next(arrivals)
        return merge(outputs[order], lses[order])

    with pytest.raises(NotDeterministic, match=r"output 0: \d+ of 64 elements differ between two runs") as caught:
        gate_determinism(by_arrival, parts(1))
    assert caught.value.output == 0
    assert 0 < caught.value.differing <= caught.value.elements == 64
    assert len(caught.value.index) == 3
    assert isinstance(caught.value, GateFailed)


def test_the_gate_of_determinism_has_no_tolerance() -> None:
    signs = itertools.cycle((0.0, -0.0))
    with pytest.raises(NotDeterministic, match=r"1 of 1 elements differ .* 0\.0 and then -0\.0"):
        gate_determinism(lambda: torch.tensor(next(signs)), [])
    quiet = torch.tensor([math.nan])
    gate_determinism(lambda x: x, [quiet])
    gate_determinism(lambda x: (x[:0], x), [quiet])


def test_another_shape_or_type_is_not_deterministic() -> None:
    kinds = itertools.cycle((torch.float32, torch.float64))
    with pytest.raises(NotDeterministic, match=r"gave \['\[2\] torch.float32'\] and then \['\[2\] torch.float64'\]"):
        gate_determinism(lambda: torch.zeros(2, dtype=next(kinds)), [])


def test_each_run_of_the_gate_has_its_own_inputs() -> None:
    inputs = [torch.ones(3)]
    gate_determinism(lambda x: x.mul_(2.0), inputs)
    assert inputs[0].tolist() == [1.0, 1.0, 1.0]


def test_the_gate_of_determinism_wants_inputs_from_the_cpu() -> None:
    with pytest.raises(KernelError, match="sampled on the CPU: input 1 is on meta"):
        gate_determinism(merge, [torch.zeros(1), torch.zeros(1, device="meta")])


def forgets_to_normalize(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.exp(lses - lses.amax(0))
    return (weights.unsqueeze(-1) * outputs).sum(0), torch.logsumexp(lses, 0)


def takes_the_mean(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.mean(0), torch.logsumexp(lses, 0)


def loses_the_last(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(outputs[:-1], lses[:-1])


@pytest.mark.parametrize("broken", [forgets_to_normalize, takes_the_mean, loses_the_last])
def test_a_broken_merge_fails_the_gate_of_agreement(broken: object) -> None:
    assert callable(broken)
    q, k, v = sample(3, 4, 32, 2, 8)
    mask = torch.ones((4, 32), dtype=torch.bool)
    unsplit, split = attend(q, k, v, mask), sharded(q, k, v, mask, [9, 17])
    gate_agreement(merge(*split), unsplit, tolerance=TOLERANCE)
    with pytest.raises(NotInAgreement, match="the tolerance is 1e-10") as caught:
        gate_agreement(broken(*split), unsplit, tolerance=TOLERANCE)
    assert caught.value.error > caught.value.tolerance == TOLERANCE
    assert abs(caught.value.merged - caught.value.unsplit) == caught.value.error


def test_the_gate_of_agreement_has_no_default_tolerance() -> None:
    with pytest.raises(TypeError, match="tolerance"):
        gate_agreement(torch.zeros(1), torch.zeros(1))  # type: ignore[call-arg]  # what is tested: it must be given
    for wrong in (-1e-9, math.nan, math.inf, True, "1e-9"):
        with pytest.raises(KernelError, match="tolerance must be a finite number of at least 0"):
            gate_agreement(torch.zeros(1), torch.zeros(1), tolerance=wrong)  # type: ignore[arg-type]  # a string is among them


def test_agreement_says_where_and_by_how_much() -> None:
    assert gate_agreement(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.25]), tolerance=0.25) == 0.25
    with pytest.raises(NotInAgreement, match=r"output 1: off by 0\.5 at \[1, 0\], where merged is 2\.0 and unsplit 2\.5") as caught:
        gate_agreement((torch.zeros(1), torch.tensor([[1.0], [2.0]])), (torch.zeros(1), torch.tensor([[1.0], [2.5]])), tolerance=0.25)
    assert (caught.value.output, caught.value.index, caught.value.beyond) == (1, (1, 0), 1)


def test_infinities_agree_with_themselves_and_no_number_with_nothing() -> None:
    low = torch.tensor([-math.inf])
    assert gate_agreement(low, low, tolerance=0.0) == 0.0
    for other in (math.inf, 0.0, math.nan):
        with pytest.raises(NotInAgreement):
            gate_agreement(low, torch.tensor([other]), tolerance=1e9)
    with pytest.raises(NotInAgreement, match="off by nan"):
        gate_agreement(torch.tensor([math.nan]), torch.tensor([math.nan]), tolerance=1.0)
    with pytest.raises(KernelError, match=r"same shapes, not \[\[1\]\] and \[\[2\]\]"):
        gate_agreement(torch.zeros(1), torch.zeros(2), tolerance=1.0)
    assert gate_agreement(torch.zeros(0), torch.zeros(0), tolerance=0.0) == 0.0
