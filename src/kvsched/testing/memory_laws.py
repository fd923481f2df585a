"""What the pages must hold (laws A1, A3, D1, D2, C23): the executor's memory beside the books, the block table and the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsched.plan import Plan
from kvsched.protocols import TreeCache
from kvsched.request import Namespace
from kvsched.testing.account import Books, law
from kvsched.testing.executor import SimulatedExecutor
from kvsched.units import aligned, pages_for, reusable


def check_owners(books: Books, executor: SimulatedExecutor, table: npt.NDArray[np.int32], state: Mapping[str, Any], *, exact: bool) -> None:
    """A3: what each resident computed is in its pages; a page of two residents is a whole page of one shared prefix.

    exact: no page is held or pinned, so private and locked pages are just those of residents.
    """
    size = books.config.page_size
    seen: dict[int, tuple[str, int, tuple[Namespace, tuple[int, ...] | None]]] = {}
    union: set[int] = set()
    for account in books.order:
        if account.row < 0 or account.next == 0:  # it has got nothing yet
            continue
        space, text = account.request.space, account.text[: account.done]
        pages = table[account.row, : state["requests"][account.id]["pages"]].tolist()
        union.update(pages)
        good = executor.holds(space, text, pages[: pages_for(len(text), size)])
        law("A3 a resident's pages hold what it computed", good, account.id, pages, len(text))
        for column, page in enumerate(pages):
            end = (column + 1) * size
            key = (space, tuple(text[:end]) if end <= len(text) else None)
            other = seen.setdefault(page, (account.id, column, key))
            same = other[0] == account.id or (key[1] is not None and other[1:] == (column, key))
            law("A3 a page has one owner or is shared through the tree", same, page, account.id, column, other)
    if exact:
        held = state["private"] + state["locked"]
        most = len(union | executor.pages_in_flight())  # an ended request's pages stay locked while a plan attends to them
        law("A1 private and locked pages are those of residents", len(union) <= held <= most, held, union, most)


def servable(books: Books, cache: TreeCache) -> dict[str, int]:
    """Tokens that the cache could serve to each waiting request now (D1, D2)."""
    found = {}
    for account in books.accounts.values():
        if not account.resident:
            text = np.array(account.text, np.int32)
            most = reusable(len(text), books.config.page_size)
            found[account.id] = min(cache.match(account.request.space, text), most) if account.request.cache_read else 0
    return found


def check_hits(plan: Plan, hits: Mapping[str, int]) -> None:
    """Each admitted request was served the longest hit there was; not judged where the plan changed the cache."""
    if plan.retracted or plan.evicted:
        return
    for chunk in plan.prefill:
        if chunk.id in plan.admitted:
            law("D1 a hit is the longest there is", chunk.start == hits[chunk.id], chunk.id, chunk.start, hits[chunk.id])


def check_kept(cache: TreeCache, space: Namespace, tokens: Sequence[int]) -> None:
    """C23: right after a request ended, the tree holds all of it but the last token, in whole pages. tokens: those computed."""
    have, want = cache.match(space, np.array(tokens, np.int32)), aligned(len(tokens), cache.page_size)
    law("C23 at the end the tree holds all but the last token", have == want, have, want, tokens)


def check_content(cache: TreeCache, executor: SimulatedExecutor, space: Namespace, tokens: Sequence[int]) -> None:
    """The pages that the cache has for a text hold it."""
    handle = cache.lock(space, np.array(tokens, np.int32))
    good = executor.holds(space, tokens[: handle.length], handle.pages)
    cache.unlock(handle)
    law("the tree holds what it says", good, space, tokens, handle.length)
