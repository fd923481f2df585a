"""Token ids for the prompts of a scenario, such that only what the file calls equal is equal.

Each segment name owns a range of token ids as long as its longest use, so the token at an offset of one segment never
equals a token of another, and prompts that differ in a name differ from that segment's first token on. What does not
live here: what a request generated, which the runner knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvsched.request import MAX_TOKEN_ID
from kvsched.scenario.document import InvalidScenario, Segment, Submit
from kvsched.units import Tokens

SAMPLED = 0
"""The token that every request samples at every position."""
STOP = 1
"""The token that ends a request at its `stop_after`."""
FIRST = 2
"""The first token id that a prompt may hold."""


class Vocabulary:
    """The token ids of one scenario's segments."""

    def __init__(self, submits: Iterable[Submit]) -> None:
        """Give each segment name its range. Raises `InvalidScenario` where int32 has no room for all. O(segments)."""
        longest: dict[str | int, int] = {}
        for submit in submits:
            for segment in submit.prompt:
                if not segment.generated:
                    longest[segment.name] = max(longest.get(segment.name, 0), segment.length)
        self._first: dict[str | int, int] = {}
        after = FIRST
        for name, length in longest.items():
            self._first[name] = after
            after += length
        if after - 1 > MAX_TOKEN_ID:
            raise InvalidScenario(f"the prompts hold {after - FIRST} different tokens; allowed: {MAX_TOKEN_ID - FIRST + 1}")

    def tokens(self, prompt: Iterable[Segment], generated: Callable[[Segment], Tokens]) -> Tokens:
        """The prompt's token ids; `generated` answers for the segments that a request generated. O(tokens)."""
        parts = [generated(part) if part.generated else self._own(part) for part in prompt]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _own(self, segment: Segment) -> Tokens:
        first = self._first[segment.name]
        return np.arange(first, first + segment.length, dtype=np.int32)
