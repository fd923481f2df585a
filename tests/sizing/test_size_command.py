"""`kvsched size` from the outside: figures, tables, questions, exit codes, and what bad input is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvsched.cli.accelerators import ACCELERATORS
from kvsched.cli.group import group
from kvsched.sizing.amounts import GIB

CONFIGS = Path(__file__).parent / "configs"
KEYS = {"bytes_per_token_per_rank", "tokens", "pages", "max_servable_tokens", "binding", "items", "state_bytes_per_request"}


def size(name: str, *words: str) -> Result:
    path = str(CONFIGS / f"{name}.json") if (CONFIGS / f"{name}.json").exists() else name
    return CliRunner().invoke(group, ["size", path, *words], catch_exceptions=False)


def figures(name: str, *words: str) -> dict[str, Any]:
    result = size(name, *words, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) >= KEYS
    return found


@pytest.mark.parametrize(("name", "tp", "pp", "kv", "per_token"), [
    ("llama-3-8b", 1, 1, "bf16", 131_072), ("llama-3-8b", 2, 2, "bf16", 32_768), ("llama-3-8b", 1, 1, "fp8", 65_536),
    ("llama-3-70b", 8, 1, "bf16", 40_960), ("llama-3-70b", 4, 2, "fp8", 20_480), ("qwen3-32b", 4, 1, "bf16", 65_536),
    ("qwen3-32b", 16, 1, "bf16", 32_768), ("deepseek-v3", 8, 1, "bf16", 70_272), ("deepseek-v3", 16, 2, "fp8", 31 * 576),
    ("mixtral-8x7b", 2, 1, "bf16", 65_536), ("gemma-2-9b", 1, 1, "bf16", 344_064),
])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_tokens_and_pages_follow_from_bytes(name: str, tp: int, pp: int, kv: str, per_token: int, page: int) -> None:
    found = figures(
        name, "--gpu-bytes", "85899345920", "--weights-bytes", "17179869184", "--tp", str(tp), "--pp", str(pp), "--kv-dtype", kv,
        "--page-size", str(page))
    pages = (85899345920 - 17179869184) // (per_token * page)
    assert (found["bytes_per_token_per_rank"], found["pages"], found["tokens"]) == (per_token, pages, pages * page)
    assert found["max_servable_tokens"] == min(pages * page, found["context_limit"] - 1)
    assert found["binding"] == "stage 0"
    assert sum(item["bytes"] for item in found["items"]) == found["budget_bytes"] == 80 * GIB
    assert {item["provenance"] for item in found["items"]} <= {"configured", "measured", "derived"}


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-32b", "deepseek-v3", "gemma-2-9b", "gemma-3-27b-it", "bamba-9b", "qwen3-next-80b-a3b",
                                  "llama-3.2-11b-vision"])
def test_the_command_works_on_what_users_have(name: str) -> None:
    for words in ([], ["--gpu", "h200", "--weights-bytes", "20GiB"]):
        result = size(name, *words)
        assert result.exit_code == 0
        assert "B for a token on one rank" in result.stdout
    assert "tokens, in" in result.stdout
    assert "140.401" in result.stdout


def test_hybrids_say_what_a_request_keeps() -> None:
    found = figures("bamba-9b", "--gpu-bytes", "80GiB", "--weights-bytes", "19.6GB", "--max-running", "64")
    assert found["state_bytes_per_request"] == 29 * (128 * 64 * 128 * 2 + 8448 * 3 * 2) == 62_287_360
    assert {item["name"]: item["bytes"] for item in found["items"]}["state"] == 64 * 62_287_360
    assert (found["max_running"], found["max_running_binding"]) == (64, "state_slots")
    assert found["tokens"] == (80 * GIB - 19_600_000_000 - 64 * 62_287_360) // (12_288 * 16) * 16


def test_state_slots_bound_how_many_run() -> None:
    found = figures(
        "qwen3.5-27b", "--kv-dtype", "fp8", "--state-dtype", "bf16", "--gpu-bytes", "80GiB", "--weights-bytes", "28GiB", "--state-slots", "13",
        "--slots-per-request", "3", "--transient-slots", "1", "--draft-tokens", "4", "--max-running", "64")
    assert (found["max_running"], found["max_running_binding"], found["state_slots"]) == (4, "state_slots", 13)
    items = {item["name"]: item["bytes"] for item in found["items"]}
    assert round((items["state"] + items["speculative"]) / 48 / (1 << 20), 2) == 50.85, "law G3, by layer"


def test_state_of_its_own_type() -> None:
    """The config says float32 for recurrent states; the KV cache being fp8 changes nothing in that."""
    own = figures("qwen3.5-27b", "--kv-dtype", "fp8")
    assert own["state_dtype"] == "float32"
    assert own["state_bytes_per_request"] == 48 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)
    assert own["bytes_per_token_per_rank"] == 32_768
    assert figures("qwen3.5-27b", "--state-dtype", "bf16")["state_bytes_per_request"] == 48 * (48 * 128 * 128 * 2 + 10_240 * 3 * 2)


def test_without_memory_only_costs_are_said() -> None:
    found = figures("llama-3-70b", "--tp", "8")
    assert (found["bytes_per_token_per_rank"], found["tokens"], found["pages"], found["binding"]) == (40_960, None, None, None)
    assert "Say --gpu-bytes and --weights-bytes" in size("llama-3-70b").stdout


def test_c63_items_each_once_and_the_bypass() -> None:
    words = ["--gpu-bytes", "178.36GiB", "--utilization", "0.9", "--weights-bytes", "8.58GiB", "--activation-bytes", "9.96GiB",
             "--other-bytes", "0.07GiB", "--graph-bytes", "0.65GiB", "--page-size", "1"]
    found = figures("llama-3-8b", *words)
    items = {item["name"]: item["bytes"] for item in found["items"]}
    assert abs(items["kv"] / GIB - 141.26) <= 0.01
    assert abs(items["holdback"] / GIB - 17.84) <= 0.01
    assert size("llama-3-8b", *words, "--item", "graphs=0.65GiB").stderr == "Error: graphs is booked twice: every item counts once\n"
    bypass = figures("llama-3-8b", "--kv-bytes", "10GiB")
    assert (bypass["tokens"], [item["name"] for item in bypass["items"]]) == (81_920, ["kv", "unused"])


def test_items_of_ones_own_have_their_provenance() -> None:
    found = figures("llama-3-8b", "--gpu-bytes", "80GiB", "--weights-bytes", "16GiB", "--item", "adapters=1GiB", "--item", "nccl=300MiB:measured")
    items = {item["name"]: (item["bytes"], item["provenance"]) for item in found["items"]}
    assert items["adapters"] == (GIB, "configured")
    assert items["nccl"] == (300 << 20, "measured")


def test_a_checkpoint_is_split_evenly_and_says_so() -> None:
    found = figures("llama-3-70b", "--gpu-bytes", "80GiB", "--checkpoint-bytes", "141107412992", "--tp", "4", "--pp", "2")
    weights = found["items"][0]
    assert (weights["bytes"], weights["provenance"]) == (-(-141107412992 // 8), "derived")
    assert weights["note"] == "--checkpoint-bytes 141,107,412,992 B / 8, as if it split evenly"


def test_the_index_beside_a_config_says_how_large_the_checkpoint_is(tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "llama-3-8b.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}))
    found = figures(str(tmp_path), "--gpu-bytes", "80GiB")
    assert found["items"][0]["bytes"] == 16_060_522_496
    assert found["config"] == str(tmp_path / "config.json")


def test_stages_that_differ() -> None:
    found = figures(
        "llama-3-8b", "--pp", "2", "--cut", "20,12", "--gpu-bytes", "24GiB,16GiB", "--weights-bytes", "10GiB,6GiB")
    first, second = found["stages"]
    assert (first["capacity_tokens"], second["capacity_tokens"]) == (14 * GIB // (81_920 * 16) * 16, 10 * GIB // (49_152 * 16) * 16)
    assert (found["binding_stage"], found["tokens"]) == (0, first["capacity_tokens"])
    assert found["bytes_per_token_per_rank"] == 81_920
    assert "stage 0 binds; stage 1 218,448 tokens would fit" in size(
        "llama-3-8b", "--cut", "20,12", "--gpu-bytes", "24GiB,16GiB", "--weights-bytes", "10GiB,6GiB").stdout


def test_scales_of_a_quantised_cache_are_declared_per_token_and_layer() -> None:
    plain, scaled = (figures("deepseek-v3", "--kv-dtype", "fp8", "--scale-bytes", n) for n in ("0", "16"))
    assert scaled["bytes_per_token_per_rank"] == plain["bytes_per_token_per_rank"] + 61 * 16 == 35_136 + 976
    assert figures("llama-3.2-11b-vision", "--scale-bytes", "4")["cross_bytes_per_request"] == 6404 * 8 * (4096 + 4)


def test_weights_below_the_checkpoint_are_flagged() -> None:
    """Law G7: 4.252, 2.719 and 3.662 GiB cannot hold a checkpoint of 27.5 GiB; 13.572, 7.408 and 8.342 can."""
    words = ["--kv-dtype", "fp8", "--cut", "32,16,16", "--gpu-bytes", "31800MiB,18800MiB,19800MiB", "--checkpoint-bytes", "27.5GiB",
             "--max-running", "4", "--weights-bytes"]
    flagged = [line for line in figures("qwen3.5-27b", *words, "4.252GiB,2.719GiB,3.662GiB")["warnings"] if "is booked with" in line]
    assert flagged == [
        "rank 0: weights is booked with 4.252 GiB, and its share is about 13.750: all ranks together hold less than the checkpoint",
        "rank 1: weights is booked with 2.719 GiB, and its share is about 6.875: all ranks together hold less than the checkpoint",
        "rank 2: weights is booked with 3.662 GiB, and its share is about 6.875: all ranks together hold less than the checkpoint",
    ]
    assert not [line for line in figures("qwen3.5-27b", *words, "13.572GiB,7.408GiB,8.342GiB")["warnings"] if "is booked with" in line]
    assert "note: rank 1: weights is booked with 2.719 GiB" in size("qwen3.5-27b", *words, "4.252GiB,2.719GiB,3.662GiB").stdout


def test_context_parallel_ranks_split_a_page() -> None:
    found = figures("deepseek-v3", "--cp", "8", "--page-size", "64", "--kv-bytes", "10GiB")
    assert found["bytes_per_page_per_rank"] == 8 * 70_272
    assert found["pages"] == 10 * GIB // (8 * 70_272)
    assert found["tokens"] == found["pages"] * 64


def test_reserved_pages_are_allocated_and_not_handed_out() -> None:
    plain, one = (figures("llama-3-8b", "--kv-bytes", "1GiB", "--reserved-pages", n) for n in ("0", "1"))
    assert one["pages"] == plain["pages"]
    assert one["usable_pages"] == plain["pages"] - 1
    assert one["tokens"] == plain["tokens"] - 16


def test_a_draft_model() -> None:
    found = figures("llama-3-8b", "--kv-bytes", "1GiB", "--draft", str(CONFIGS / "eagle-llama-3-8b.json"))
    assert found["bytes_per_token_per_rank"] == 131_072 + 4096
    assert figures("deepseek-v3", "--nextn-layers", "1")["bytes_per_token_per_rank"] == 70_272 + 1152


def test_windows_of_their_own() -> None:
    found = figures("gemma-2-9b", "--gpu-bytes", "80GiB", "--weights-bytes", "18GiB", "--recycle-windows", "--max-running", "16")
    assert found["bytes_per_token_per_rank"] == 172_032
    assert found["window_bytes_per_request"] == (4096 + 3 * 16) * 172_032
    plain = size("gemma-2-9b", "--gpu-bytes", "80GiB", "--weights-bytes", "18GiB")
    assert "--recycle-windows sizes pools of their own" in plain.stdout


def test_the_catalogue_by_name() -> None:
    for name, entry in ACCELERATORS.items():
        found = figures("llama-3-8b", "--gpu", name.upper(), "--weights-bytes", "8GiB", "--kv-dtype", "fp8")
        assert found["budget_bytes"] == entry.bytes
        assert entry.source
        assert 8 * GIB < entry.bytes < 400 * GIB


def test_what_would_have_to_change_for_tokens() -> None:
    words = ["--gpu-bytes", "80GiB", "--weights-bytes", "16GiB", "--for-tokens"]
    answer = figures("llama-3-8b", *words, "1000000")["what_if"]
    need = 1_000_000 * 131_072
    assert (answer["reached"], answer["short_bytes_per_rank"]) == (False, [need - 64 * GIB])
    changes = {change["what"]: change["tokens"] for change in answer["changes"]}
    assert changes[f"{(need - 64 * GIB) / GIB:.3f} GiB more memory on each rank"] == 1_000_000
    assert changes["kv_dtype float8_e4m3fn"] == 2 * 64 * GIB // 131_072
    assert changes["tp 2"] == 72 * GIB // 65_536
    assert all(tokens >= 1_000_000 for tokens in changes.values())
    reached = figures("llama-3-8b", *words, "500000")["what_if"]
    assert (reached["reached"], reached["changes"]) == (True, [])
    text = size("llama-3-8b", *words, "1000000").stdout
    assert "1,000,000 tokens: not held, 58.070 GiB short on each rank of stage 0\n  any one of these would do:" in text
    assert "500,000 tokens: held as it is" in size("llama-3-8b", *words, "500000").stdout


def test_the_bytes_said_to_be_short_are_enough_and_one_page_less_is_not() -> None:
    short = figures("llama-3-8b", "--gpu-bytes", "80GiB", "--weights-bytes", "16GiB", "--for-tokens", "600000")["what_if"]["short_bytes_per_rank"][0]
    assert figures("llama-3-8b", "--gpu-bytes", str(80 * GIB + short), "--weights-bytes", "16GiB")["tokens"] == 600_000
    assert figures("llama-3-8b", "--gpu-bytes", str(80 * GIB + short - 1), "--weights-bytes", "16GiB")["tokens"] < 600_000


def test_what_would_have_to_change_for_requests_of_a_length() -> None:
    words = ["--gpu-bytes", "80GiB", "--weights-bytes", "20GiB", "--max-running", "32", "--for-concurrency", "200", "--at-length"]
    answer = figures("bamba-9b", *words, "8000")["what_if"]
    assert [change["what"] for change in answer["changes"]] == ["max_running 200"]
    assert answer["changes"][0]["requests"] == 200
    more = figures("bamba-9b", *words, "30000")["what_if"]
    short = 20 * GIB + 200 * 62_287_360 + 200 * 1875 * 196_608 - 80 * GIB
    assert more["short_bytes_per_rank"] == [short]
    assert all(change["what"].endswith(", max_running 200") for change in more["changes"])
    assert all(change["requests"] >= 200 for change in more["changes"])
    beyond = figures("llama-3-8b", "--kv-bytes", "10GiB", "--for-concurrency", "1", "--at-length", "8192")["what_if"]
    assert beyond["obstacle"] == "a request has at most 8,191 slots: the context limit on P + N is 8,192"
    assert "not possible; a request has at most 8,191 slots" in size(
        "llama-3-8b", "--kv-bytes", "10GiB", "--for-concurrency", "1", "--at-length", "8192").stdout


def test_fewer_running_requests_make_room_for_tokens() -> None:
    answer = figures("bamba-9b", "--gpu-bytes", "40GiB", "--weights-bytes", "20GiB", "--max-running", "256", "--for-tokens", "1500000")["what_if"]
    fewer = next(change["what"] for change in answer["changes"] if change["what"].startswith("max_running"))
    most = (20 * GIB - 1_500_000 * 12_288) // 62_287_360
    assert fewer == f"max_running {most}"


def test_windows_that_recycle_are_offered() -> None:
    answer = figures("gemma-2-9b", "--gpu-bytes", "80GiB", "--weights-bytes", "18GiB", "--max-running", "8", "--for-tokens", "300000")["what_if"]
    assert "recycle windows" in [change["what"] for change in answer["changes"]]


BAD = {
    "no file": (["nowhere.json"], "nowhere.json: no such file"),
    "a config of an unknown type": (["{tmp}/x.json"], "x.json: model_type 'nope', is none that can be sized; allowed: apertus, arcee,"),
    "no JSON": (["{tmp}/broken.json"], "broken.json: no JSON: Expecting property name enclosed in double quotes, line 1 column 2"),
    "no text": (["{tmp}/binary.json"], "binary.json: no text in UTF-8, so no JSON"),
    "a directory without a config": (["{tmp}"], "config.json: no such file"),
    "auto": (["llama-3-8b", "--kv-dtype", "auto"], "--kv-dtype must be one of float32, float16, bfloat16,"),
    "no type": (["gpt-oss-20b"], "--kv-dtype must be given: config.json has no torch_dtype"),
    "no type of states": (["{tmp}/hybrid.json", "--kv-dtype", "fp8"], "--state-dtype must be given, the model has recurrent layers"),
    "heads that cannot be split": (["llama-3-8b", "--tp", "3"], "tp = 3 does not divide 32 attention heads; tp may be 1, 2, 4, 8, 16, 32"),
    "more stages than layers": (["llama-3-8b", "--pp", "33"], "--pp must be from 1 to 32, the number of layers, not 33"),
    "a cut of another model": (["llama-3-8b", "--cut", "16,15"], "a cut must be numbers of layers of at least 1 with a sum of 32, not 16, 15 (sum 31)"),
    "a cut of other stages": (["llama-3-8b", "--cut", "16,16", "--pp", "4"], "cut must be of pp = 4 stages, not of 2"),
    "a page that cannot be split": (["llama-3-8b", "--cp", "3"], "page_size = 16 must be a multiple of cp = 3"),
    "no weights": (["llama-3-8b", "--gpu-bytes", "80GiB"], "--weights-bytes (of one rank, as loaded) or --checkpoint-bytes (of all ranks) must be given"),
    "weights without memory": (["llama-3-8b", "--weights-bytes", "1GiB"], "--gpu-bytes or --gpu must be given with the weights"),
    "memory twice": (["llama-3-8b", "--gpu", "h200", "--gpu-bytes", "1GiB"], "--gpu-bytes and --gpu say the same: give one"),
    "a pool and a budget": (["llama-3-8b", "--kv-bytes", "1GiB", "--gpu", "h200"], "--kv-bytes is the pool itself, and stands instead of --gpu"),
    "an unknown accelerator": (["llama-3-8b", "--gpu", "z9", "--weights-bytes", "1GiB"], "--gpu must be one of a10, a100-40gb,"),
    "a size in words": (["llama-3-8b", "--gpu-bytes", "lots"], "--gpu-bytes must be a number of bytes, with a suffix or without (KiB, MiB,"),
    "two sizes for one": (["llama-3-8b", "--activation-bytes", "1GiB,2GiB"], "--activation-bytes must be one size, not 2"),
    "sizes for other stages": (
        ["llama-3-8b", "--pp", "3", "--gpu-bytes", "1GiB,2GiB"], "--gpu-bytes must be one size, or one for each of 3 stages, not 2"),
    "a share beyond all": (["llama-3-8b", "--utilization", "1.1"], "--utilization must be a share above 0 and at most 1, not '1.1'"),
    "a list of words": (["llama-3-8b", "--cut", "a,b"], "--cut must be integers with commas between them, not 'a,b'"),
    "an item without a size": (["llama-3-8b", "--gpu", "h200", "--weights-bytes", "1GiB", "--item", "x"], "--item must be NAME=SIZE or NAME=SIZE:PROVENANCE"),
    "an item of no provenance": (
        ["llama-3-8b", "--gpu", "h200", "--weights-bytes", "1GiB", "--item", "x=1GiB:guessed"], "with configured, measured, derived, not 'x=1GiB:guessed'"),
    "weights that do not fit": (
        ["llama-3-70b", "--gpu", "h100-80gb", "--weights-bytes", "141GB"],
        "the items come to 131.316 GiB of 79.647, 51.669 too much; the largest is weights with 131.316 GiB (configured)"),
    "state that does not fit": (
        ["bamba-9b", "--gpu", "l4", "--weights-bytes", "20GB", "--max-running", "256"], "14.850 GiB of it are kept for 256 running requests, and fewer need less"),
    "no room for a page": (
        ["llama-3-8b", "--gpu-bytes", "16GiB", "--weights-bytes", "16GiB"],
        "0.000 GiB are left for pages of 2,097,152 B, which is 0 of them, and 1 are needed at least; the largest item is weights with 16.000 GiB"),
    "slots for nobody": (
        ["bamba-9b", "--gpu", "h200", "--weights-bytes", "20GB", "--state-slots", "2", "--transient-slots", "2"],
        "state_slots must be at least 3 for one request to run, not 2"),
    "half a question": (["llama-3-8b", "--kv-bytes", "1GiB", "--for-concurrency", "3"], "--for-concurrency and --at-length go together"),
    "two questions": (
        ["llama-3-8b", "--kv-bytes", "1GiB", "--for-tokens", "1", "--for-concurrency", "3", "--at-length", "1"], "are two questions: ask one"),
    "a question without memory": (["llama-3-8b", "--for-tokens", "1"], "need --gpu-bytes, --gpu or --kv-bytes to start from"),
    "a draft with state": (["llama-3-8b", "--draft", str(CONFIGS / "bamba-9b.json")], "the draft model has recurrent layers"),
    "audio of no known length": (["{tmp}/bart.json"], "cross_tokens must be given"),
    "more pages than ids": (["llama-3-8b", "--kv-bytes", "400TiB", "--page-size", "1", "--tp", "8"], "are more than page ids can count, 2,147,483,647"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(name: str, tmp_path: Path) -> None:
    hybrid = json.loads((CONFIGS / "bamba-9b.json").read_text(encoding="utf-8"))
    del hybrid["torch_dtype"]
    (tmp_path / "hybrid.json").write_text(json.dumps(hybrid))
    (tmp_path / "x.json").write_text('{"model_type": "nope"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    bart = {"model_type": "bart", "decoder_layers": 2, "decoder_attention_heads": 2, "d_model": 8, "max_position_embeddings": 64, "torch_dtype": "float16"}
    (tmp_path / "bart.json").write_text(json.dumps(bart))
    words, message = BAD[name]
    result = size(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_the_help_says_what_every_flag_means() -> None:
    text = CliRunner().invoke(group, ["size", "--help"]).stdout
    for flag in ("--gpu-bytes", "--weights-bytes", "--tp", "--pp", "--kv-dtype", "--page-size", "--for-tokens", "--for-concurrency", "--at-length"):
        assert flag in text
