"""The one place where tokens become pages.

Everything in kvsched counts memory in pages. A module that needs pages from tokens calls a function of this file, so a
comparison of pages with tokens cannot be written by accident elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, one dimension, C-contiguous."""
Pages = npt.NDArray[np.int32]
"""Page ids, one dimension."""
Ints = npt.NDArray[np.int64]
"""Counts, positions or row numbers, one dimension."""
NO_INTS: Ints = np.zeros(0, dtype=np.int64)
NO_INTS.flags.writeable = False
NO_PAGES: Pages = np.zeros(0, dtype=np.int32)
NO_PAGES.flags.writeable = False


def plain(value: Any) -> Any:
    """A numpy scalar as a Python one, whose arithmetic cannot overflow; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def sealed(tokens: Tokens) -> Tokens:
    """The same array, from now on read-only: it is handed out, or shared with what is."""
    tokens.flags.writeable = False
    return tokens


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` slots: the ceiling of the quotient.

    >>> pages_for(0, 16), pages_for(16, 16), pages_for(17, 16)
    (0, 1, 2)
    """
    return -(-tokens // page_size)


def pages_for_each(tokens: Ints, page_size: int) -> Ints:
    """`pages_for` of every element, as a new array."""
    return -(-tokens // page_size)


def aligned(tokens: int, page_size: int) -> int:
    """The largest multiple of `page_size` that is at most `tokens`.

    >>> aligned(63, 16), aligned(64, 16)
    (48, 64)
    """
    return tokens - tokens % page_size


def total_slots(prompt: int, max_new: int) -> int:
    """Slots a request can ever write: the last sampled token is never written (law A2).

    >>> total_slots(4096, 1), total_slots(4096, 2), total_slots(64, 0)
    (4096, 4097, 64)
    """
    return prompt + max(max_new, 1) - 1


def servable_slots(pages: int, page_size: int, context: int | None) -> int:
    """Largest P + N - 1 of one request, in slots: what `pages` hold, and what the context limit on P + N leaves.

    >>> servable_slots(1006, 64, None), servable_slots(1006, 64, 4096)
    (64384, 4095)
    """
    slots = pages * page_size
    return slots if context is None else min(slots, context - 1)


def reusable(prompt: int, page_size: int) -> int:
    """Tokens of a prompt that a cache may serve: whole pages, and at least one token is left to compute (law D2).

    >>> reusable(64, 16), reusable(65, 16), reusable(64, 1)
    (48, 64, 63)
    """
    return aligned(prompt - 1, page_size)
