"""Instruments of a boot and what they allow to predict, by the figures of laws G4, G5 and G8.

The laws state pools, cuts, reserves, one stage's capacity and measured bytes; what they do not state (weights, what stages had left that
did not bind) is worked back from them in the records of tests/sizing/boots/, which say so.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import GIB, MIB
from kvsched.sizing.boot import Boot, BrokenChain, may_gate
from kvsched.sizing.forecast import Layers, best_forecast, describe_reserve, forecast

BOOTS = Path(__file__).parent / "boots"
POOLS = {"cut-28-20-16": 436_766, "cut-28-20-16-second": 435_822, "cut-28-20-16-third": 434_878, "cut-32-16-16": 416_796}
LAYERS = Layers(tuple(int(n % 4 == 3) for n in range(64)), tuple(int(n % 4 != 3) for n in range(64)))
LAYER_BYTES = 27 * GIB // 64 + MIB


def raw(name: str = "cut-28-20-16") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((BOOTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def boot(name: str = "cut-28-20-16") -> Boot:
    return Boot.from_dict(raw(name))


@pytest.mark.parametrize(("name", "tokens"), POOLS.items())
def test_g8_the_measured_boots_reproduce_from_their_own_instruments(name: str, tokens: int) -> None:
    one = boot(name)
    one.verify()
    assert one.reproduces
    assert one.pool().tokens == tokens


def test_g8_no_prediction_decides_before_all_four_reproduce() -> None:
    four = [boot(name) for name in POOLS]
    assert may_gate(four)
    assert not may_gate(four[:3])
    changed = raw()
    changed["tokens"] += 1
    assert not may_gate([*four[1:], Boot.from_dict(changed)])


def test_g5_the_pool_binds_at_the_last_stage() -> None:
    found = boot().pool()
    assert found.binding == 2
    assert found.capacities[1] == 463_406
    assert boot("cut-32-16-16").pool().binding == 0


def test_g8_the_reserve_is_recovered_not_modelled() -> None:
    assert [one // MIB for one in boot().reserves] == [8848, 3818, 5164]
    assert round(max(boot().reserves) / min(boot().reserves), 1) == 2.3
    assert any("the reserve is 8,848, 3,818, 5,164 MiB by stage, a 2.3-fold spread" in remark for remark in boot().verify())
    assert describe_reserve(boot()) == "stage 0 8.641 GiB, stage 1 3.729 GiB, stage 2 5.043 GiB"


def test_g4_the_residual_is_near_40_mib_and_constant() -> None:
    residuals = [one for one in boot().residuals() if one is not None]
    assert len(residuals) == 3
    assert all(30 * MIB < one < 50 * MIB for one in residuals)
    assert [round(boot().predicted_bytes(stage) / GIB, 3) for stage in range(3)] == [6.874, 4.910, 3.928]
    assert boot("cut-32-16-16").residuals() == (None, None, None)


def test_g8_state_is_charged_as_allocated() -> None:
    """The budget line runs 0.852 of it, so a prediction from the budget would promise memory that is not there."""
    one = boot()
    assert any("stage 0 booked 0.852 of the state that it allocated" in remark for remark in one.verify())
    here, there = (forecast(one, LAYERS, cut, reserve=one.reserves, layer_bytes=0).predicted for cut in ((28, 20, 16), (26, 22, 16)))
    assert [stage.available for stage in here.stages] == [stage.available for stage in one.stages]
    assert there.stages[0].available - here.stages[0].available == one.stages[0].allocated_state // 21 > one.stages[0].budgeted_state // 21


Change = Callable[[dict[str, Any]], object]
BREAKS: dict[str, tuple[Change, str]] = {
    "an item is missing": (lambda one: one["stages"][1]["items"].pop("holdback"), r"stage 1: rest is .* GiB by the items and .* as found"),
    "an item is booked four MiB too high": (
        lambda one: one["stages"][0]["items"].update(activation=GIB + 4 * MIB), r"stage 0: rest is .*-4\.0 MiB"),
    "more is offered than there is": (
        lambda one: one["stages"][0].update(rest_bytes=one["stages"][0]["available_bytes"] - 1), "stage 0 offers .* GiB for pages and has a rest of"),
    "a capacity that does not follow": (
        lambda one: one["stages"][1].update(capacity_tokens=463_407), "stage 1 could hold 463,407 tokens as printed and 463,406 by what it offered"),
    "another pool": (lambda one: one.update(tokens=436_765), "the pool is 436,765 tokens as printed and 436,766 by stage 2, which binds"),
    "pages of more than the agreed count": (
        lambda one: one["stages"][1].update(kv_bytes=463_406 * 5 * 2048), r"stage 1 allocated 4\.419 GiB of pages, and the agreed count takes 4\.165"),
    "half a cell": (lambda one: one.update(cell_bytes=1024), "tokens as printed and"),
    "one device grew by more": (
        lambda one: one["stages"][2].update(measured_bytes=5 * GIB), "measured less predicted bytes differ between stages"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_chain_is_named(name: str) -> None:
    change, match = BREAKS[name]
    record = copy.deepcopy(raw())
    change(record)
    with pytest.raises(BrokenChain, match=match):
        Boot.from_dict(record).verify()


MALFORMED: dict[str, tuple[Change, str]] = {
    "no record": (lambda _: [], "boot record must be an object, not list"),
    "a format": (lambda one: {**one, "format": "v0"}, "format must be 'kvsched-boot/1', not 'v0'"),
    "an unknown key": (lambda one: {**one, "gpu": 1}, "gpu is no key of it; allowed: format, name"),
    "no stages": (lambda one: {**one, "stages": []}, "stages must be a list of at least one object"),
    "no name": (lambda one: {**one, "name": 3}, "name must be a string, not 3"),
    "a key of a stage": (lambda one: {**one, "stages": [{**one["stages"][0], "watts": 1}]}, r"stages\[0\]: watts is no key of it"),
    "a missing key": (
        lambda one: {**one, "stages": [{k: v for k, v in one["stages"][0].items() if k != "available_bytes"}]},
        r"stages\[0\].available_bytes must be an integer of at least 0, not None"),
    "a fraction": (lambda one: {**one, "tokens": 1.5}, "tokens must be an integer of at least 1, not 1.5"),
    "items that are a list": (lambda one: {**one, "stages": [{**one["stages"][0], "items": []}]}, r"stages\[0\].items must be an object"),
    "the arming floor besides the reserve": (
        lambda one: {**one, "stages": [{**one["stages"][0], "items": {"arming_floor": 1}}]}, "arming_floor already sits inside the reserve"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_record_is_refused(name: str) -> None:
    change, match = MALFORMED[name]
    with pytest.raises(ConfigError, match=match):
        Boot.from_dict(change(raw()))


def test_g8_a_cut_that_was_never_booted_takes_an_explicit_reserve() -> None:
    with pytest.raises(ConfigError, match=r"reserve must be given for a cut that was never booted.*kept back 8,848, 3,818, 5,164 MiB"):
        forecast(boot(), LAYERS, (33, 15, 16), reserve=None, layer_bytes=LAYER_BYTES)
    with pytest.raises(ConfigError, match="reserve must be given"):
        best_forecast(boot(), LAYERS, reserve=None, layer_bytes=LAYER_BYTES)


def reserve_for(tokens: int, cut: tuple[int, ...]) -> list[int]:
    """Reserves under which stage 0 of that cut is predicted to hold so many tokens."""
    one = boot()
    free = forecast(one, LAYERS, cut, reserve=[0, one.reserves[1], one.reserves[2]], layer_bytes=LAYER_BYTES).predicted.stages[0]
    return [free.available - tokens * free.token_bytes, one.reserves[1], one.reserves[2]]


def test_g5_a_prediction_of_457604_that_keeps_the_last_stage_is_capped() -> None:
    """Stage 0 of [33, 15, 16] is predicted to hold 457,604; stage 2 is as it was, and held 436,766."""
    cut = (33, 15, 16)
    found = forecast(boot(), LAYERS, cut, reserve=reserve_for(457_604, cut), layer_bytes=LAYER_BYTES)
    assert found.predicted.capacities[0] == 457_604
    assert (found.tokens, found.binding, found.measured, found.band_tokens) == (436_766, 2, True, 0)
    assert "436,766 tokens at most: stage 2 keeps its layers, and held that many when booted" in str(found)


def test_g5_a_hopeful_reserve_does_not_lift_what_a_kept_stage_held() -> None:
    """Nothing kept back on stage 2 would free 5 GiB there by arithmetic; it was booted as it is, and held 436,766."""
    found = forecast(boot(), LAYERS, (29, 19, 16), reserve=[0, 0, 0], layer_bytes=LAYER_BYTES)
    assert found.predicted.tokens > 900_000
    assert (found.tokens, found.binding, found.measured) == (436_766, 2, True)


def test_g8_a_prediction_is_printed_with_its_band() -> None:
    """8 attention layers on stage 0: 500 MiB of reserve are 32,000 tokens, 7 %."""
    cut = (34, 18, 12)
    found = forecast(boot(), LAYERS, cut, reserve=reserve_for(420_000, cut), layer_bytes=LAYER_BYTES)
    assert (found.tokens, found.binding, found.measured, found.band_tokens) == (420_000, 0, False, 32_000)
    assert str(found) == (
        "[34, 18, 12]: 420,000 tokens, +-32,000 (8%, for +-500 MiB of reserve), bound by stage 0; predicted, never booted; "
        "-3.8%, below the noise floor of 14.1%: no finding against the boot")


def test_state_and_weights_move_with_their_layers() -> None:
    one = boot()
    here = forecast(one, LAYERS, (28, 20, 16), reserve=one.reserves, layer_bytes=LAYER_BYTES).predicted.stages[0]
    there = forecast(one, LAYERS, (27, 21, 16), reserve=one.reserves, layer_bytes=LAYER_BYTES).predicted.stages[0]
    assert one.stages[0].recurrent_layers == 21
    assert there.available - here.available == LAYER_BYTES, "layer 27 has attention and no state"
    assert there.token_bytes == 6 * 2048
    third = forecast(one, LAYERS, (26, 22, 16), reserve=one.reserves, layer_bytes=LAYER_BYTES).predicted.stages[0]
    assert third.available - there.available == LAYER_BYTES + one.stages[0].allocated_state // 21


def test_the_best_cut_is_found_under_the_stated_reserve() -> None:
    one = boot()
    best = best_forecast(one, LAYERS, reserve=one.reserves, layer_bytes=LAYER_BYTES)
    for first in range(20, 36):
        for second in range(12, 26):
            if first + second < 60:
                other = forecast(one, LAYERS, (first, second, 64 - first - second), reserve=one.reserves, layer_bytes=LAYER_BYTES)
                assert other.tokens <= best.tokens, other.cut


def test_a_forecast_needs_a_boot_that_holds_together_and_the_model_it_booted() -> None:
    broken = raw()
    broken["tokens"] += 1
    with pytest.raises(BrokenChain):
        forecast(Boot.from_dict(broken), LAYERS, (33, 15, 16), reserve=(0, 0, 0), layer_bytes=1)
    other = Layers((1,) * 64, (0,) * 64)
    with pytest.raises(ConfigError, match=r"stage 0 has 7 attention and 21 recurrent layers, and layers 0 to 27 of the model have \(28, 0\)"):
        forecast(boot(), other, (33, 15, 16), reserve=(0, 0, 0), layer_bytes=1)
    with pytest.raises(ConfigError, match="cut and reserve must be of 3 stages"):
        forecast(boot(), LAYERS, (32, 32), reserve=(0, 0), layer_bytes=1)
