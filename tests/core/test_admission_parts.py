"""Ledger, token ratio and chunk length by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsched.admission.chunking import chunk_length
from kvsched.admission.ledger import CommitmentLedger
from kvsched.admission.ratio import TokenRatio
from kvsched.errors import InternalError

# -- ledger -----------------------------------------------------------------------------------------------------------


def test_an_entry_from_commit_to_release() -> None:
    ledger = CommitmentLedger()
    assert (ledger.outstanding, ledger.owed("a"), "a" in ledger, ledger.release("a")) == (0, 0, False, 0)
    ledger.commit("a", 10)
    ledger.commit("b", 0)
    ledger.spend("a", 4)
    assert (ledger.outstanding, ledger.owed("a"), ledger.chunks) == (6, 6, 1)
    assert "a" in ledger
    ledger.unspend("a", 3)
    assert ledger.owed("a") == 9
    assert ledger.release("a") == 9
    assert "a" not in ledger
    assert "b" in ledger
    ledger.commit("a", 1)  # an id may come again
    assert ledger.outstanding == 1
    ledger.check()


@given(calls=st.lists(st.tuples(st.sampled_from(["commit", "spend", "release"]), st.sampled_from("abc"), st.integers(-1, 9)), max_size=40))
def test_the_sum_stands_for_its_parts(calls: list[tuple[str, str, int]]) -> None:
    """Against a plain dict: a call that is refused changes nothing, and `chunks` counts the spends."""
    ledger, owed, spends = CommitmentLedger(), dict[str, int](), 0
    for call, key, tokens in calls:
        if call == "release":
            assert ledger.release(key) == owed.pop(key, 0)
        else:
            fine = tokens >= 0 and (key not in owed if call == "commit" else key in owed and tokens <= owed[key])
            try:
                getattr(ledger, call)(key, tokens)
                assert fine
                owed[key] = tokens if call == "commit" else owed[key] - tokens
                spends += call == "spend"
            except InternalError:
                assert not fine
        ledger.check()
        assert (ledger.outstanding, ledger.chunks) == (sum(owed.values()), spends)


def test_check_finds_a_sum_that_is_none() -> None:
    ledger = CommitmentLedger()
    ledger.commit("a", 3)
    ledger.outstanding = 4
    with pytest.raises(InternalError, match="outstanding 4 is not the sum"):
        ledger.check()


# -- ratio ------------------------------------------------------------------------------------------------------------


@given(conservativeness=st.floats(0, 5), moves=st.lists(st.one_of(
    st.just("decay"), st.just("reset"), st.tuples(st.integers(0, 500), st.integers(0, 9), st.integers(0, 900))), max_size=40))
def test_the_ratio_stays_between_its_minimum_and_one(conservativeness: float, moves: list[str | tuple[int, int, int]]) -> None:
    ratio = TokenRatio(conservativeness, "minimum")
    for move in moves:
        before = ratio.value
        if isinstance(move, tuple):
            ratio.retracted(*move)
            if not move[1] or not move[2]:
                assert ratio.value == before
        elif move == "decay":
            ratio.decay()
            assert ratio.value <= before
        else:
            ratio.reset()
        assert ratio.minimum <= ratio.value <= 1.0


def test_who_survives_pulls_the_ratio_up_and_down() -> None:
    ratio = TokenRatio(1.0, "minimum")
    ratio.retracted(generated=100, survivors=5, max_new=400)
    assert ratio.value == 0.5
    ratio.retracted(generated=10, survivors=1, max_new=100)
    assert ratio.value == 0.3


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("remaining", "budget", "chunk", "long", "alone", "length"), [
    (1000, 8192, None, None, True, 1000), (1000, 300, None, None, True, 300), (1000, 300, 128, None, True, 128),
    (1000, 100, 128, None, True, 100), (50, 300, 128, None, True, 50), (1000, 8192, None, 64, False, 64), (1000, 8192, None, 64, True, 1000),
    (1000, 8192, 32, 64, False, 32), (1000, 8192, 96, 64, True, 96), (1000, 8192, 96, 64, False, 64), (1000, 40, 96, 64, False, 40),
    (10, 8192, 96, 64, False, 10), (1000, 0, 96, 64, False, 0),
])
def test_a_chunk_is_the_least_of_what_bounds_it(remaining: int, budget: int, chunk: int | None, long: int | None, alone: bool,
                                                length: int) -> None:
    assert chunk_length(remaining, budget, chunk, long, alone=alone) == length
