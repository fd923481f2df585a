"""`kvsched cut` from the outside: cuts from sizes, a boot and what it predicts, exit codes, and what bad input is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvsched.cli.group import group
from kvsched.sizing.amounts import GIB, MIB

HERE = Path(__file__).parent
BOOT = ["qwen3.5-27b", "--boot", str(HERE / "boots" / "cut-28-20-16.json"), "--kv-dtype", "fp8"]
RESERVE = ["--reserve", "8848MiB,3818MiB,5164MiB", "--layer-bytes", "430MiB"]
KEYS = {"bytes_per_token_per_rank", "tokens", "pages", "max_servable_tokens", "binding", "items", "state_bytes_per_request", "cut", "cuts"}


def cut(name: str, *words: str) -> Result:
    path = HERE / "configs" / f"{name}.json"
    return CliRunner().invoke(group, ["cut", str(path), *words], catch_exceptions=False)


def figures(*words: str) -> dict[str, Any]:
    result = cut(*words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) >= KEYS
    return found


PIPELINE = ["llama-3-70b", "--gpu-bytes", "80GiB", "--layer-bytes", "1.6GiB", "--reserve", "2GiB"]


def test_a_named_cut_is_worked_out() -> None:
    found = figures(*PIPELINE, "--cut", "28,27,25", "--fixed-bytes", "4GiB,2GiB,4GiB")
    first = (80 * GIB - 28 * int(1.6 * GIB) - 6 * GIB) // (28 * 4096 * 16) * 16
    assert (found["cut"], found["binding_stage"], found["tokens"]) == ([28, 27, 25], 0, first)
    assert found["bytes_per_token_per_rank"] == 28 * 4096
    assert [stage["layers"] for stage in found["stages"]] == [28, 27, 25]
    assert {item["name"] for item in found["items"]} == {"weights", "fixed", "reserve", "kv", "unused"}


def test_the_best_cut_beats_the_even_one_where_stages_are_unequal() -> None:
    found = figures("llama-3-70b", "--gpu-bytes", "80GiB,80GiB,48GiB", "--layer-bytes", "1.6GiB", "--reserve", "2GiB")
    by_cut = {tuple(one["cut"]): one["tokens"] for one in found["cuts"]}
    assert tuple(found["cut"]) in by_cut
    assert found["tokens"] == max(by_cut.values()) > by_cut.get((27, 27, 26), 0)
    assert found["cut"][2] < 20


def test_an_even_cut_is_kept_where_no_other_holds_more() -> None:
    assert figures("llama-3-70b", "--stages", "4", "--gpu-bytes", "80GiB", "--layer-bytes", "1.6GiB", "--reserve", "0")["cut"] == [20, 20, 20, 20]


def test_a_hybrid_places_state_and_attention() -> None:
    words = ["qwen3.5-27b", "--kv-dtype", "fp8", "--state-dtype", "bf16", "--gpu-bytes", "31800MiB,18800MiB,19800MiB", "--layer-bytes", "430MiB",
             "--fixed-bytes", "2GiB", "--reserve", "8848MiB,3818MiB,5164MiB", "--page-size", "1", "--state-slots", "13", "--slots-per-request", "3",
             "--transient-slots", "1", "--draft-tokens", "4", "--max-running", "4"]
    found = figures(*words, "--cut", "28,20,16", "--cut", "33,15,16")
    (one, other) = found["cuts"]
    assert (one["attention_layers"], one["recurrent_layers"]) == ([7, 5, 4], [21, 15, 12])
    assert (other["attention_layers"], other["recurrent_layers"]) == ([8, 4, 4], [25, 11, 12])
    assert one["capacities"][2] == other["capacities"][2], "the last stage is the same in both"
    state = next(item["bytes"] for item in found["stages"][2]["items"] if item["name"] == "state")
    assert state == 12 * 13 * (48 * 128 * 128 + 10_240 * 3) * 2
    assert figures(*words)["tokens"] >= max(cut["tokens"] for cut in found["cuts"])


def test_a_gain_below_the_noise_floor_is_no_finding() -> None:
    base = figures(*PIPELINE, "--cut", "27,27,26")["tokens"]
    one, = figures(*PIPELINE, "--cut", "27,27,26", "--present-tokens", str(int(base / 1.12)))["cuts"]
    assert (round(one["change"], 2), one["finding"]) == (0.12, False)
    two, = figures(*PIPELINE, "--cut", "27,27,26", "--present-tokens", str(int(base / 1.818)))["cuts"]
    assert (round(two["change"], 3), two["finding"]) == (0.818, True)
    assert "+12.0%, below the noise floor of 14.1%: no finding" in cut(
        *PIPELINE, "--cut", "27,27,26", "--present-tokens", str(int(base / 1.12))).stdout


def test_micro_batches_of_each_layout() -> None:
    assert figures(*PIPELINE, "--cut", "27,27,26", "--running", "12")["micro_batch_cap"] == {"decode_in_stages": 4, "decode_in_another_layout": 12}
    assert "12 running requests: at most 4 in a micro-batch, 12 where decode runs in another layout" in cut(
        *PIPELINE, "--cut", "27,27,26", "--running", "12").stdout


def test_a_boot_is_verified_and_its_reserve_recovered() -> None:
    found = figures(*BOOT)
    assert (found["tokens"], found["binding_stage"], found["cut"], found["cuts"]) == (436_766, 2, [28, 20, 16], [])
    assert [one // MIB for one in found["boot"]["reserve_bytes"]] == [8848, 3818, 5164]
    assert found["boot"]["capacities"][1:] == [463_406, 436_766]
    assert all(30 < one / MIB < 50 for one in found["boot"]["residual_bytes"])
    text = cut(*BOOT).stdout
    assert "boot cut-28-20-16: [28, 20, 16] holds together; 436,766 tokens, bound by stage 2" in text
    assert "the reserve is 8,848, 3,818, 5,164 MiB by stage, a 2.3-fold spread" in text


def test_a_kept_stage_bounds_what_is_predicted() -> None:
    found = figures(*BOOT, "--cut", "33,15,16", "--reserve", "5GiB,3818MiB,5164MiB", "--layer-bytes", "200MiB")
    (one,) = found["cuts"]
    assert (one["tokens"], one["binding_stage"], one["measured"], one["band_tokens"]) == (436_766, 2, True, 0)
    assert one["capacities"][0] > 457_604
    assert one["caps"] == [{"stage": 2, "tokens": 436_766}]


def test_a_prediction_has_its_band() -> None:
    (one,) = figures(*BOOT, "--cut", "34,18,12", *RESERVE)["cuts"]
    assert (one["binding_stage"], one["measured"], one["band_bytes"], one["band_tokens"]) == (0, False, 500 * MIB, 32_000)
    assert "for +-500 MiB of reserve), bound by stage 0; predicted, never booted" in cut(*BOOT, "--cut", "34,18,12", *RESERVE).stdout


def test_the_best_cut_is_searched_under_a_stated_reserve() -> None:
    found = figures(*BOOT, *RESERVE)
    assert found["tokens"] == found["cuts"][0]["tokens"] >= 436_766


BAD = {
    "no reserve": (["llama-3-70b", "--stages", "2", "--gpu-bytes", "80GiB", "--layer-bytes", "1GiB"], "--reserve must be given for cuts that were never booted"),
    "no reserve for a cut from a boot": (
        [*BOOT, "--cut", "33,15,16", "--layer-bytes", "1GiB"], "reserve must be given for a cut that was never booted"),
    "no weights": (["llama-3-70b", "--stages", "2", "--gpu-bytes", "80GiB", "--reserve", "0"], "--layer-bytes (of one rank) or --checkpoint-bytes (of all) must be given"),
    "no weights for a cut from a boot": ([*BOOT, "--cut", "33,15,16", "--reserve", "0"], "--layer-bytes must be given for a cut that was never booted"),
    "no memory": (["llama-3-70b", "--stages", "2", "--reserve", "0"], "--gpu-bytes or --gpu must be given, and not both"),
    "no stages": (["llama-3-70b", "--gpu-bytes", "80GiB", "--reserve", "0"], "must say how many stages there are"),
    "stages of two minds": (
        ["llama-3-70b", "--stages", "3", "--gpu-bytes", "80GiB,80GiB", "--reserve", "0"],
        "flags speak of different numbers of stages: --stages of 3, --gpu-bytes of 2"),
    "more stages than layers": (["llama-3-70b", "--stages", "81", "--gpu-bytes", "80GiB"], "--stages must be from 1 to 80, the number of layers, not 81"),
    "a cut of another model": (
        ["llama-3-70b", "--cut", "40,41", "--gpu-bytes", "80GiB", "--layer-bytes", "1", "--reserve", "0"], "with a sum of 80, not 40, 41 (sum 81)"),
    "state that nobody counts": (
        ["bamba-9b", "--stages", "2", "--gpu-bytes", "80GiB", "--layer-bytes", "1GiB", "--reserve", "0"], "max_running or state_slots must be given"),
    "no room": (
        ["llama-3-70b", "--cut", "79,1", "--gpu-bytes", "80GiB", "--layer-bytes", "1.6GiB", "--reserve", "0"],
        "stage 0: the items come to 126.400 GiB of 80.000, 46.400 too much; the largest is weights with"),
    "a boot of another model": (["llama-3-70b", "--boot", BOOT[2], "--kv-dtype", "fp8"], "stage 0 has 7 attention and 21 recurrent layers, and layers 0 to 27 of the model have (28, 0)"),
    "a boot of another type": ([*BOOT[:3], "--kv-dtype", "bf16"], "16 attention layers of CONFIG take 65,536 B a token, 4,096.0 each"),
    "a boot and a budget": ([*BOOT, "--gpu-bytes", "1GiB"], "--gpu-bytes cannot be given with --boot, which says what a stage has"),
    "a boot that is none": (["llama-3-8b", "--boot", str(HERE / "configs" / "llama-3-8b.json")], "boot record: architectures, hidden_size,"),
    "a boot that does not hang together": (["qwen3.5-27b", "--kv-dtype", "fp8", "--boot", "{tmp}/broken.json"], "does not hang together: the pool is 436,767 tokens"),
    "no boot": ([*BOOT[:1], "--boot", "nowhere.json"], "nowhere.json: no such file"),
    "no config": (["nowhere", "--stages", "2"], "nowhere.json: no such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(name: str, tmp_path: Path) -> None:
    record = json.loads((HERE / "boots" / "cut-28-20-16.json").read_text(encoding="utf-8"))
    record["tokens"] += 1
    (tmp_path / "broken.json").write_text(json.dumps(record))
    words, message = BAD[name]
    result = cut(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
