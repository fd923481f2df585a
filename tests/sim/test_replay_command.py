"""`kvsched replay` and `kvsched demo` from the outside: output, exit codes, and what bad input is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsched.cli.group import group
from kvsched.sim.demo import COMMAND, FURTHER

SMALL = ["--format", "generate", "--requests", "30", "--prompt-mean", "100", "--output-mean", "20", "--pool-tokens", "4096"]
STATED = (
    "requests", "finished", "refused", "steps", "retractions", "recomputed_tokens", "cached_tokens", "prefill_tokens",
    "ttft_p50", "ttft_p90", "ttft_p99", "e2e_p50", "e2e_p90", "e2e_p99", "makespan_s", "occupancy_mean", "occupancy_peak",
    "cpu_s", "cpu_us_per_step",
)


def kvsched(*words: str) -> Result:
    return CliRunner().invoke(group, list(words), catch_exceptions=False)


def deadlock(tmp_path: Path) -> list[str]:
    file = tmp_path / "two.jsonl"
    rows = [{"timestamp": 0, "input_length": 800, "output_length": 1, "hash_ids": [2 * i, 2 * i + 1]} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["replay", "--trace", str(file), "--format", "mooncake", "--pool-tokens", "1024", "--chunk-tokens", "64",
            "--max-step-tokens", "128"]


def test_json_is_one_object_with_every_stated_key_and_nothing_else_on_either_stream() -> None:
    result = kvsched("replay", *SMALL, "--json", "--oversize-share", "0.2", "--seed", "3")
    assert result.exit_code == 0
    assert result.stderr == ""
    out = json.loads(result.stdout)
    assert set(STATED) <= set(out)
    assert out["requests"] == 30
    assert out["finished"] + out["refused"] == 30
    assert out["refused"] > 0


def test_one_seed_gives_one_result() -> None:
    def figures(seed: str) -> dict[str, object]:
        out = json.loads(kvsched("replay", *SMALL, "--json", "--seed", seed).stdout)
        return {key: value for key, value in out.items() if not key.startswith("cpu_")}

    assert figures("1") == figures("1")
    assert figures("1") != figures("2")


def test_the_table_names_every_figure() -> None:
    result = kvsched("replay", *SMALL, "--check")
    assert result.exit_code == 0
    for label in ("requests", "finished", "retractions", "share from cache", "time to first token p50", "pool in use, mean"):
        assert label in result.stdout


@pytest.mark.parametrize("flags", [
    ["--no-cache"], ["--order", "sjf"], ["--head", "backfill"], ["--admission", "guaranteed"], ["--max-in-flight", "2"],
    ["--eviction", "slru"], ["--limit", "5"], ["--speed", "3"], ["--max-running", "2"], ["--chunk-tokens", "32"],
    ["--conservativeness", "0.5"], ["--arrivals", "gamma", "--burstiness", "2"], ["--t-base", "0.001", "--t-tok", "0"],
    ["--context-limit", "400"], ["--no-ledger"], ["--page-size", "1"],
], ids=" ".join)
def test_each_flag_is_taken(flags: list[str]) -> None:
    result = kvsched("replay", *SMALL, "--json", *flags)
    assert result.exit_code == 0
    out = json.loads(result.stdout)
    assert out["finished"] + out["refused"] == out["requests"] == (5 if "--limit" in flags else 30)


def test_the_deadlock_shows_without_the_ledger_alone(tmp_path: Path) -> None:
    words = deadlock(tmp_path)
    assert kvsched(*words).exit_code == 0
    result = kvsched(*words, "--no-ledger")
    assert result.exit_code == 1
    assert "WEDGED at" in result.stdout
    for name in ("L1", "L2"):
        assert f"  {name}: running" in result.stdout
    out = json.loads(kvsched(*words, "--no-ledger", "--json").stdout)
    assert out["unfinished"] == 2
    assert [one["id"] for one in out["wedge"]["stuck"]] == ["L1", "L2"]


def test_a_malformed_line_is_named_and_exits_2(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n2023-11-16 18:17:04,five,5\n")
    result = kvsched("replay", "--trace", str(file), "--format", "azure")
    assert result.exit_code == 2
    assert f"{file}, line 3: ContextTokens must be an integer of at least 1, not 'five'" in result.stderr


@pytest.mark.parametrize(("form", "text", "told"), [
    ("mooncake", "", "no request in it, and 0 lines that ask for nothing"),
    ("burstgpt", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,0,7,7,Conversation log\n",
     "no request in it, and 1 lines that ask for nothing"),
])
def test_a_trace_without_requests_exits_2(tmp_path: Path, form: str, text: str, told: str) -> None:
    file = tmp_path / "empty"
    file.write_text(text)
    result = kvsched("replay", "--trace", str(file), "--format", form)
    assert result.exit_code == 2
    assert f"{file}: {told}" in result.stderr


@pytest.mark.parametrize(("words", "told"), [
    (["--format", "azure"], "--format azure needs --trace FILE"),
    (["--format", "generate", "--trace", "x"], "--format generate takes no --trace"),
    (["--format", "azure", "--trace", "x", "--tree-depth", "1"], "--tree-depth is for --format generate only"),
    (["--format", "azure", "--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["--format", "generate", "--rate", "0"], "rate must be a number from 1e-09 to 1e+09, not 0"),
    (["--format", "generate", "--speed", "0"], "speed must be a number from 1e-09 to 1e+09, not 0"),
    (["--format", "generate", "--pool-tokens", "8"], "pool_tokens must be at least one page"),
    (["--format", "generate", "--t-base", "-1"], "t_base must be a number of seconds"),
    (["--format", "generate", "--conservativeness", "-1"], "conservativeness must be"),
    (["--trace", "x"], "Missing option '--format'"),
])
def test_bad_input_exits_2_and_says_what(words: list[str], told: str) -> None:
    result = kvsched("replay", *words)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.fixture(scope="module")
def demonstration() -> Result:
    return kvsched("demo")


def test_the_demo_shows_admission_hits_retraction_refusal_and_the_deadlock(demonstration: Result) -> None:
    assert demonstration.exit_code == 0
    out = demonstration.stdout
    assert out.count(" arrived ") == 10
    for words in ("What to look at:", "- refused: ", "- admission: ", "- retraction: ", "- prefix hits: ", "- ledger: ", "Try next:"):
        assert words in out
    figures = {line[:25].strip(): line[25:].split() for line in out.splitlines() if line.startswith((
        "refused  ", "unfinished  ", "retractions  ", "prompt tokens from cache  ",
    ))}
    assert all(int(n) > 0 for n in figures["refused"])
    assert [n == "0" for n in figures["unfinished"]] == [True, True, True, False]
    assert [n == "0" for n in figures["retractions"]][:2] == [False, True]
    assert figures["prompt tokens from cache"][2] == "0"


def test_the_commands_that_the_demo_names_run_the_same_workload(demonstration: Result) -> None:
    table = demonstration.stdout.splitlines()
    steps = next(line for line in table if line.startswith("steps")).replace(",", "").split()[1:]
    for column, (flags, code) in {0: ("", 0), 3: (FURTHER[2][0], 1)}.items():
        result = kvsched(*COMMAND.split()[1:], *flags.split(), "--json")
        assert result.exit_code == code
        assert str(json.loads(result.stdout)["steps"]) == steps[column]


@pytest.mark.parametrize("flags", [flags for flags, _ in FURTHER])
def test_every_flag_that_the_demo_names_is_one(flags: str) -> None:
    assert kvsched(*COMMAND.split()[1:], *flags.split(), "--limit", "3").exit_code == 0
