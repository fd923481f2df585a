"""Helpers of the tests of this folder: a deep look into a radix cache, and short hypothesis profiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from kvsched.memory import RadixCache
from kvsched.memory.node import Node, Root

SHORT = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None,
                 suppress_health_check=[HealthCheck.too_slow])
LONG = settings(max_examples=400, stateful_step_count=60, deadline=None, database=None, print_blob=True,
                suppress_health_check=[HealthCheck.too_slow])


def fingerprint(cache: RadixCache) -> Any:
    """Every node with everything it knows, every queue entry, every counter, every handle and pin, as one value."""

    def shape(node: Node) -> Any:
        pins = tuple((pin.owner, pin.stamp) for pin in node.pins or ())
        children = tuple((key, shape(child)) for key, child in (node.children or {}).items())
        namespace = node.namespace if isinstance(node, Root) else None
        return (id(node), node.id, id(node.parent), namespace, bytes(node.tokens), bytes(node.pages), node.locks, node.ticket,
                node.last, node.uses, node.priority, node.born, pins, children)

    queues = tuple(tuple((score, ticket, id(node)) for score, ticket, node in queue._heap)
                   for queue in (cache._victims, cache._pinned_victims))
    handles = frozenset((id(h), id(h.node), h.length, h.priority, h.born, id(h.made)) for h in cache._handles)
    return (tuple((space, shape(root)) for space, root in cache._roots.items()), queues, handles, cache.evictable, cache.locked,
            cache.grown, cache._stamp, cache._number, tuple((owner, len(pins)) for owner, pins in cache._pins.items()))


def calls_made(function: Callable[[], object]) -> int:
    """How many function calls, Python's and C's, a function makes: a cost that no machine changes."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return made
