"""Pools of sliding-window layers, where the host gives back pages that no later token looks at.

What lives here: the least such a pool must hold, the longest chunk that it can stage, and what a request holds at its peak. What does
not: whether a host gives pages back at all; one page table for all layers cannot.
"""

from __future__ import annotations

from kvsched.errors import ConfigError
from kvsched.units import aligned, pages_for


def least_window_pages(window: int, page_size: int) -> int:
    """Pages without which not one request runs: its window and one page more, since it starts anywhere in a page (case C69).

    >>> least_window_pages(128, 256) * 256
    512
    """
    return pages_for(window + page_size, page_size)


def window_pool(tokens: int, page_size: int, window: int) -> int:
    """Pages of a window pool of `tokens`, rounded down. Raises `ConfigError` where not one request could run on it.

    >>> window_pool(4096, 256, 128)
    16
    """
    pages, least = tokens // page_size, least_window_pages(window, page_size)
    if pages < least:
        raise ConfigError(
            f"a window pool of {tokens} tokens has {pages} pages of {page_size}, {pages * page_size} tokens, and a window of {window} "
            f"needs {least * page_size}")
    return pages


def window_chunk(pages: int, page_size: int, window: int, chunk: int) -> int:
    """The longest chunk that such a pool can stage, at most `chunk`: whole pages, with the window before it (case C70).

    A longer one would wait for pages that nobody can give back. Raises `ConfigError` where not even a page can be staged.

    >>> window_chunk(20_992 // 256, 256, 128, 32_768), window_chunk(20_992 // 256, 256, 128, 8192)
    (20480, 8192)
    """
    most = aligned(max(0, (pages - 1) * page_size - window), page_size)
    if most < 1:
        raise ConfigError(f"a window pool of {pages} pages of {page_size} stages no page of a prompt beside a window of {window}")
    return min(chunk, most)


def window_peak(window: int, page_size: int, recycle_interval: int) -> int:
    """Most slots that a decoding request holds in such a pool: the window, what comes before pages are given back, two pages cut (C72).

    >>> window_peak(64, 16, 64), 480 // window_peak(64, 16, 64)
    (160, 3)
    """
    return window + recycle_interval + 2 * page_size
