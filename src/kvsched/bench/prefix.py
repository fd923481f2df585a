"""What a prefix match and an insert cost in a radix cache that holds other content.

What does not live here: the cost of a whole admission pass (`kvsched.bench.admission`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvsched.memory import RadixCache
from kvsched.units import Pages, Tokens, aligned, reusable

VOCABULARY = 128_000
CHUNK = 8_192
"""Tokens per insert of `chunked_us`: the default budget of one step."""
OTHERS = 200
"""Prompts in the tree besides those that are measured; half of them share a system prompt."""
SHARED = 2_048
OTHER_TOKENS = 6_000


class _Source:
    """Random prompts, and pages that nobody has had before."""

    def __init__(self, seed: int, page_size: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._page_size = page_size
        self._next = 0

    def prompt(self, tokens: int) -> Tokens:
        return _frozen(self._rng.integers(0, VOCABULARY, tokens, dtype=np.int32))

    def pages(self, tokens: int) -> Pages:
        n = tokens // self._page_size
        self._next += n
        return np.arange(self._next - n, self._next, dtype=np.int32)


def run(tokens: Sequence[int] = (12_000, 128_000), page_size: int = 16, repeats: int = 25, seed: int = 0) -> Iterator[dict[str, Any]]:
    """For each prompt size: match_us, pages_us, insert_us, chunked_us, growing_us. Medians over `repeats` different prompts.

    insert_us: lock and extend of a cold prompt, all in one, in a pool that is full: before each, not timed, as many pages
    are evicted as it takes. chunked_us: the same in chunks of 8,192 tokens by one handle. growing_us: an insert before the
    pool is full; every byte of it then comes from the operating system for the first time, and that is most of the cost.
    match_us: lock of an equal prompt in an array of its own, for the first time, capped as an admission caps it (at least
    one token is left to compute, so the last page is split off). pages_us: reading the pages of the handle after that.
    """
    for size in tokens:
        if size <= page_size:
            raise ValueError(f"tokens must be more than a page of {page_size}, not {size}")
        source = _Source(seed, page_size)
        cache = RadixCache(page_size)
        whole = aligned(size, page_size)
        step = max(aligned(CHUNK, page_size), page_size)
        growing = [_insert(cache, source.prompt(whole), source.pages(whole), whole) for _ in range(repeats)]
        _fill(cache, source, page_size)
        chunked = []
        for _ in range(repeats):
            cache.evict(whole // page_size)
            chunked.append(_insert(cache, source.prompt(whole), source.pages(whole), step))
        inserts, prompts = [], []
        for _ in range(repeats):
            prompts.append(source.prompt(size))
            cache.evict(whole // page_size)
            inserts.append(_insert(cache, prompts[-1][:whole], source.pages(whole), whole))
        matches, reads = zip(*(_match(cache, _frozen(prompt.copy())) for prompt in prompts), strict=True)
        cache.check()
        yield {
            "tokens": size, "page_size": page_size, "match_us": statistics.median(matches), "pages_us": statistics.median(reads),
            "insert_us": statistics.median(inserts), "chunked_us": statistics.median(chunked),
            "growing_us": statistics.median(growing),
        }


def _frozen(tokens: Tokens) -> Tokens:
    tokens.flags.writeable = False
    return tokens


def _fill(cache: RadixCache, source: _Source, page_size: int) -> None:
    system = source.prompt(SHARED)
    for turn in range(OTHERS):
        own = source.prompt(OTHER_TOKENS)
        prompt = np.concatenate((system, own)) if turn % 2 else own
        prompt = prompt[: aligned(len(prompt), page_size)]
        handle = cache.lock("other", prompt)
        cache.extend(handle, prompt[handle.length :], source.pages(len(prompt) - handle.length))
        cache.unlock(handle)


def _insert(cache: RadixCache, prompt: Tokens, pages: Pages, step: int) -> float:
    per_token = len(prompt) // len(pages)
    started = perf_counter_ns()
    handle = cache.lock("measured", prompt)
    for start in range(0, len(prompt), step):
        end = start + step
        cache.extend(handle, prompt[start:end], pages[start // per_token : end // per_token])
    elapsed = perf_counter_ns() - started
    cache.unlock(handle)
    return elapsed / 1000


def _match(cache: RadixCache, prompt: Tokens) -> tuple[float, float]:
    started = perf_counter_ns()
    handle = cache.lock("measured", prompt[: reusable(len(prompt), cache.page_size)])
    locked = perf_counter_ns()
    pages = handle.pages
    read = perf_counter_ns()
    if len(pages) * cache.page_size != reusable(len(prompt), cache.page_size):
        raise RuntimeError("the prompt that is measured is not wholly cached")
    cache.unlock(handle)
    return (locked - started) / 1000, (read - locked) / 1000
