"""vLLM's KV-cache events: which blocks the prefix cache holds, told to whoever routes requests by it.

What lives here: `TellingCache`, a tree cache that passes every call on and notes what was added and forgotten. What does not:
the cache itself, and how events are published. Hashes are vLLM's own, so that a consumer sees the names it knows; they are
computed for the pages that are added, and only when events are on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash, to_event_extra_keys

from kvsched.hosts.vllm.requests import namespace
from kvsched.protocols import Handle, TreeCache
from kvsched.request import Namespace
from kvsched.units import Pages, Tokens

GROUP = 0
"""The one KV-cache group there is."""


class TellingCache:
    """A `TreeCache` that remembers vLLM's hash of each cached page, and what changed since `take` was last called."""

    caches = True

    def __init__(self, cache: TreeCache, hash_name: str) -> None:
        self.cache = cache
        self._hash = get_hash_fn_by_name(hash_name)
        self._events: list[Any] = []
        self._hashes: dict[int, Any] = {}  # by page
        self._handles: dict[Handle, tuple[Hashable, Any]] = {}  # namespace, and hash of the last page under it
        self._loras: dict[Hashable, Any] = {}  # by namespace

    def introduce(self, request: Any) -> None:
        """Learn what the namespace of a request stands for."""
        if request.lora_request is not None:
            self._loras[namespace(request)] = request.lora_request

    def take(self) -> list[Any]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cleared(self) -> None:
        """The whole cache was emptied on purpose: one word for all."""
        self._events = [event for event in self._events if not isinstance(event, BlockRemoved)]
        self._events.append(AllBlocksCleared())

    # -- TreeCache ------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cache.page_size

    @property
    def evictable(self) -> int:
        """Cached pages that no handle protects."""
        return self.cache.evictable

    @property
    def locked(self) -> int:
        """Cached pages that at least one handle protects."""
        return self.cache.locked

    @property
    def grown(self) -> int:
        """Counts up whenever content is added."""
        return self.cache.grown

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        return self.cache.match(namespace, tokens)

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> Handle:
        handle = self.cache.lock(namespace, tokens, priority)
        last = self._hashes[int(handle.pages[-1])] if handle.length else None
        self._handles[handle] = (namespace, last)
        return handle

    def extend(self, handle: Handle, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        start = handle.length
        kept = self.cache.extend(handle, tokens, pages, adopt)
        if kept is None or not len(kept):
            return kept
        space, last = self._handles[handle]
        known = int((kept != pages).sum())  # what the cache had comes first
        if known:
            last = self._hashes[int(kept[known - 1])]
        if known < len(kept):
            last = self._stored(space, start, tokens, kept, known, last)
        self._handles[handle] = (space, last)
        return kept

    def unlock(self, handle: Handle, used: bool = True) -> None:
        self.cache.unlock(handle, used)
        del self._handles[handle]

    def exclusive(self, handle: Handle) -> int:
        return self.cache.exclusive(handle)

    def evict(self, n: int) -> Pages:
        return self._forgotten(self.cache.evict(n))

    def clear(self) -> Pages:
        return self._forgotten(self.cache.clear())

    def check(self) -> None:
        self.cache.check()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _stored(self, space: Hashable, start: int, tokens: Tokens, kept: Pages, known: int, parent: Any) -> Any:
        """Note that the pages from `known` on were added. Returns the hash of the last one."""
        size = self.page_size
        first = known * size
        lora = self._loras.get(space)
        last, hashes, extras = parent, [], []
        for at, page in enumerate(kept[known:].tolist(), known):
            extra = _extra_keys(space, lora, first=start + at * size == 0)
            last = hash_block_tokens(self._hash, last, tokens[at * size : (at + 1) * size].tolist(), extra)
            self._hashes[page] = last
            hashes.append(maybe_convert_block_hash(last))
            extras.append(extra)
        self._events.append(BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=tokens[first:].tolist(),
            block_size=size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM_GPU,
            lora_name=None if lora is None else lora.name,
            extra_keys=to_event_extra_keys(extras),
            group_idx=GROUP,
        ))
        return last

    def _forgotten(self, pages: Pages) -> Pages:
        self._events += [
            BlockRemoved(block_hashes=[maybe_convert_block_hash(self._hashes.pop(page))], medium=MEDIUM_GPU, group_idx=GROUP)
            for page in pages.tolist()
        ]
        return pages


def _extra_keys(space: Hashable, lora: Any, *, first: bool) -> tuple[Any, ...] | None:
    """What vLLM hashes beside the tokens of a block: the adapter, and on the first block the salt."""
    keys: list[tuple[str, ...]] = [] if lora is None else [("lora", lora.lora_name, lora.lora_path)]
    if first and isinstance(space, Namespace) and space.salt is not None:
        keys.append(("cache_salt", space.salt))
    return tuple(keys) or None
