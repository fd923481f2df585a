"""Trace files as sequences of arrivals, with the content of each prompt made when it is asked for.

What lives here: `Arrival`, the three kinds of content, and one reader per file format. What does not: invented workloads
(`kvsched.sim.workload`), and anything that runs a scheduler (`kvsched.sim.replay`).

Formats:
- mooncake: one JSON object a line with timestamp (ms), input_length, output_length and hash_ids, one id per block of 512
  tokens. Equal ids are equal content, so prefix hits are real.
- azure: CSV with the columns TIMESTAMP (date and time), ContextTokens, GeneratedTokens. Nothing is known of the content.
- burstgpt: CSV with the columns Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type, and
  perhaps others. Nothing is known of the content. The model becomes the tenant. A line with 0 request tokens records a call
  that failed before anything was asked; it is skipped and counted.

An output length of 0 is legal in every format: such a request computes its prompt and generates nothing (law A2).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvsched.errors import HostError
from kvsched.request import MAX_TOKEN_ID
from kvsched.units import Tokens, pages_for

FORMATS = ("mooncake", "azure", "burstgpt")
BLOCK_TOKENS = 512
"""Tokens per hash id in the published Mooncake traces."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")


class TraceError(HostError, ValueError):
    """A trace cannot be read; the message names the file, the line, and what was expected there."""


class Content(Protocol):
    """What a prompt says, without the tokens themselves."""

    @property
    def length(self) -> int:
        """Tokens in the prompt."""

    def tokens(self) -> Tokens:
        """The token ids, as a new array. O(length)."""


@attrs.frozen(eq=False)
class Blocks:
    """Content named block by block: block b holds the tokens b * size to (b + 1) * size - 1; the last block may be cut short.

    Two blocks have no token in common, so prompts share exactly the blocks that they name at the same places.

    >>> Blocks(np.array([0, 2]), 4, 6).tokens()
    array([0, 1, 2, 3, 8, 9], dtype=int32)
    """

    ids: npt.NDArray[np.int32]
    size: int
    length: int

    def tokens(self) -> Tokens:
        offsets = np.arange(self.size, dtype=np.int32)
        return (self.ids[:, None].astype(np.int32) * np.int32(self.size) + offsets).reshape(-1)[: self.length]


@attrs.frozen
class Unique:
    """Content that shares no prefix with anything else of the trace: its first token is the number of the request.

    >>> Unique(7, 4).tokens()
    array([7, 0, 1, 2], dtype=int32)
    """

    serial: int
    length: int

    def tokens(self) -> Tokens:
        tokens = np.arange(-1, self.length - 1, dtype=np.int32)
        tokens[0] = self.serial
        return tokens


@attrs.frozen
class Arrival:
    """A request as a trace has it. time_s: seconds since the first line; max_new: tokens it generates, all of them."""

    id: str
    time_s: float
    content: Content
    max_new: int
    tenant: str = ""
    priority: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt."""
        return self.content.length

    def prompt(self) -> Tokens:
        """The prompt's token ids, made anew at each call. O(prompt_length)."""
        return self.content.tokens()


@attrs.frozen
class Trace:
    """Arrivals by time, those of one moment in file order. skipped: lines that ask for nothing (see `read_trace`)."""

    arrivals: Sequence[Arrival]
    skipped: int = 0

LATEST = 1e15
"""Times beyond this many seconds or milliseconds are no trace's: 30 million years."""
DIGITS = 20
"""Longest count that is read as one."""


@attrs.frozen
class _Line:
    """One record of a file, with what it takes to name it in a message."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def bad(self, expected: str, got: Any) -> TraceError:
        text = repr(got)
        return TraceError(f"{self.path}, line {self.number}: {expected}, not {text if len(text) <= 60 else text[:57] + '...'}")

    def seconds(self, key: str) -> float:
        """A time that is stated as a number."""
        value = self.fields.get(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.bad(f"{key} must be a number of at least 0", value) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LATEST:
            raise self.bad(f"{key} must be a number of at least 0", value)
        return float(value)

    def moment(self, key: str) -> float:
        """A time that is stated as a date, in seconds on a calendar's scale."""
        value: Any = self.fields.get(key)
        try:
            when = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            raise self.bad(f"{key} must be a date and time such as 2023-11-16 18:17:03.97", value) from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def count(self, key: str, low: int) -> int:
        """A number of tokens."""
        value = self.fields.get(key)
        plain = isinstance(value, str) and value.strip().isdecimal() and len(value) <= DIGITS
        number: Any = int(str(value)) if plain else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= MAX_TOKEN_ID:
            raise self.bad(f"{key} must be an integer of at least {low}", value)
        return number


def read_trace(path: str | Path, form: str, *, limit: int | None = None, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read a trace file; `form` is one of `FORMATS`.

    limit: read that many requests from the top at most. block_tokens: tokens per hash id (mooncake). A request is called L
    and the number of its line. Raises `TraceError` for a file that cannot be read and for a malformed line. O(file); the
    prompts themselves are not made.
    """
    if form not in FORMATS:
        raise TraceError(f"a trace's format must be one of {', '.join(FORMATS)}, not {form!r}")
    path = Path(path)
    readers: dict[str, _Reader] = {"mooncake": _Mooncake(block_tokens), "azure": _azure, "burstgpt": _burstgpt}
    reader = readers[form]
    lines = _json_lines(path) if form == "mooncake" else _csv_lines(path, AZURE_COLUMNS if form == "azure" else BURSTGPT_COLUMNS)
    arrivals: list[Arrival] = []
    skipped = 0
    while limit is None or len(arrivals) < limit:
        line = next(lines, None)
        if line is None:
            break
        arrival = reader(line, len(arrivals))
        if arrival is None:
            skipped += 1
        else:
            arrivals.append(arrival)
    arrivals.sort(key=lambda arrival: arrival.time_s)
    if form == "azure" and arrivals:
        zero = arrivals[0].time_s
        arrivals = [attrs.evolve(arrival, time_s=round(arrival.time_s - zero, 6)) for arrival in arrivals]
    return Trace(arrivals, skipped)


_Reader = Callable[[_Line, int], "Arrival | None"]


class _Mooncake:
    """Renumbers the hash ids densely, in order of appearance, so that any ids become int32 content without collisions."""

    def __init__(self, block_tokens: int) -> None:
        if not 1 <= block_tokens <= MAX_TOKEN_ID:
            raise TraceError(f"block_tokens must be at least 1, not {block_tokens!r}")
        self.size = block_tokens
        self.blocks = (MAX_TOKEN_ID + 1) // block_tokens
        self.numbers: dict[int, int] = {}

    def __call__(self, line: _Line, serial: int) -> Arrival:
        del serial
        time_s = line.seconds("timestamp") / 1000
        length = line.count("input_length", 1)
        max_new = line.count("output_length", 0)
        ids = line.fields.get("hash_ids")
        expected = pages_for(length, self.size)
        if not isinstance(ids, list) or any(isinstance(name, bool) or not isinstance(name, int) for name in ids):
            raise line.bad("hash_ids must be a list of integers", ids)
        if len(ids) != expected:
            raise line.bad(f"hash_ids must hold {expected} ids, one per {self.size} tokens of input_length {length}", len(ids))
        numbers = self.numbers
        dense = np.fromiter((numbers.setdefault(name, len(numbers)) for name in ids), dtype=np.int32, count=len(ids))
        if len(numbers) > self.blocks:
            raise line.bad(f"a trace may name {self.blocks} different blocks of {self.size} tokens", len(numbers))
        return Arrival(f"L{line.number}", time_s, Blocks(dense, self.size, length), max_new)


def _azure(line: _Line, serial: int) -> Arrival:
    content = Unique(serial, line.count("ContextTokens", 1))
    return Arrival(f"L{line.number}", line.moment("TIMESTAMP"), content, line.count("GeneratedTokens", 0))


def _burstgpt(line: _Line, serial: int) -> Arrival | None:
    time_s = line.seconds("Timestamp")
    length = line.count("Request tokens", 0)
    max_new = line.count("Response tokens", 0)
    if length == 0:
        return None
    return Arrival(f"L{line.number}", time_s, Unique(serial, length), max_new, tenant=str(line.fields["Model"]))


def _json_lines(path: Path) -> Iterator[_Line]:
    for number, text in _lines(path):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: expected a JSON object, and it does not parse: {error}") from None
        if not isinstance(fields, dict):
            raise _Line(path, number, {}).bad("expected a JSON object", fields)
        yield _Line(path, number, fields)


def _csv_lines(path: Path, columns: tuple[str, ...]) -> Iterator[_Line]:
    lines = _lines(path)
    number, text = next(lines, (1, ""))
    header = _cells(path, number, text)
    if missing := [column for column in columns if column not in header]:
        wanted = f"expected a header with the columns {','.join(columns)}"
        raise TraceError(f"{path}, line {number}: {wanted}; it lacks {', '.join(missing)}")
    for number, text in lines:
        cells = _cells(path, number, text)
        if len(cells) != len(header):
            raise _Line(path, number, {}).bad(f"expected {len(header)} fields, as the header has", len(cells))
        yield _Line(path, number, dict(zip(header, cells, strict=True)))


def _cells(path: Path, number: int, text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise TraceError(f"{path}, line {number}: expected comma-separated values, and they do not parse: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError:
        raise TraceError(f"{path}, line {number + 1} or later: expected UTF-8 text") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
