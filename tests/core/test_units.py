"""Tokens to pages, slots of a request, and what a cache may serve."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsched.units import aligned, pages_for, pages_for_each, reusable, total_slots

SIZES = st.integers(1, 300)
COUNTS = st.integers(0, 10**7)


@given(tokens=COUNTS, size=SIZES)
def test_pages_are_just_enough(tokens: int, size: int) -> None:
    pages = pages_for(tokens, size)
    assert pages * size >= tokens > (pages - 1) * size or tokens == pages == 0
    assert pages_for_each(np.array([tokens, 0, size], dtype=np.int64), size).tolist() == [pages, 0, 1]


@given(tokens=COUNTS, size=SIZES)
def test_aligned_is_the_largest_multiple(tokens: int, size: int) -> None:
    assert aligned(tokens, size) % size == 0
    assert aligned(tokens, size) <= tokens < aligned(tokens, size) + size


@given(prompt=st.integers(1, 10**6), new=st.integers(0, 10**6))
def test_the_last_token_has_no_slot(prompt: int, new: int) -> None:
    assert total_slots(prompt, new) == (prompt if new <= 1 else prompt + new - 1)


@given(prompt=st.integers(1, 10**6), size=SIZES)
def test_at_least_one_token_is_left_to_compute(prompt: int, size: int) -> None:
    hit = reusable(prompt, size)
    assert hit % size == 0
    assert 1 <= prompt - hit <= size
