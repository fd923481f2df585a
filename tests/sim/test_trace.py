"""Trace readers: what a good file becomes, and what a bad line is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvsched.sim.trace import Blocks, TraceError, Unique, read_trace

SHARED = Path(__file__).parents[2] / "../shared/data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def lines(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


def mooncake(time_ms: float, length: int, output: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": ids})


def test_mooncake_lines_become_arrivals_whose_equal_ids_are_equal_content(tmp_path: Path) -> None:
    file = lines(tmp_path / "t", mooncake(0, 1000, 5, [900, 7]), mooncake(1500, 1300, 0, [900, 7, 3]), mooncake(1500, 600, 2, [900, 12]))
    a, b, c = read_trace(file, "mooncake").arrivals
    assert [(x.id, x.time_s, x.prompt_length, x.max_new) for x in (a, b, c)] == [
        ("L1", 0.0, 1000, 5), ("L2", 1.5, 1300, 0), ("L3", 1.5, 600, 2),
    ]
    first, second, third = a.prompt(), b.prompt(), c.prompt()
    assert [len(x) for x in (first, second, third)] == [1000, 1300, 600]
    assert first.dtype == np.int32
    assert np.array_equal(first, second[:1000])
    assert np.array_equal(first[:512], third[:512])
    assert not np.isin(third[512:], second).any()
    assert np.array_equal(a.prompt(), first)


def test_mooncake_blocks_never_collide_whatever_their_ids(tmp_path: Path) -> None:
    ids = [0, 1, 2**31, 2**40 + 1, 2**62, -5]
    file = lines(tmp_path / "t", mooncake(0, 512 * 6, 1, ids), mooncake(0, 512 * 6, 1, ids[::-1]))
    forward, backward = (arrival.prompt() for arrival in read_trace(file, "mooncake").arrivals)
    assert len(np.unique(forward)) == 512 * 6
    assert forward.min() >= 0
    assert np.array_equal(forward.reshape(6, 512)[::-1], backward.reshape(6, 512))


def test_mooncake_blocks_may_have_another_size(tmp_path: Path) -> None:
    file = lines(tmp_path / "t", mooncake(0, 5, 1, [4, 9]), mooncake(0, 6, 1, [4, 8]))
    a, b = read_trace(file, "mooncake", block_tokens=4).arrivals
    assert a.prompt().tolist()[:4] == b.prompt().tolist()[:4]
    assert a.prompt()[4] != b.prompt()[4]


def test_azure_dates_count_from_the_first_and_prompts_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(f"{AZURE}\r\n2023-11-16 18:17:03.9799600,48,10\r\n2023-11-16 18:17:04.0319600,31,0\r\n".encode())
    a, b = read_trace(file, "azure").arrivals
    assert [(x.id, x.time_s, x.prompt_length, x.max_new) for x in (a, b)] == [("L2", 0.0, 48, 10), ("L3", 0.052, 31, 0)]
    assert a.prompt()[0] != b.prompt()[0]


def test_azure_dates_may_have_an_offset(tmp_path: Path) -> None:
    file = lines(tmp_path / "t", AZURE, "2024-05-10 02:00:00+02:00,1,1", "2024-05-10 00:00:01.5+00:00,1,1")
    assert [x.time_s for x in read_trace(file, "azure").arrivals] == [0.0, 1.5]


def test_burstgpt_lines_with_further_columns_and_failed_calls(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "t",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,a,0.1,ChatGPT,472,18,490,Conversation log",
        "",
        "6.5,b,0.1,GPT-4,0,0,0,API log",
        "7,c,0.1,GPT-4,17,0,17,API log",
    )
    trace = read_trace(file, "burstgpt")
    assert trace.skipped == 1
    assert [(x.id, x.time_s, x.prompt_length, x.max_new, x.tenant) for x in trace.arrivals] == [
        ("L2", 5.0, 472, 18, "ChatGPT"), ("L5", 7.0, 17, 0, "GPT-4"),
    ]


def test_arrivals_are_sorted_by_time_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    file = lines(tmp_path / "t", mooncake(20, 1, 1, [0]), mooncake(10, 2, 1, [0]), mooncake(20, 3, 1, [0]))
    assert [x.id for x in read_trace(file, "mooncake").arrivals] == ["L2", "L1", "L3"]


def test_limit_counts_requests_from_the_top_and_reads_no_further(tmp_path: Path) -> None:
    file = lines(tmp_path / "t", mooncake(0, 1, 1, [0]), mooncake(0, 2, 1, [0]), "not json")
    assert [x.id for x in read_trace(file, "mooncake", limit=2).arrivals] == ["L1", "L2"]


def test_an_empty_file_has_no_arrivals(tmp_path: Path) -> None:
    assert read_trace(lines(tmp_path / "t", ""), "mooncake").arrivals == []
    assert read_trace(lines(tmp_path / "t", AZURE), "azure").arrivals == []


@pytest.mark.parametrize(("row", "words"), [
    ("{", "expected a JSON object"),
    ("[1]", "expected a JSON object, not [1]"),
    (mooncake(-1, 1, 1, [0]), "timestamp must be a number of at least 0, not -1"),
    (mooncake(float("nan"), 1, 1, [0]), "timestamp must be a number of at least 0"),
    (json.dumps({"input_length": 1, "output_length": 1, "hash_ids": [0]}), "timestamp must be a number of at least 0, not None"),
    (mooncake(0, 0, 1, []), "input_length must be an integer of at least 1, not 0"),
    (mooncake(0, 1.5, 1, [0]), "input_length must be an integer of at least 1, not 1.5"),  # type: ignore[arg-type]
    (mooncake(0, True, 1, [0]), "input_length must be an integer of at least 1, not True"),
    (mooncake(0, 1, -1, [0]), "output_length must be an integer of at least 0, not -1"),
    (mooncake(0, 1, 1, ["a"]), "hash_ids must be a list of integers"),  # type: ignore[list-item]
    (mooncake(0, 513, 1, [0]), "hash_ids must hold 2 ids, one per 512 tokens of input_length 513, not 1"),
    (mooncake(0, 512, 1, [0, 1]), "hash_ids must hold 1 ids, one per 512 tokens of input_length 512, not 2"),
])
def test_a_bad_mooncake_line_is_named(tmp_path: Path, row: str, words: str) -> None:
    file = lines(tmp_path / "bad.jsonl", mooncake(0, 1, 1, [0]), "", row)
    with pytest.raises(TraceError) as error:
        read_trace(file, "mooncake")
    assert str(error.value).startswith(f"{file}, line 3: ")
    assert words in str(error.value)


@pytest.mark.parametrize(("form", "rows", "number", "words"), [
    ("azure", ("a,b", "1,2"), 1, "it lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
    ("azure", (AZURE, "2023-11-16 18:17:03,5"), 2, "expected 3 fields, as the header has, not 2"),
    ("azure", (AZURE, "yesterday,5,5"), 2, "TIMESTAMP must be a date and time such as"),
    ("azure", (AZURE, "2023-11-16 18:17:03,0,5"), 2, "ContextTokens must be an integer of at least 1, not '0'"),
    ("azure", (AZURE, "2023-11-16 18:17:03,5,x"), 2, "GeneratedTokens must be an integer of at least 0, not 'x'"),
    ("burstgpt", (AZURE,), 1, "it lacks Timestamp, Model"),
    ("burstgpt", ("", BURST, "x,m,1,1,2,l"), 3, "Timestamp must be a number of at least 0, not 'x'"),
    ("burstgpt", (BURST, "1,m,1.5,1,2,l"), 2, "Request tokens must be an integer of at least 0, not '1.5'"),
    ("burstgpt", (BURST, "1,m,1,-1,2,l"), 2, "Response tokens must be an integer of at least 0, not '-1'"),
    ("burstgpt", (BURST, '1,"m,1,1,2,l'), 2, "expected comma-separated values"),
])
def test_a_bad_csv_line_is_named(tmp_path: Path, form: str, rows: tuple[str, ...], number: int, words: str) -> None:
    file = lines(tmp_path / "bad.csv", *rows)
    with pytest.raises(TraceError) as error:
        read_trace(file, form)
    assert str(error.value).startswith(f"{file}, line {number}: ")
    assert words in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: cannot be read"):
        read_trace(tmp_path / "nowhere", "azure")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="binary, line 1 or later: expected UTF-8 text"):
        read_trace(tmp_path / "binary", "mooncake")
    with pytest.raises(TraceError, match="one of mooncake, azure, burstgpt, not 'csv'"):
        read_trace(tmp_path / "binary", "csv")


def test_contents_make_the_tokens_they_promise() -> None:
    assert Blocks(np.array([2, 0], dtype=np.int32), 3, 4).tokens().tolist() == [6, 7, 8, 0]
    assert Unique(5, 1).tokens().tolist() == [5]
    assert Unique(0, 3).tokens().tolist() == [0, 0, 1]


def test_the_published_conversation_trace_shares_its_prefixes_as_its_ids_say() -> None:
    file = SHARED / "mooncake_conversation.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is absent: the published traces are not part of the project")
    arrivals = read_trace(file, "mooncake", limit=100).arrivals
    rows = [json.loads(row) for row in file.read_text().splitlines()[:100]]
    prompts = [arrival.prompt() for arrival in arrivals]
    assert [len(prompt) for prompt in prompts] == [row["input_length"] for row in rows]
    for i, j in [(0, 1), (3, 50), (10, 99), (98, 99)]:
        ids = zip(rows[i]["hash_ids"], rows[j]["hash_ids"], strict=False)
        blocks = next((k for k, (x, y) in enumerate(ids) if x != y), min(len(rows[i]["hash_ids"]), len(rows[j]["hash_ids"])))
        common = min(len(prompts[i]), len(prompts[j]))
        differ = np.flatnonzero(prompts[i][:common] != prompts[j][:common])
        assert (differ[0] if len(differ) else common) == min(blocks * 512, common)


def test_the_published_azure_trace_reads_whole() -> None:
    file = SHARED / "azure_code_2023.csv"
    if not file.exists():
        pytest.skip(f"{file} is absent: the published traces are not part of the project")
    trace = read_trace(file, "azure")
    assert len(trace.arrivals) == 8819
    assert sum(arrival.prompt_length for arrival in trace.arrivals) == 18_059_974
    assert trace.arrivals[-1].time_s == pytest.approx(3435.948056)
