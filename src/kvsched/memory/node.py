"""The pieces a radix tree is made of: nodes, pins and handles, and the cutting of a node's arrays.

What does not live here: the operations on a tree, and its counters (see `radix`).

Who owns what. A node owns a run of whole pages: `tokens` and `pages` are bytearrays of little 32-bit integers, because a
bytearray compares with a prompt by memcmp without a copy, grows by amortised doubling, and loses its tail or its head in
O(what is cut). A handle points at the node whose end is the handle's end. When a node is split, the object keeps its end and
a new node takes its front, so every handle stays right without being told.
"""

from __future__ import annotations

import numpy as np

from kvsched.errors import InvalidHandle
from kvsched.memory.eviction import UNUSED_PRIORITY
from kvsched.units import Pages

WIDTH = 4
"""Bytes of a token id or a page id."""


class Node:
    """A run of pages below `parent`. Its usage counts the handles given back that ended here or in a child that is gone.

    locks: handles that end here + children with locks. So a page is locked exactly when its node's locks are above 0, and
        locking a path whose lower part is locked already costs O(1).
    ticket: number of the node's entry in an eviction queue, 0 when it is in none.
    last, uses, priority: usage, of this node alone; a child that is evicted bequeaths its own to its parent.
    born: number of the handle that brought the content.
    """

    __slots__ = ("born", "children", "id", "last", "locks", "pages", "parent", "pins", "priority", "ticket", "tokens", "uses")

    def __init__(self, number: int, parent: Node | None, tokens: bytearray, pages: bytearray, born: int) -> None:
        self.id = number
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] | None = None
        self.locks = 0
        self.ticket = 0
        self.last = 0
        self.uses = 0
        self.priority = UNUSED_PRIORITY
        self.born = born
        self.pins: dict[Pin, None] | None = None

    def __repr__(self) -> str:
        return (
            f"<node {self.id} below {self.parent.id if self.parent else None}: {len(self.pages) // WIDTH} pages "
            f"{integers(self.pages).tolist()} locks={self.locks} ticket={self.ticket} last={self.last} uses={self.uses} "
            f"priority={self.priority} born={self.born} pins={[(pin.owner, pin.stamp) for pin in self.pins or ()]}>"
        )


class Root(Node):
    """The start of a namespace. It has no pages, and lives as long as it has children or locks."""

    __slots__ = ("namespace",)

    def __init__(self, number: int, namespace: object) -> None:
        super().__init__(number, None, bytearray(), bytearray(), 0)
        self.namespace = namespace


class Pin:
    """One retained prefix of one owner; it ends where `node` ends."""

    __slots__ = ("node", "owner", "stamp")

    def __init__(self, owner: object, stamp: int, node: Node) -> None:
        self.owner = owner
        self.stamp = stamp
        self.node = node


class RadixHandle:
    """A locked path of a `RadixCache`; see `kvsched.protocols.Handle`. Only the cache changes it.

    cache: the cache it belongs to. length: tokens the handle protects. made: the node whose content this handle brought, if it still ends there.
    """

    __slots__ = ("born", "cache", "length", "made", "node", "priority")

    def __init__(self, cache: object, node: Node, length: int, priority: int, born: int) -> None:
        self.cache = cache
        self.node: Node | None = node
        self.length = length
        self.priority = priority
        self.born = born
        self.made: Node | None = None

    def __repr__(self) -> str:
        return f"<RadixHandle over {self.length} tokens{'' if self.node else ', given back'}>"

    @property
    def pages(self) -> Pages:
        """The pages from the root to the handle's end, read-only. O(pages + nodes on the path)."""
        node = self.node
        if node is None:
            raise InvalidHandle("this handle was given back; its pages may belong to others by now")
        runs = []
        while node is not None:
            runs.append(node.pages)
            node = node.parent
        runs.reverse()
        return np.frombuffer(b"".join(runs), dtype=np.int32)


def integers(run: bytearray) -> Pages:
    """A copy of a run of 32-bit integers as an array."""
    return np.frombuffer(bytes(run), dtype=np.int32)


def cut(run: bytearray, at: int) -> tuple[bytearray, bytearray]:
    """The run in two parts; the longer one is the same object, so that the cost is O(shorter part)."""
    if 2 * at <= len(run):
        front = run[:at]
        del run[:at]
        return front, run
    back = run[at:]
    del run[at:]
    return run, back
