"""Law G7: a sum of named items, each once, within 3 MiB of the budget."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.amounts import GIB, MIB, gib
from kvsched_kernels import KernelError
from kvsched_kernels.meter import (
    COUNT_TOLERANCE,
    ITEMS,
    CountMismatch,
    DoubleBooking,
    Doubt,
    MemoryMeter,
    Overbooked,
    tensor_bytes,
)

LINES = ("weights", "holdback", "state", "speculative", "activation")
PIPELINE = (
    (13.572, 1.000, 0.731, 0.877, 1.000, 13.875), (7.408, 1.000, 0.426, 0.511, 1.000, 8.014), (8.342, 1.000, 0.304, 0.365, 1.000, 8.324),
)
TENSOR = (
    (4.252, 1.000, 0.731, 0.877, 0.000, 24.195), (2.719, 1.000, 0.365, 0.438, 0.000, 13.837), (3.662, 1.000, 0.365, 0.438, 0.000, 13.870),
)
BUDGETS = (31_800, 18_800, 19_800)
"""Law G7: items of three ranks in two layouts, in GiB with the rest last, and each rank's budget in MiB."""
BOOTS = [(rank, figures) for layout in (PIPELINE, TENSOR) for rank, figures in enumerate(layout)]


def booked(rank: int, figures: tuple[float, ...]) -> MemoryMeter:
    meter = MemoryMeter(BUDGETS[rank] * MIB)
    for name, size in zip(LINES, figures, strict=False):
        meter.book(name, round(size * GIB), Provenance.MEASURED)
    return meter


@pytest.mark.parametrize(("rank", "figures"), BOOTS)
def test_the_measured_boots_pass_the_count_check(rank: int, figures: tuple[float, ...]) -> None:
    meter = booked(rank, figures)
    meter.check()
    meter.check_count(round(figures[-1] * GIB))
    assert COUNT_TOLERANCE == 3 * MIB
    assert meter.budget / GIB == pytest.approx((31.055, 18.359, 19.335)[rank], abs=0.001)
    assert abs(float(gib(meter.rest)) - figures[-1]) <= 3 / 1024


@pytest.mark.parametrize(("rank", "figures"), BOOTS)
def test_an_item_left_out_or_counted_twice_is_found(rank: int, figures: tuple[float, ...]) -> None:
    rest = round(figures[-1] * GIB)
    for name, size in zip(LINES, figures, strict=False):
        for factor in (0, 2):
            if size == 0.0:
                continue
            meter = MemoryMeter(BUDGETS[rank] * MIB)
            for other, amount in zip(LINES, figures, strict=False):
                meter.book(other, round(amount * GIB) * (factor if other == name else 1), Provenance.MEASURED)
            with pytest.raises(CountMismatch, match=r"where 3\.0 are allowed; the items are weights") as caught:
                meter.check_count(rest)
            assert abs((caught.value.rest - caught.value.found) / GIB) == pytest.approx(size, abs=3 / 1024)


def test_the_gain_of_a_layout_is_found_and_its_weights_are_flagged() -> None:
    """21.69 GiB gained, of which 18.69 are weights that a 27.5 GiB checkpoint split 32:16:16 cannot have lost."""
    before, after = ([booked(rank, figures) for rank, figures in enumerate(layout)] for layout in (PIPELINE, TENSOR))

    def gained(name: str) -> float:
        sums = [sum(item.bytes for meter in layout for item in meter.items if item.name == name) for layout in (before, after)]
        return (sums[0] - sums[1]) / GIB

    assert sum(meter.rest for meter in after) / GIB - sum(meter.rest for meter in before) / GIB == pytest.approx(21.69, abs=0.005)
    assert gained("weights") == pytest.approx(18.69, abs=0.005)
    assert gained("activation") == pytest.approx(3.0)
    shares = [round(27.5 * GIB * part / 64) for part in (32, 16, 16)]
    assert [len(meter.doubtful({"weights": share}, within=0.25)) for meter, share in zip(before, shares, strict=True)] == [0, 0, 0]
    assert [meter.doubtful({"weights": share}, within=0.25) for meter, share in zip(after, shares, strict=True)] == [
        (Doubt("weights", round(size * GIB), share),) for size, share in zip((4.252, 2.719, 3.662), shares, strict=True)
    ]
    with pytest.raises(KernelError, match=r"expected must name items that are booked: \['kv'\] are not"):
        before[0].doubtful({"kv": 1}, within=0.1)


def test_three_mebibytes_are_the_limit() -> None:
    meter = booked(0, PIPELINE[0])
    for off in (-COUNT_TOLERANCE, COUNT_TOLERANCE):
        meter.check_count(meter.rest + off)
        with pytest.raises(CountMismatch):
            meter.check_count(meter.rest + off + (1 if off > 0 else -1))
    meter.check_count(meter.rest + 5 * MIB, tolerance=5 * MIB)
    with pytest.raises(CountMismatch, match=r"rest is 13\.875 GiB by the items and 13\.871 GiB as found: \+4\.0 MiB"):
        meter.check_count(meter.rest - 4 * MIB)


def test_a_negative_rest_names_the_largest_item() -> None:
    meter = MemoryMeter(15 * GIB)
    meter.book("weights", 9 * GIB, Provenance.MEASURED)
    meter.book("kv", 6 * GIB, Provenance.DERIVED)
    meter.check()
    assert meter.rest == 0
    meter.book("graphs", GIB // 2, Provenance.MEASURED)
    assert meter.rest == -GIB // 2
    message = r"rest is -0\.500 GiB: .* 15\.500 of 15\.000 GiB, and the largest is weights with 9\.000 GiB \(measured\)"
    with pytest.raises(Overbooked, match=message) as caught:
        meter.check()
    assert caught.value.largest == Item("weights", 9 * GIB, Provenance.MEASURED)
    assert meter.report().endswith("overbooked: the largest item is weights")


def test_an_item_is_booked_once() -> None:
    meter = MemoryMeter(GIB)
    item = meter.book("weights", 5, Provenance.CONFIGURED)
    assert (item.name, item.bytes, item.provenance) == ("weights", 5, Provenance.CONFIGURED)
    for again in (5, 7):
        with pytest.raises(DoubleBooking, match=r"weights is booked already, with 0\.000 GiB \(configured\)"):
            meter.book("weights", again, Provenance.MEASURED)
    with pytest.raises(DoubleBooking, match="weights is booked already"), meter.measure("weights"):
        pytest.fail("the block must not run")
    assert meter.items == (item,)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        item.bytes = 6  # type: ignore[misc]  # what is tested: it is frozen


@pytest.mark.parametrize("name", ["rest", "Weights", "kv cache", ""])
def test_a_name_that_is_no_item_is_refused(name: str) -> None:
    meter = MemoryMeter(GIB)
    with pytest.raises(KernelError):
        meter.book(name, 1, Provenance.MEASURED)
    assert meter.items == ()


def test_a_host_adds_items_of_its_own() -> None:
    meter = MemoryMeter(GIB, names=(*ITEMS, "adapters"))
    meter.book("adapters", 3, Provenance.CONFIGURED)
    meter.book("weights", 4, Provenance.CONFIGURED)
    assert [item.name for item in meter.items] == ["weights", "adapters"]
    with pytest.raises(KernelError, match=r"names must be distinct and without 'rest', which follows from the others: \['rest'\]"):
        MemoryMeter(GIB, names=("kv", "rest"))
    with pytest.raises(KernelError, match=r"\['kv'\]"):
        MemoryMeter(GIB, names=("kv", "kv"))


@pytest.mark.parametrize(("size", "provenance"), [
    (-1, Provenance.MEASURED), (1.5, Provenance.MEASURED), (True, Provenance.MEASURED), (1, "measured"),
])
def test_figures_are_checked(size: Any, provenance: Any) -> None:
    with pytest.raises(KernelError, match="must be"):
        MemoryMeter(GIB).book("kv", size, provenance)
    if not isinstance(provenance, str):
        with pytest.raises(KernelError, match="budget must be an integer of at least 0, in bytes"):
            MemoryMeter(size)


def test_tensors_that_share_memory_count_it_once() -> None:
    embedding = torch.zeros(10, 4)
    head = embedding.t()
    assert tensor_bytes() == 0
    assert tensor_bytes(embedding, head, embedding[3:]) == 160
    assert tensor_bytes(embedding[3:]) == 160  # what a view keeps alive is the whole
    assert tensor_bytes(embedding, torch.zeros(3, dtype=torch.int8)) == 163
    assert tensor_bytes(torch.zeros(5, device="meta"), torch.zeros(6, device="meta")) == 44


def test_on_the_cpu_the_named_tensors_are_measured() -> None:
    meter = MemoryMeter(GIB)
    with meter.measure("weights") as weights:
        tied = torch.zeros(256, 1024)
        weights.add(tied, tied.t())
        weights.add(torch.zeros(1024))
    with meter.measure("activation", peak=True) as activation:
        activation.add(torch.zeros(2048))
    assert meter.items == (Item("weights", MIB + 4096, Provenance.MEASURED), Item("activation", 8192, Provenance.MEASURED))
    with pytest.raises(KernelError, match=r"kv: no tensor was named with add\(\)"), meter.measure("kv"):
        pass
    assert len(meter.items) == 2


def test_a_block_that_raises_books_nothing_and_the_meter_goes_on() -> None:
    meter = MemoryMeter(GIB)

    def too_much() -> None:
        with meter.measure("kv") as kv:
            kv.add(torch.zeros(4))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        too_much()
    assert meter.items == ()
    with meter.measure("kv") as kv:
        kv.add(torch.zeros(4))
    assert meter.booked == 16


def test_memory_measured_inside_another_measurement_would_count_twice() -> None:
    meter = MemoryMeter(GIB)
    with meter.measure("weights") as weights:
        weights.add(torch.zeros(1))
        with pytest.raises(DoubleBooking, match="kv cannot be measured inside weights: its memory would count in both"), meter.measure("kv"):
            pytest.fail("the block must not run")
        with pytest.raises(DoubleBooking, match="weights is being measured, which books it"):
            meter.book("weights", 1, Provenance.CONFIGURED)
        meter.book("holdback", 1, Provenance.CONFIGURED)
    assert [item.name for item in meter.items] == ["weights", "holdback"]


def test_the_report_is_read_from_top_to_bottom() -> None:
    meter = booked(0, PIPELINE[0])
    assert meter.report().splitlines() == [
        "weights           13.572 GiB  measured",
        "holdback           1.000 GiB  measured",
        "state              0.731 GiB  measured",
        "speculative        0.877 GiB  measured",
        "activation         1.000 GiB  measured",
        "rest              13.875 GiB  derived",
        "budget            31.055 GiB",
        "not booked: kv, workspace, graphs",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_cuda_the_device_is_read() -> None:
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    meter = MemoryMeter(free, device="cuda")
    with meter.measure("weights"):
        weights = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    with meter.measure("activation", peak=True):
        torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda").add_(1)
    sizes = {item.name: item.bytes for item in meter.items}
    assert abs(sizes["weights"] - weights.nbytes) <= COUNT_TOLERANCE
    assert abs(sizes["activation"] - 32 * MIB) <= COUNT_TOLERANCE
    assert meter.budget < total
