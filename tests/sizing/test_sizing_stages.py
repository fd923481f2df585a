"""Pipeline stages, token-split pools and predictions, by the figures of laws G5, G6, G9 and G10 and of case C58."""

from __future__ import annotations

import itertools

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import GIB, MIB
from kvsched.sizing.predict import band_tokens, compare, micro_batch_cap
from kvsched.sizing.stages import Stage, best_cut, caps, check_cut, even_cut, pool, ranges
from kvsched.sizing.token_split import token_split, world_cost

CELL = 2048
"""Bytes of a token in one attention layer of law G1."""


def stages(cut: tuple[int, ...], available: tuple[int, ...]) -> list[Stage]:
    """Stages of a model with attention in every fourth layer."""
    return [
        Stage(free, CELL * sum(layer % 4 == 3 for layer in part), part) for part, free in zip(ranges(cut), available, strict=True)
    ]


MEASURED = stages((28, 20, 16), (470_000 * 7 * CELL, 463_406 * 5 * CELL, 436_766 * 4 * CELL))
"""The stages of law G5. What stage 0 could hold is not stated there; it is more than the others."""


def test_g5_the_pool_is_the_minimum_and_the_binding_stage_is_named() -> None:
    found = pool(MEASURED, 1)
    assert (found.tokens, found.binding) == (436_766, 2)
    assert found.capacities[1:] == (463_406, 436_766)


def test_g5_a_byte_less_is_a_token_less() -> None:
    short = [*MEASURED[:2], Stage(MEASURED[2].available - 1, MEASURED[2].token_bytes, MEASURED[2].layers)]
    assert pool(short, 1).tokens == 436_765


def test_g5_no_cut_that_keeps_the_last_stage_beats_it() -> None:
    before = pool(MEASURED, 1)
    assert [(cap.stage, cap.tokens) for cap in caps(before, (33, 15, 16))] == [(2, 436_766)]
    for first in range(1, 48):
        assert caps(before, (first, 48 - first, 16))[0].tokens <= 436_766, "457,604 cannot be"
    assert caps(before, (32, 17, 15)) == ()
    assert caps(before, (28, 36)) == (), "other ranks are other stages"
    assert [cap.tokens for cap in caps(before, (28, 20, 16))] == [436_766, 463_406, 470_000]


def test_g5_what_32_16_16_measured_is_below_the_cap() -> None:
    found = pool(stages((32, 16, 16), (416_796 * 8 * CELL, 500_000 * 4 * CELL, 436_766 * 4 * CELL)), 1)
    assert (found.tokens, found.binding) == (416_796, 0)
    assert found.tokens <= caps(pool(MEASURED, 1), (32, 16, 16))[0].tokens


def test_g5_ranks_allocate_only_the_agreed_count() -> None:
    found = pool(MEASURED, 1)
    assert [found.allocated(number) for number in range(3)] == [436_766 * layers * CELL for layers in (7, 5, 4)]


def test_c58_the_second_rank_allocates_for_the_agreed_pool() -> None:
    found = pool([Stage(46_800 * 56 * CELL, 56 * CELL), Stage(327_680 * 8 * CELL, 8 * CELL)], 16)
    assert (found.capacities, found.tokens, found.binding) == ((46_800, 327_680), 46_800, 0)
    assert found.allocated(1) == 46_800 * 8 * CELL


def test_c58_the_bottleneck_is_not_the_rank_with_less_memory() -> None:
    assert pool([Stage(10 * GIB, 40 * CELL), Stage(8 * GIB, 20 * CELL)], 16).binding == 0


def test_stages_without_attention_bound_nothing() -> None:
    found = pool([Stage(GIB, 0), Stage(CELL * 100, CELL)], 16)
    assert (found.capacities, found.binding, found.tokens) == ((None, 96), 1, 96)
    with pytest.raises(ConfigError, match="no stage has an attention layer"):
        pool([Stage(GIB, 0)], 16)


def test_less_than_nothing_holds_nothing() -> None:
    assert pool([Stage(-5, CELL)], 16).pages == 0


@pytest.mark.parametrize(("layers", "count", "cut"), [
    (64, 3, (21, 22, 21)), (61, 2, (31, 30)), (61, 4, (15, 15, 16, 15)), (32, 3, (11, 11, 10)), (80, 8, (10,) * 8), (7, 7, (1,) * 7), (5, 1, (5,)),
])
def test_an_even_cut_spares_the_last_stage_first(layers: int, count: int, cut: tuple[int, ...]) -> None:
    assert even_cut(layers, count) == cut


@pytest.mark.parametrize("count", [0, 33])
def test_more_stages_than_layers_cannot_be(count: int) -> None:
    with pytest.raises(ConfigError, match=f"pp must be from 1 to 32, the number of layers, not {count}"):
        even_cut(32, count)


@pytest.mark.parametrize("cut", [(30, 1), (33, -1), (32, 0), (16, 17)])
def test_a_cut_has_every_layer_once(cut: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a cut must be numbers of layers of at least 1 with a sum of 32"):
        check_cut(cut, 32)


def test_the_search_finds_what_trying_all_cuts_finds() -> None:
    """Nine layers with uneven costs on three unequal ranks, against every cut there is."""
    cost, free = (0, 3, 0, 0, 5, 1, 0, 2, 4), (900, 700, 1100)

    def stage_of(number: int, part: range) -> Stage:
        return Stage(free[number] - 17 * len(part), sum(cost[layer] for layer in part), part)

    def held(cut: tuple[int, ...]) -> int:
        return pool([stage_of(number, part) for number, part in enumerate(ranges(cut))], 2).pages

    every = [cut for cut in itertools.product(range(1, 8), repeat=3) if sum(cut) == 9]
    best = max(every, key=lambda cut: (held(cut), -max(cut)))
    found = best_cut(9, 3, stage_of, 2)
    assert (held(found), max(found)) == (held(best), max(best))


def test_the_search_places_attention_and_state() -> None:
    """Two equal ranks, attention in the last four of twelve layers, state in the others: an even cut is not the best."""

    def stage_of(_: int, part: range) -> Stage:
        full = sum(layer >= 8 for layer in part)
        return Stage(10_000 - 400 * (len(part) - full), 10 * full, part)

    found = best_cut(12, 2, stage_of, 1)
    assert found == (10, 2)
    assert pool([stage_of(*one) for one in enumerate(ranges(found))], 1).tokens > pool([stage_of(*one) for one in enumerate(ranges((6, 6)))], 1).tokens


def test_g6_world_cost_is_layout_invariant() -> None:
    assert world_cost(16 * CELL, 1) == 32_768
    assert world_cost(16 * CELL, 1_000_000) == 31_250 * MIB


def test_g6_each_rank_has_a_bound_and_the_vector_is_not_clipped() -> None:
    free = (14 * GIB, 8 * GIB, 4 * GIB)
    found = token_split(16 * CELL, free)
    assert [one.bound for one in found.shares] == [size // 32_768 for size in free]
    assert (found.tokens, found.feasible, found.complaints) == (26 * GIB // 32_768, True, ())
    vector = (200_000, 362_000, 438_000)  # 43.8 % of a million on the rank with least free bytes
    over = token_split(16 * CELL, free, vector=vector)
    assert (over.tokens, over.feasible) == (1_000_000, False)
    assert tuple(one.tokens for one in over.shares) == vector
    assert "rank 2 is given 438,000 tokens and its 4.000 GiB hold 131,072" in over.complaints[1]
    assert over.complaints[-1] == "rank 2 has the least free bytes, 4.000 GiB, and the largest share, 43.8% of the tokens"


def test_g6_shares_are_whole_pages_and_a_vector_fits_the_ranks() -> None:
    assert token_split(100, (1650, 49), page_size=8).shares[0].bound == 16
    with pytest.raises(ConfigError, match="vector must be 2 numbers of tokens of at least 0"):
        token_split(100, (1650, 49), vector=(1,))


@pytest.mark.parametrize(("running", "count", "in_stages", "cap"), [
    (4, 3, True, 1), (12, 3, True, 4), (8, 2, True, 4), (7, 2, True, 3), (4, 3, False, 4), (0, 3, True, 1), (2, 3, True, 1), (9, 0, True, 9),
    (0, 0, False, 1),
])
def test_g9_micro_batch_cap(running: int, count: int, in_stages: bool, cap: int) -> None:
    assert micro_batch_cap(running, count, decode_in_stages=in_stages) == cap


def test_g10_gains_below_the_noise_floor_are_flagged() -> None:
    assert not compare(100_000, 112_000).finding
    assert compare(100_000, 181_800).finding
    assert str(compare(100_000, 112_000)) == "+12.0%, below the noise floor of 14.1%: no finding"
    assert str(compare(100_000, 181_800)) == "+81.8%"
    assert not compare(1000, 1141).finding
    assert compare(1000, 1142).finding
    assert not compare(1000, 880).finding
    with pytest.raises(ConfigError, match="noise_floor must be a share of at least 0"):
        compare(1, 1, float("nan"))


def test_g8_the_band_of_500_mib() -> None:
    assert band_tokens(8 * CELL) == 32_000
    assert round(32_000 / 457_604, 2) == 0.07
