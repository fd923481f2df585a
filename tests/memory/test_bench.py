"""The benches of this room run and say what they promise to say. What they measure is not asserted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvsched.bench import evict, prefix
from kvsched.cli.bench import command


def test_prefix_yields_one_line_per_size() -> None:
    lines = list(prefix.run(tokens=(64, 100), page_size=16, repeats=2))
    assert [line["tokens"] for line in lines] == [64, 100]
    for line in lines:
        assert {"match_us", "pages_us", "insert_us", "chunked_us", "growing_us"} <= line.keys()
        assert all(line[key] > 0 for key in line if key.endswith("_us"))


def test_evict_fills_the_pool_and_counts_its_memory() -> None:
    (line,) = evict.run(pages=2_000, leaves=200, evictions=50, page_size=16)
    assert (line["pages"], line["leaves"], line["evictions"]) == (2_000, 200, 50)
    assert line["seconds"] > 0
    assert 0 < line["bytes_per_page"] <= 100, "tracemalloc's figure does not depend on the machine's speed"


def test_the_command_prints_one_json_object_per_size() -> None:
    result = CliRunner().invoke(command, ["prefix", "--tokens", "64", "128", "--page-size", "16", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["tokens"] for line in result.output.splitlines()] == [64, 128]


@pytest.mark.parametrize("words", [["--tokens", "64", "--tokens", "128"], ["--tokens=64", "128"], ["--repeats", "1", "--tokens", "64", "128"]])
def test_the_command_takes_several_values_after_one_flag(words: list[str]) -> None:
    result = CliRunner().invoke(command, ["prefix", *words, "--json", "--repeats", "1"])
    assert [json.loads(line)["tokens"] for line in result.output.splitlines()] == [64, 128]


def test_the_command_prints_a_table() -> None:
    result = CliRunner().invoke(command, ["evict", "--pages", "500", "--leaves", "50", "--evictions", "5"])
    assert result.exit_code == 0, result.output
    assert "bytes_per_page" in result.output


def test_sizes_that_cannot_be_are_refused() -> None:
    result = CliRunner().invoke(command, ["evict", "--pages", "100", "--leaves", "100"])
    assert result.exit_code == 2
    assert "pages must be at least" in result.output
    assert CliRunner().invoke(command, ["prefix", "--tokens", "0"]).exit_code == 2
