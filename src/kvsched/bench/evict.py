"""What an eviction costs in a large tree, and how much memory a cached page takes beyond its tokens.

What does not live here: when and how much to evict, which is the scheduler's to decide.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from kvsched.memory import PagePool, RadixCache
from kvsched.units import Tokens

VOCABULARY = 128_000
GROUP = 100
"""Leaves that share a first page, so that the tree has interior nodes too."""


def run(
    *, pages: int = 1_000_000, leaves: int = 100_000, evictions: int = 10_000, page_size: int = 16, eviction: str = "lru", seed: int = 0
) -> Iterator[dict[str, Any]]:
    """One line: seconds for `evictions` calls of evict(1), each page given back to the pool, and bytes_per_page.

    The tree fills the pool: `pages` cached pages in `leaves` leaves, unlocked in random order. bytes_per_page is what
    tracemalloc says the cache holds (arrays, nodes, tables, queues), less 4 bytes for each cached token, per cached page; it
    comes from a build of its own, because tracing slows what it watches. The pool is counted apart.
    """
    groups = -(-leaves // GROUP)
    if pages < leaves + groups:
        raise ValueError(f"pages must be at least leaves + leaves / {GROUP} = {leaves + groups}, not {pages}")
    tracemalloc.start()
    try:
        pool = PagePool(pages, page_size)
        before = _traced()
        cache = _build(pool, leaves, groups, eviction, seed)
        held = _traced() - before
    finally:
        tracemalloc.stop()
    cached = cache.evictable
    del cache
    pool = PagePool(pages, page_size)
    cache = _build(pool, leaves, groups, eviction, seed)
    gc.collect()
    started = perf_counter()
    for _ in range(evictions):
        pool.release(cache.evict(1))
    elapsed = perf_counter() - started
    if pool.free != min(evictions, cached):
        raise RuntimeError(f"{evictions} evictions freed {pool.free} pages")
    yield {
        "pages": cached, "leaves": leaves, "evictions": evictions, "eviction": eviction, "page_size": page_size,
        "seconds": elapsed, "us_per_eviction": elapsed / evictions * 1e6,
        "bytes_per_page": held / cached - 4 * page_size, "token_bytes_per_page": 4 * page_size,
    }


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _build(pool: PagePool, leaves: int, groups: int, eviction: str, seed: int) -> RadixCache:
    """A cache that holds every page of the pool, in so many leaves of nearly equal length."""
    rng = np.random.default_rng(seed)
    size = pool.page_size
    cache = RadixCache(size, eviction)
    heads = [_prompt(rng, size) for _ in range(groups)]
    least, longer = divmod(pool.usable - groups, leaves)
    handles = []
    for leaf in range(leaves):
        own = least + (leaf < longer)
        prompt = np.concatenate((heads[leaf // GROUP], _prompt(rng, own * size)))
        handle = cache.lock("", prompt)
        cache.extend(handle, prompt[handle.length :], pool.alloc((len(prompt) - handle.length) // size))
        handles.append(handle)
    for at in rng.permutation(leaves).tolist():
        cache.unlock(handles[at])
    return cache


def _prompt(rng: np.random.Generator, tokens: int) -> Tokens:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.int32)
