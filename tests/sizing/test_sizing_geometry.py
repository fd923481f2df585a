"""What a token and a request cost, by the figures of laws G1 to G4 and of cases C61 and C62."""

from __future__ import annotations

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import GIB, MIB
from kvsched.sizing.dtypes import ALIASES, WIDTHS, dtype
from kvsched.sizing.geometry import Attention, Channels, Layer, Model, Recurrent, cell_bytes, heads_per_rank

FP8, BF16, F32 = dtype("fp8"), dtype("bf16"), dtype("float32")
LAW = Attention(heads=4, key=256, value=256)
"""The attention layer of law G1."""
DELTA = Recurrent(48, 128 * 128, (Channels(16, 2 * 128), Channels(48, 128)), taps=3)
"""The linear-attention layer of law G3: 48 value heads and 16 key heads of 128, a convolution four wide."""


def test_g1_the_cell_of_a_token() -> None:
    assert LAW.cell(FP8) == 2048
    assert (LAW.key_bytes(FP8), LAW.value_bytes(FP8)) == (1024, 1024)


def test_g1_a_bf16_reading_of_fp8_misses_by_exactly_two() -> None:
    assert LAW.cell(BF16) == 2 * LAW.cell(FP8)


def test_g1_keys_of_436766_tokens_over_7_5_and_4_layers() -> None:
    keys = [436_766 * layers * LAW.key_bytes(FP8) / GIB for layers in (7, 5, 4)]
    assert [round(one, 2) for one in keys] == [2.92, 2.08, 1.67]


@pytest.mark.parametrize("name", ["auto", "", "fp7", "int4", None, 2, "bfloat"])
def test_g1_unknown_types_and_auto_raise_with_what_is_allowed(name: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype must be one of float32, float16, bfloat16, .*, not ") as info:
        dtype(name, "kv_dtype")
    assert repr(name) in str(info.value)


def test_widths_are_those_of_the_types() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name, width in WIDTHS.items():
        assert getattr(torch, name).itemsize == width, name
    assert set(ALIASES.values()) <= set(WIDTHS)


def test_g2_heads_per_rank() -> None:
    assert [heads_per_rank(8, tp) for tp in (1, 2, 4, 8, 16, 32)] == [8, 4, 2, 1, 1, 1]


def test_c61_bytes_per_token_per_rank_of_64_layers() -> None:
    layers = [Attention(8, 128, 128)] * 64
    assert [cell_bytes(layers, BF16, tp) for tp in (1, 4, 8, 16, 32)] == [262_144, 65_536, 32_768, 32_768, 32_768]


def test_c61_two_heads_on_four_ranks_are_one_on_each() -> None:
    assert heads_per_rank(2, 4) == 1
    assert Attention(2, 128, 128).cell(BF16, 4) == 512  # one head of keys and values, not four in all


def test_c61_six_heads_on_four_ranks_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"tp = 4 does not divide 6 key/value heads: it must be one of 1, 2, 3, 6, or a multiple of 6"):
        heads_per_rank(6, 4)


def test_c61_keys_and_values_may_differ_in_width() -> None:
    assert Attention(4, 192, 128).cell(BF16) == 4 * (192 + 128) * 2


@pytest.mark.parametrize("tp", [1, 2, 8, 16, 128])
def test_g2_a_latent_vector_is_replicated_on_every_rank(tp: int) -> None:
    latent = [Attention(1, 512 + 64, 0)] * 61
    assert cell_bytes(latent, BF16, tp) == 70_272
    assert cell_bytes(latent, FP8, tp) == 35_136
    assert cell_bytes(latent, FP8, tp, scale_bytes=16) == 35_136 + 61 * 16


def test_g3_state_by_allocation_site() -> None:
    sites = DELTA.sites(13, BF16, BF16, speculative_slots=5, draft_tokens=4)
    mib = [one / MIB for one in (sites.recurrent, sites.conv, sites.speculative_recurrent, sites.speculative_conv)]
    assert [round(one, 3) for one in mib] == [19.500, 0.762, 30.000, 0.586]
    assert round(sites.total / MIB, 2) == 50.85
    assert (DELTA.state_elements(), DELTA.conv_channels()) == (48 * 128 * 128, 10_240)


def test_g3_without_a_term_the_sum_is_another() -> None:
    """Each of the four is needed to come to 50.85 MiB, and a width of 4 B or of 1 B misses by 2."""
    sites = DELTA.sites(13, BF16, BF16, speculative_slots=5, draft_tokens=4)
    for part in (sites.recurrent, sites.conv, sites.speculative_recurrent, sites.speculative_conv):
        assert round((sites.total - part) / MIB, 2) != 50.85
    assert DELTA.sites(13, F32, F32, speculative_slots=5, draft_tokens=4).total == 2 * sites.total
    assert DELTA.sites(13, BF16, BF16).speculative == 0


def test_g3_the_state_is_split_over_ranks_by_its_heads() -> None:
    assert DELTA.slot(BF16, BF16, 4) * 4 == DELTA.slot(BF16, BF16)
    with pytest.raises(ConfigError, match="tp = 32 does not divide 48 heads or channels"):
        DELTA.slot(BF16, BF16, 32)


def test_groups_of_a_convolution_are_replicated_where_there_are_too_few() -> None:
    one = Recurrent(128, 64 * 128, (Channels(128, 64), Channels(1, 256, replicated=True)), taps=3)
    assert [one.conv_channels(tp) for tp in (1, 2, 8)] == [8192 + 256, 4096 + 256, 1024 + 256]


def test_g4_forward_check_of_a_cut_of_64_layers() -> None:
    """436,766 tokens and the state of law G3 on [28, 20, 16] with every fourth layer attention, against what was measured."""
    attention = [sum(layer % 4 == 3 for layer in part) for part in (range(28), range(28, 48), range(48, 64))]
    assert attention == [7, 5, 4]
    state = DELTA.sites(13, BF16, BF16, speculative_slots=5, draft_tokens=4).total
    predicted = [
        436_766 * LAW.cell(FP8) * full + (layers - full) * state for full, layers in zip(attention, (28, 20, 16), strict=True)
    ]
    assert [round(one / GIB, 3) for one in predicted] == [6.874, 4.910, 3.928]
    residual = [measured - one / GIB for measured, one in zip((6.91, 4.95, 3.97), predicted, strict=True)]
    assert all(30 <= one * 1024 <= 50 for one in residual), "near 40 MiB"
    assert (max(residual) - min(residual)) * 1024 <= 10, "constant, within what 0.01 GiB can show"


def test_a_model_says_which_splits_it_allows() -> None:
    model = Model(model_type="x", layers=(Layer((Attention(6, 64, 64),)),), query_heads=24)
    model.check_tp(12)
    with pytest.raises(ConfigError, match=r"tp = 4 does not divide 6 key/value heads; tp may be 1, 2, 3, 6, 12, 24"):
        model.check_tp(4)
    with pytest.raises(ConfigError, match=r"tp = 5 does not divide 24 attention heads; tp may be 1, 2, 3, 6, 12, 24"):
        model.check_tp(5)
