"""The prefix cache: a radix tree over whole pages, one per namespace.

What lives here: the operations of `kvsched.protocols.TreeCache`, soft pins, and the counters. What does not: the nodes
themselves (`node`), who goes first (`eviction`), and every check of counters against the tree (`audit`).

Walking compares a node's tokens with the prompt by memcmp and hashes one page of tokens per node on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import numpy as np

from kvsched.errors import InvalidHandle, InvalidRequest
from kvsched.memory.arguments import configured, count, int32
from kvsched.memory.audit import Books, audit, cached_pages
from kvsched.memory.eviction import EvictionPolicy, VictimQueue, policy_of
from kvsched.memory.node import WIDTH, Node, Pin, RadixHandle, Root, cut
from kvsched.protocols import Handle
from kvsched.units import Pages, Tokens

GONE = bytearray()
"""What an evicted node holds, lest a stale queue entry keeps its arrays alive."""


class RadixCache:
    """Remembers which page holds which page-aligned prefix; see `kvsched.protocols.TreeCache` for the contract.

    page_size: tokens per page. eviction: "lru", "lfu", "slru", "fifo", "priority", or an `EvictionPolicy` of your own.

    Beyond the protocol: `lock` takes the request's `priority`, which the policy of that name reads. `unlock` takes
    `used=False` for a handle that was taken to look and then not used, such as that of a candidate which is not admitted;
    the policies then see nothing of it. `retain` and `unretain` are soft pins; `path` names the nodes of a match.

    Content counts as used when a handle that covers it is given back; before that it cannot be evicted anyway.
    """

    caches = True

    def __init__(self, page_size: int, eviction: str | EvictionPolicy = "lru") -> None:
        self._page_size = configured("page_size", page_size, 1)
        self._page_bytes = self._page_size * WIDTH
        self._score = policy_of(eviction).score
        self._roots: dict[Hashable, Root] = {}
        self._handles: set[RadixHandle] = set()
        self._pins: dict[Hashable, list[Pin]] = {}
        tickets = itertools.count(1)
        self._victims: VictimQueue[Node] = VictimQueue(tickets)
        self._pinned_victims: VictimQueue[Node] = VictimQueue(tickets)
        self._evictable = 0
        self._locked = 0
        self._grown = 0
        self._stamp = 0  # of events that policies order by
        self._number = 0  # of nodes

    def __repr__(self) -> str:
        return f"<RadixCache of pages of {self._page_size} tokens, {self._evictable} evictable, {self._locked} locked>"

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def evictable(self) -> int:
        """Cached pages that no handle protects, the softly pinned ones included."""
        return self._evictable

    @property
    def locked(self) -> int:
        """Cached pages that at least one handle protects."""
        return self._locked

    @property
    def grown(self) -> int:
        """Counts up whenever content is added."""
        return self._grown

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        """Tokens of the longest cached page-aligned prefix. Reads only. O(tokens compared + nodes on the path)."""
        root = self._root(namespace)
        return 0 if root is None else self._walk(root, self._view(tokens))[2] // WIDTH

    def path(self, namespace: Hashable, tokens: Tokens) -> tuple[int, ...]:
        """Numbers of the nodes on the longest match, the namespace's root first; empty for an unknown namespace. Reads only.

        Two prompts share cached content as far as their paths agree. A number is never used again; a node that is split
        keeps its number for its lower part, so numbers compare only while the tree stands still.
        """
        root = self._root(namespace)
        if root is None:
            return ()
        climb: Node | None = self._walk(root, self._view(tokens))[0]
        numbers: list[int] = []
        while climb is not None:
            numbers.append(climb.id)
            climb = climb.parent
        return tuple(reversed(numbers))

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> RadixHandle:
        """Match and lock in one operation; what is locked may have length 0. O(tokens compared + nodes on the path)."""
        view = self._view(tokens)
        root = self._root(namespace)
        if root is None:
            self._number += 1
            root = self._roots[namespace] = Root(self._number, namespace)
        node, inside, matched = self._walk(root, view)
        if inside < len(node.tokens):
            node = self._split(node, inside)
        self._acquire(node)
        self._stamp += 1
        handle = RadixHandle(self, node, matched // WIDTH, priority, self._stamp)
        self._handles.add(handle)
        return handle

    def extend(self, handle: Handle, tokens: Tokens, pages: Pages, adopt: bool = True) -> Pages | None:
        """Insert below the handle's end and move the handle there; see `kvsched.protocols.TreeCache.extend`. O(tokens given)."""
        own, node = self._live(handle)
        view = self._view(tokens)
        given = int32(pages, "pages")
        if len(view) != len(given) * self._page_bytes:
            raise InvalidRequest(
                f"tokens must fill the pages: {len(view) // WIDTH} tokens for {len(given)} pages of {self._page_size} tokens"
            )
        if not len(given):
            return given
        known = given
        start = 0
        end = node
        if node.children is not None:
            end, inside, start = self._walk(node, view)
            if start:
                if not adopt:
                    return None
                if inside < len(end.tokens):
                    end = self._split(end, inside)
                known = self._with_cached(end, node, given)
        if start < len(view):
            fresh = given.data.cast("B")[start // self._page_size :]
            if end is own.made and end.locks == 1 and end.children is None and not end.uses and not end.pins:
                # The handle's own leaf, which nobody else has used or holds: it grows.
                end.tokens += view[start:]
                end.pages += fresh
            else:
                end = self._add_leaf(end, bytearray(view[start:]), bytearray(fresh), own.born)
                own.made = end
            self._grown += 1
            if end.locks:
                self._locked += len(fresh) // WIDTH
            else:
                self._evictable += len(fresh) // WIDTH
        if end is not node:
            self._acquire(end)
            self._forsake(node)
        own.node = end
        own.length += len(view) // WIDTH
        return known

    def unlock(self, handle: Handle, used: bool = True) -> None:
        """Give a handle back. Raises `InvalidHandle`, changing nothing, the second time. O(nodes that become unlocked)."""
        own, node = self._live(handle)
        self._handles.remove(own)
        own.node = own.made = None
        if used:
            self._stamp += 1
            node.last = self._stamp
            node.uses += 1
            node.priority = min(node.priority, own.priority)
        self._forsake(node)

    def exclusive(self, handle: Handle) -> int:
        """Pages that only this handle protects. O(nodes that only it protects)."""
        climb: Node | None = self._live(handle)[1]
        size = 0
        while climb is not None and climb.locks == 1:
            size += len(climb.pages)
            climb = climb.parent
        return size // WIDTH

    def evict(self, n: int) -> Pages:
        """Forget exactly min(n, evictable) pages and return them. O(pages forgotten + leaves forgotten x log leaves)."""
        wanted = min(count(n), self._evictable) * WIDTH
        taken = bytearray()
        while len(taken) < wanted:
            victims = self._victims if len(self._victims) else self._pinned_victims
            node = victims.first()
            assert node is not None  # every unlocked page hangs below unlocked pages only, down to an unlocked leaf
            excess = len(taken) + len(node.pages) - wanted
            if excess > 0:
                taken += node.pages[excess:]
                del node.pages[excess:]
                del node.tokens[excess * self._page_size :]
            else:
                taken += node.pages
                victims.withdraw(node)
                self._detach(node)
        self._evictable -= wanted // WIDTH
        return np.frombuffer(taken, dtype=np.int32)

    def clear(self) -> Pages:
        """Forget everything that is evictable, soft pins included, and return its pages."""
        return self.evict(self._evictable)

    def retain(self, namespace: Hashable, tokens: Tokens, owner: Hashable) -> int:
        """Pin the longest cached prefix of `tokens` softly, and return how many tokens that is.

        Pinned pages stay evictable, so no promise of capacity changes; they are evicted last, the oldest pin first. A page
        that several owners pin counts as pinned until each has let go, and is as old as its newest pin.
        """
        view = self._view(tokens)
        root = self._root(namespace)
        node, inside, matched = (None, 0, 0) if root is None else self._walk(root, view)
        held = self._owned(owner)
        if node is None or not matched:
            return 0
        if inside < len(node.tokens):
            node = self._split(node, inside)
        self._stamp += 1
        pin = Pin(owner, self._stamp, node)
        self._repin(node, {**(node.pins or {}), pin: None})
        self._pins[owner] = [*held, pin]
        return matched // WIDTH

    def unretain(self, owner: Hashable) -> None:
        """Drop every soft pin of `owner`; nothing happens where there is none. O(pins of the owner)."""
        held = self._owned(owner)
        self._pins.pop(owner, None)
        for pin in held:
            pins = {other: None for other in pin.node.pins or () if other is not pin}
            self._repin(pin.node, pins or None)

    def cached_pages(self) -> Pages:
        """Every page in the cache, in no particular order. O(cached pages)."""
        return cached_pages(self._roots)

    def check(self) -> None:
        """Raise `AccountingError` unless every invariant holds. O(cached tokens)."""
        audit(Books(
            page_size=self._page_size, roots=self._roots, handles=self._handles, pins=self._pins, victims=self._victims,
            pinned_victims=self._pinned_victims, evictable=self._evictable, locked=self._locked,
        ))

    # Arguments.

    def _view(self, tokens: Tokens) -> memoryview:
        """The whole pages of `tokens` as bytes, without a copy where it is an int32 array already."""
        array = int32(tokens, "tokens")
        return array.data.cast("B") if len(array) else memoryview(b"")

    def _root(self, namespace: Hashable) -> Root | None:
        try:
            return self._roots.get(namespace)
        except TypeError:
            raise InvalidRequest(f"namespace must be hashable, not {namespace!r}") from None

    def _owned(self, owner: Hashable) -> list[Pin]:
        try:
            return self._pins.get(owner, [])
        except TypeError:
            raise InvalidRequest(f"owner must be hashable, not {owner!r}") from None

    def _live(self, handle: Handle) -> tuple[RadixHandle, Node]:
        if not isinstance(handle, RadixHandle) or handle.cache is not self:
            raise InvalidHandle(f"{handle!r} is not a handle of this cache")
        if handle.node is None:
            raise InvalidHandle(f"{handle!r} was given back before")
        return handle, handle.node

    # The tree.

    def _walk(self, node: Node, view: memoryview) -> tuple[Node, int, int]:
        """Follow `view` below the end of `node`. Returns where that ends: node, bytes into it, bytes of `view` matched.

        Bytes into the node are all of it, unless the match ends within. Reads only.
        """
        page = self._page_bytes
        limit = len(view) - len(view) % page
        position = 0
        while position < limit and node.children is not None:
            child = node.children.get(bytes(view[position : position + page]))
            if child is None:
                break
            run = child.tokens
            end = position + len(run)
            if end > limit or not run.startswith(view[position:end]):
                inside = self._common(run, view[position : min(end, limit)])
                return child, inside, position + inside
            position = end
            node = child
        return node, len(node.tokens), position

    def _common(self, run: bytearray, view: memoryview) -> int:
        """Bytes of whole pages that two runs have in common, which is at least one page. O(bytes compared)."""
        if run.startswith(view):
            return len(view)
        page = self._page_bytes
        low, high = 1, len(view) // page  # pages known to be equal; pages known not to be
        while high - low > 1:
            middle = (low + high) // 2
            if run.startswith(view[low * page : middle * page], low * page):
                low = middle
            else:
                high = middle
        return low * page

    def _split(self, node: Node, at: int) -> Node:
        """Give the first `at` bytes of a node's tokens to a new node above it, and return that. O(shorter part)."""
        page = self._page_bytes
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        front, node.tokens = cut(node.tokens, at)
        front_pages, node.pages = cut(node.pages, at // self._page_size)
        self._number += 1
        upper = Node(self._number, parent, front, front_pages, node.born)
        upper.locks = 1 if node.locks else 0
        upper.children = {bytes(node.tokens[:page]): node}
        parent.children[bytes(front[:page])] = upper
        node.parent = upper
        return upper

    def _add_leaf(self, parent: Node, tokens: bytearray, pages: bytearray, born: int) -> Node:
        self._number += 1
        leaf = Node(self._number, parent, tokens, pages, born)
        if parent.children is None:
            parent.children = {}
        parent.children[bytes(tokens[: self._page_bytes])] = leaf
        return leaf

    def _with_cached(self, end: Node, start: Node, given: Pages) -> Pages:
        """`given`, with the pages of the path below `start` down to `end` in place of its first ones."""
        runs = []
        while end is not start:
            runs.append(end.pages)
            assert end.parent is not None
            end = end.parent
        runs.reverse()
        cached = np.frombuffer(b"".join(runs), dtype=np.int32)
        return np.concatenate((cached, given[len(cached) :]))

    def _acquire(self, node: Node) -> None:
        """Lock the path from the root to the end of `node` once more."""
        climb: Node | None = node
        while climb is not None:
            climb.locks += 1
            if climb.locks > 1:
                return
            size = len(climb.pages) // WIDTH
            self._locked += size
            self._evictable -= size
            if climb.ticket:
                (self._pinned_victims if climb.pins else self._victims).withdraw(climb)
            climb = climb.parent

    def _forsake(self, node: Node) -> None:
        """Undo one `_acquire` of the same node."""
        climb: Node | None = node
        while climb is not None:
            climb.locks -= 1
            if climb.locks:
                return
            size = len(climb.pages) // WIDTH
            self._locked -= size
            self._evictable += size
            if climb.children is None:
                self._offer(climb)
            climb = climb.parent

    def _offer(self, node: Node) -> None:
        """Take note that a node has become an unlocked leaf: evictable, or a root that nobody needs."""
        if isinstance(node, Root):
            del self._roots[node.namespace]
        elif node.pins:
            self._pinned_victims.add(node, max(pin.stamp for pin in node.pins))
        else:
            self._victims.add(node, self._score(node))

    def _repin(self, node: Node, pins: dict[Pin, None] | None) -> None:
        """Give a node other pins, which moves it between the queues when it is in one."""
        queued = node.ticket != 0
        if queued:
            (self._pinned_victims if node.pins else self._victims).withdraw(node)
        node.pins = pins
        if queued:
            self._offer(node)

    def _detach(self, node: Node) -> None:
        """Cut an unlocked leaf off; its parent inherits its usage and its pins, and may become a leaf."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[bytes(node.tokens[: self._page_bytes])]
        parent.last = max(parent.last, node.last)
        parent.uses += node.uses
        parent.priority = min(parent.priority, node.priority)
        if node.pins:
            self._bequeath(node.pins, parent)
        node.tokens = node.pages = GONE
        if not parent.children:
            parent.children = None
            if not parent.locks:
                self._offer(parent)

    def _bequeath(self, pins: dict[Pin, None], parent: Node) -> None:
        """Move pins up to what is left of the pinned prefix; at a root nothing is left."""
        if isinstance(parent, Root):
            for pin in pins:
                rest = [other for other in self._pins[pin.owner] if other is not pin]
                if rest:
                    self._pins[pin.owner] = rest
                else:
                    del self._pins[pin.owner]
            return
        for pin in pins:
            pin.node = parent
        parent.pins = {**(parent.pins or {}), **pins}
