"""Draws: what they depend on, and that their shares are those of the softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.errors import InvalidRequest
from reference_server.sampling import HEAD, MOST_SEED, Sampler, Sampling, draw, perplexed, seeded


@pytest.mark.parametrize(("key", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", True), ("temperature", "1"), ("temperature", 101),
    ("top_p", 0), ("top_p", 1.1), ("top_p", None), ("seed", -1), ("seed", 1.0), ("seed", 2**63),
])
def test_parameters_are_checked(key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} must be"):
        Sampling(**{key: value})


def test_any_integer_of_a_client_is_a_seed() -> None:
    assert [seeded(value, 5) for value in (None, 0, 7, -1, 2**64)] == [5, 0, 7, MOST_SEED, 0]


def plain(logits: list[float], temperature: float, top_p: float, uniform: float) -> int:
    """Inverse transform the plain way, one row."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    shares = [weight / sum(weights) for weight in weights]
    order = list(range(len(shares)))
    if top_p < 1:
        order.sort(key=lambda i: (-shares[i], i))
        kept: list[int] = []
        total = 0.0
        for i in order:
            if kept and total >= top_p:
                break
            kept.append(i)
            total += shares[i]
        order = kept
    mass, total = sum(shares[i] for i in order) * uniform, 0.0
    for i in order:
        total += shares[i]
        if total > mass:
            return i
    return order[-1]


@settings(max_examples=150, deadline=None)
@given(logits=st.lists(st.integers(-40, 40), min_size=2, max_size=8, unique=True), temperature=st.sampled_from([0.3, 1.0, 2.5]),
       top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]), uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_transform(logits: list[int], temperature: float, top_p: float, uniform: float) -> None:
    values = [value / 8 for value in logits]
    got = draw(torch.tensor([values, values]), np.full(2, temperature), np.array([top_p, 1.0]), np.full(2, uniform))
    assert got.tolist() == [plain(values, temperature, p, uniform) for p in (top_p, 1.0)]


def test_shares_come_out_as_they_are() -> None:
    n = 20_000
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)).expand(n, 4)
    uniform = (np.arange(n) + 0.5) / n
    for top_p, want in ((1.0, [0.5, 0.3, 0.15, 0.05]), (0.75, [0.625, 0.375, 0, 0]), (0.4, [1, 0, 0, 0])):
        tokens = draw(logits, np.ones(n), np.full(n, top_p), uniform)
        counts = torch.bincount(tokens, minlength=4).double() / n
        assert counts.tolist() == pytest.approx(want, abs=1e-3)


def test_a_flat_vocabulary_is_sorted_whole() -> None:
    logits = torch.zeros(1, 4 * HEAD)
    got = draw(logits.expand(3, -1), np.ones(3), np.full(3, 0.9), np.array([0.0, 0.5, 0.999999]))
    assert got.tolist() == [0, int(0.45 * 4 * HEAD), int(0.9 * 4 * HEAD)]


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for top_p in (0.5, 1.0):
        for uniform in (0.0, 0.5, np.nextafter(1.0, 0.0)):
            assert draw(logits, np.ones(1), np.full(1, top_p), np.full(1, uniform)).tolist() == [1]


def test_a_draw_depends_on_seed_sample_and_position_alone() -> None:
    logits = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    def at(row: int, seed: int, child: int, position: int, others: int = 0) -> int:
        sampler = Sampler()
        sampler.bind(row, Sampling(seed=seed), child)
        rows = np.array([row, *range(row + 1, row + 1 + others)])
        for extra in rows[1:].tolist():
            sampler.bind(extra, Sampling(seed=extra), 0)
        return int(sampler.choose(logits.expand(len(rows), -1), rows, np.full(len(rows), position))[0])
    first = at(0, 1, 0, 10)
    assert first == at(40, 1, 0, 10) == at(3, 1, 0, 10, others=5)
    assert len({at(0, 1, 0, position) for position in range(30)}) > 10
    assert len({at(0, seed, 0, 10) for seed in range(30)}) > 10
    assert len({at(0, 1, child, 10) for child in range(30)}) > 10


def test_greedy_rows_stand_beside_drawn_ones() -> None:
    sampler, logits = Sampler(), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    sampler.bind(5, Sampling(temperature=0), 0)
    sampler.bind(9, Sampling(temperature=3, seed=4), 0)
    got = sampler.choose(logits, np.array([5, 9, 5]), np.array([1, 1, 1]))
    assert got[0] == logits[0].argmax()
    assert got[2] == logits[2].argmax()


def test_rows_that_are_not_finite_are_named() -> None:
    assert perplexed(torch.tensor([[1.0, 2.0], [math.nan, 0.0], [math.inf, 0.0], [-math.inf, 0.0]])).tolist() == [False, True, True, True]
    assert perplexed(torch.zeros(0, 4)).tolist() == []
