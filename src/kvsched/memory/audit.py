"""Checks a radix cache's counters and queues against the tree itself, and lists what is in it.

What does not live here: anything that changes a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from kvsched.errors import AccountingError
from kvsched.memory.eviction import VictimQueue
from kvsched.memory.node import WIDTH, Node, Pin, RadixHandle, Root, integers
from kvsched.units import Pages


def nodes(roots: Mapping[Hashable, Root]) -> Iterator[Node]:
    """Every node, roots included, parents before children."""
    stack: list[Node] = list(roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend((node.children or {}).values())


def cached_pages(roots: Mapping[Hashable, Root]) -> Pages:
    """Every page in the trees below `roots`."""
    return integers(bytearray().join(node.pages for node in nodes(roots)))


@attrs.frozen
class Books:
    """Everything a radix cache keeps, for `audit`: the trees, and what is counted or indexed beside them."""

    page_size: int
    roots: Mapping[Hashable, Root]
    handles: Collection[RadixHandle]
    pins: Mapping[Hashable, Sequence[Pin]]
    victims: VictimQueue[Node]
    pinned_victims: VictimQueue[Node]
    evictable: int
    locked: int


def audit(books: Books) -> None:
    """Raise `AccountingError`, with the whole state in the message, unless every invariant holds. O(cached tokens)."""
    broken: list[str] = []
    ends = Counter(handle.node for handle in books.handles)
    pinned: Counter[Node] = Counter()
    locked = evictable = 0
    victims = {id(node) for node in books.victims.items()}
    pinned_victims = {id(node) for node in books.pinned_victims.items()}
    seen: set[int] = set()
    for node in nodes(books.roots):
        seen.add(id(node))
        broken += [f"{fault}: {node!r}" for fault in _faults(books.page_size, node, ends[node])]
        if node.locks:
            locked += len(node.pages) // WIDTH
        else:
            evictable += len(node.pages) // WIDTH
        # Exactly the unlocked leaves stand in a queue: the pinned ones in theirs, the others in the other.
        leaf = not node.locks and node.children is None and not isinstance(node, Root)
        if (id(node) in victims) != (leaf and not node.pins) or (id(node) in pinned_victims) != (leaf and bool(node.pins)):
            broken.append(f"wrong queue: {node!r}")
        pinned.update({node: len(node.pins or ())})
    # The counters are what a walk over the tree counts.
    if (locked, evictable) != (books.locked, books.evictable):
        broken.append(f"counters say locked={books.locked} evictable={books.evictable}, the tree {locked} and {evictable}")
    # Queues hold nothing that is gone, and know how much they hold.
    if not (victims | pinned_victims) <= seen or (len(victims), len(pinned_victims)) != (len(books.victims), len(books.pinned_victims)):
        broken.append("a queue holds a node that is gone, or miscounts")
    # Handles and pins end at nodes of the tree.
    if any(id(node) not in seen for node in ends):
        broken.append("a handle ends at a node that is gone")
    owned = Counter(pin.node for pins in books.pins.values() for pin in pins)
    if +owned != +pinned or not all(books.pins.values()):
        broken.append("pins by owner and pins by node differ")
    # A page stands in the tree once.
    pages = cached_pages(books.roots)
    if len(np.unique(pages)) != len(pages):
        broken.append("a page stands in the tree twice")
    if broken:
        held = [(handle, handle.node) for handle in books.handles]
        state = "\n".join(repr(node) for node in nodes(books.roots))
        raise AccountingError(
            f"radix cache: {'; '.join(broken)}\nlocked={books.locked} evictable={books.evictable} handles={held}\n{state}"
        )


def _faults(page_size: int, node: Node, ends: int) -> Iterator[str]:
    """What is wrong with one node, apart from sums over the tree. `ends`: handles that end at it."""
    page = page_size * WIDTH
    children = node.children or {}
    # Tokens fill the pages; only a root has none.
    if len(node.tokens) != len(node.pages) * page_size or len(node.tokens) % page or isinstance(node, Root) == bool(node.pages):
        yield "tokens do not fill the pages"
    # A child hangs under its own first page of tokens, and knows its parent.
    if any(key != bytes(child.tokens[:page]) or child.parent is not node for key, child in children.items()):
        yield "a child hangs wrongly"
    # No empty table of children is kept, and no root that nobody needs.
    if (node.children is not None and not children) or (isinstance(node, Root) and not children and not node.locks):
        yield "something empty was kept"
    # Locks are handles that end here + children with locks.
    if node.locks != ends + sum(1 for child in children.values() if child.locks):
        yield f"locks are not {ends} handles + locked children"
