"""Generated tokens of all residents, written one step at a time and read when a request ends.

A step writes one line of a [ticks, rows] block, so that keeping tokens costs one vector store per step and nothing per
request; a request that ends reads its own column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvsched.live import NOTHING
from kvsched.units import Ints, Tokens

TICKS = 64
"""Lines per block: a block of 4,096 rows is 1 MiB."""
KEEP = 64
"""Blocks kept before the oldest is folded into the records of those who still need it: at most 4,096 lines."""


class TokenLog:
    """Append-only lines of (row, token). -1 marks a row without a token in a line."""

    __slots__ = ("_blocks", "_first", "_line", "_width", "tick")

    def __init__(self, rows: int) -> None:
        self._width = rows
        self._blocks: list[Tokens] = []
        self._first = 0  # number of the oldest block kept
        self._line = TICKS
        self.tick = 0

    def widen(self, rows: int) -> None:
        """Make room for `rows` rows, from the next block on; a narrower current block ends early."""
        if rows <= self._width:
            return
        self._width = rows
        self.tick += TICKS - self._line
        self._line = TICKS

    def write(self, rows: Ints | slice, tokens: npt.NDArray[np.signedinteger[Any]]) -> None:
        """One line: `tokens[i]` for `rows[i]`. O(rows)."""
        if self._line == TICKS:
            self._blocks.append(np.full((TICKS, self._width), -1, dtype=np.int32))
            self._line = 0
        self._blocks[-1][self._line, rows] = tokens
        self._line += 1
        self.tick += 1

    def read(self, row: int, since: int) -> Tokens:
        """Tokens of `row` in lines `since` and later, in order. O(lines)."""
        if since >= self.tick:
            return NOTHING
        block = since // TICKS - self._first
        parts = [self._blocks[block][since % TICKS :, row]]
        parts += [later[:, row] for later in self._blocks[block + 1 :]]
        column = np.concatenate(parts)
        return column[column >= 0]

    @property
    def full(self) -> bool:
        """Whether the oldest block should be folded away with `fold`."""
        return len(self._blocks) > KEEP

    @property
    def oldest_end(self) -> int:
        """First tick after the oldest block."""
        return (self._first + 1) * TICKS

    def read_oldest(self, row: int, since: int) -> Tokens:
        """Tokens of `row` from `since` to the end of the oldest block."""
        column = self._blocks[0][since % TICKS :, row]
        return column[column >= 0]

    def fold(self) -> None:
        """Forget the oldest block; every reader's `since` must be at least `oldest_end` by now."""
        del self._blocks[0]
        self._first += 1
