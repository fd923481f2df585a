"""Memory as line items, by the figures of law G7 and of case C63."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.account import Account, CountMismatch, Item, Overbooked, Provenance, gain, misbooked_weights
from kvsched.sizing.amounts import GIB, MIB, gib, parse_bytes

NAMES = ("weights", "holdback", "state", "speculative", "activation")
BUDGETS = (31_800, 18_800, 19_800)
"""MiB of the three ranks."""
PIPELINE = (
    (13.572, 1.000, 0.731, 0.877, 1.000, 13.875),
    (7.408, 1.000, 0.426, 0.511, 1.000, 8.014),
    (8.342, 1.000, 0.304, 0.365, 1.000, 8.324),
)
TENSOR = (
    (4.252, 1.000, 0.731, 0.877, 0, 24.195),
    (2.719, 1.000, 0.365, 0.438, 0, 13.837),
    (3.662, 1.000, 0.365, 0.438, 0, 13.870),
)
"""Items of each rank and its rest, in GiB, as law G7 states them."""


def in_bytes(size: float) -> int:
    return int(Fraction(str(size)) * GIB)


def accounts(layout: tuple[tuple[float, ...], ...]) -> list[Account]:
    return [
        Account(budget * MIB, tuple(
            Item(name, in_bytes(size), Provenance.MEASURED) for name, size in zip(NAMES, row[:-1], strict=True)), f"rank {rank}")
        for rank, (budget, row) in enumerate(zip(BUDGETS, layout, strict=True))
    ]


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_g7_count_check_on_every_rank_and_in_each_layout(layout: tuple[tuple[float, ...], ...]) -> None:
    for account, row in zip(accounts(layout), layout, strict=True):
        account.check()
        account.check_count(in_bytes(row[-1]))
    assert [round(sum(row), 3) for row in layout] == [31.055, 18.359, 19.335]
    assert [gib(budget * MIB) for budget in BUDGETS] == ["31.055", "18.359", "19.336"]


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
@pytest.mark.parametrize("missing", NAMES)
def test_g7_a_missing_item_does_not_count_up(layout: tuple[tuple[float, ...], ...], missing: str) -> None:
    for account, row in zip(accounts(layout), layout, strict=True):
        kept = tuple(item for item in account.items if item.name != missing)
        if sum(item.bytes for item in kept) == account.booked:
            continue  # nothing was booked under that name
        with pytest.raises(CountMismatch, match=r"rest is .* GiB by the items and .* as found"):
            Account(account.budget, kept).check_count(in_bytes(row[-1]))


def test_g7_the_tolerance_is_three_mib() -> None:
    account = accounts(PIPELINE)[0]
    account.check_count(account.rest + 3 * MIB)
    with pytest.raises(CountMismatch) as info:
        account.check_count(account.rest + 3 * MIB + 1)
    assert (info.value.rest, info.value.found) == (account.rest, account.rest + 3 * MIB + 1)


def test_g7_weights_that_are_less_than_the_checkpoint_are_flagged() -> None:
    checkpoint, shares = in_bytes(27.5), (32, 16, 16)
    booked = [in_bytes(row[0]) for row in TENSOR]
    flagged = misbooked_weights(booked, checkpoint, shares)
    assert [one.rank for one in flagged] == [0, 1, 2]
    assert [gib(one.expected) for one in flagged] == ["13.750", "6.875", "6.875"]
    assert str(flagged[0]) == "rank 0: weights is booked with 4.252 GiB, and its share is about 13.750"
    assert misbooked_weights([in_bytes(row[0]) for row in PIPELINE], checkpoint, shares) == ()
    with pytest.raises(ConfigError, match="shares must be as many as ranks, 3, not 2"):
        misbooked_weights(booked, checkpoint, (1, 1))


def test_g7_a_gain_that_rests_on_misbooked_weights_is_not_real() -> None:
    found = gain(accounts(PIPELINE), accounts(TENSOR), doubtful=("weights",))
    assert round(found.total / GIB, 2) == 21.69
    assert {name: round(size / GIB, 2) for name, size in found.by_item.items() if abs(size) > MIB} == {"weights": 18.69, "activation": 3.00}
    assert round(found.real / GIB, 2) == 3.00
    assert gain(accounts(PIPELINE), accounts(TENSOR)).real == found.total


def test_g7_a_negative_rest_names_the_largest_item() -> None:
    account = Account(10 * GIB, (
        Item("weights", 7 * GIB, Provenance.MEASURED), Item("graphs", 4 * GIB, Provenance.CONFIGURED)), "stage 1")
    with pytest.raises(Overbooked, match=(
        r"stage 1: the items come to 11\.000 GiB of 10\.000, 1\.000 too much; the largest is weights with 7\.000 GiB \(measured\)")) as info:
        account.check()
    assert info.value.largest.name == "weights"


def test_c63_a_budget_is_a_sum_of_items_each_once() -> None:
    total = in_bytes(178.36)
    items = {"weights": 8.58, "activation": 9.96, "other": 0.07, "graphs": 0.65}
    budget = int(total * Fraction(9, 10))
    assert abs(budget / GIB - 160.52) < 0.01
    account = Account(budget, tuple(Item(name, in_bytes(size), Provenance.MEASURED) for name, size in items.items()))
    assert abs(account.rest / GIB - 141.26) <= 0.01
    twice = (account.rest - in_bytes(0.65)) / GIB
    assert abs(twice - 140.61) <= 0.01 < abs(account.rest / GIB - twice), "subtracting the graphs a second time is another figure"


def test_c63_what_is_reserved_under_one_name_is_not_reserved_again() -> None:
    graphs = Item("graphs", GIB, Provenance.CONFIGURED)
    with pytest.raises(ConfigError, match="graphs is booked twice: every item counts once"):
        Account(10 * GIB, (graphs, graphs))


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("80GiB", 80 * GIB), ("80 gib", 80 * GIB), ("80GB", 80 * 10**9), ("1.5 MiB", 3 * MIB // 2), ("123B", 123), ("2TiB", 2 << 40),
    ("85_899_345_920", 80 * GIB), ("0.3B", 0), ("1kB", 1000), ("1KiB", 1024),
])
def test_bytes_are_read_with_and_without_a_suffix(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "80 gigs", "0x10", "1,5GiB", "nan", "80G", "1__0"])
def test_other_sizes_are_refused_with_the_suffixes_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpu-bytes must be a number of bytes, with a suffix or without \(KiB, MiB, GiB, TiB, kB, MB, GB, TB\)"):
        parse_bytes(text, "--gpu-bytes")


def test_an_item_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes must be an integer of at least 0, not -1"):
        Item("weights", -1, Provenance.MEASURED)
