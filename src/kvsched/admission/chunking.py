"""How many tokens of one prefill a step computes. Bounds compute only, never memory (law B1)."""

from __future__ import annotations


def chunk_length(remaining: int, budget: int, chunk: int | None, long_prefill: int | None, *, alone: bool) -> int:
    """Tokens to compute now, all in tokens. `long_prefill` is off when no other request wants prefill. O(1).

    >>> chunk_length(1000, 8192, 128, None, alone=True), chunk_length(1000, 100, 128, None, alone=True)
    (128, 100)
    >>> chunk_length(1000, 8192, None, 64, alone=False), chunk_length(1000, 8192, None, 64, alone=True)
    (64, 1000)
    """
    length = min(remaining, budget)
    if chunk is not None and chunk < length:
        length = chunk
    if long_prefill is not None and not alone and long_prefill < length:
        length = long_prefill
    return length
