"""Whom an eviction takes: each policy, soft pins, handles that were not used, and the queue."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from trees import LONG, SHORT, fingerprint

from kvsched.errors import ConfigError
from kvsched.memory import POLICIES, NullCache, RadixCache, Usage
from kvsched.memory.eviction import SLACK, Slru, VictimQueue, WorstPriority, policy_of
from kvsched.testing.cache_machine import NAMESPACES, CacheMachine, Shape, cache_machine, shapes, tokens_of
from kvsched.testing.cache_model import ORDERS, Cell


def use(cache: RadixCache, tokens: list[int], priority: int = 0) -> None:
    """One request: its content is cached on pages named like its tokens, and it is given back."""
    handle = cache.lock((), tokens_of(tokens), priority=priority)
    cache.extend(handle, tokens_of(tokens[handle.length :]), np.array(tokens[handle.length :], dtype=np.int32))
    cache.unlock(handle)


def drained(cache: RadixCache) -> list[int]:
    """The order in which everything is forgotten, page by page."""
    return [page for _ in range(cache.evictable) for page in cache.evict(1).tolist()]


# Policies.


def test_lru_forgets_what_was_given_back_longest_ago() -> None:
    cache = RadixCache(1, "lru")
    for page in (1, 2, 3, 4):
        use(cache, [page])
    use(cache, [2])
    held = cache.lock((), tokens_of([1]))
    use(cache, [3])
    cache.unlock(held)
    assert drained(cache) == [4, 2, 3, 1]


def test_a_use_is_a_use_of_everything_before_it() -> None:
    cache = RadixCache(1, "lru")
    use(cache, [1, 2, 3])
    use(cache, [1, 7])
    use(cache, [8])
    use(cache, [1, 2, 3])
    assert drained(cache) == [7, 8, 3, 2, 1]


def test_a_parent_goes_when_it_was_last_used_not_when_its_child_went() -> None:
    cache = RadixCache(1, "lru")
    use(cache, [1, 2])
    use(cache, [1])  # the parent alone is used later than its child
    use(cache, [5])
    use(cache, [1, 3])
    use(cache, [6])
    assert drained(cache) == [2, 5, 3, 1, 6]


def test_lfu_forgets_what_was_used_least() -> None:
    cache = RadixCache(1, "lfu")
    for page in (1, 2, 3, 1, 1, 2):
        use(cache, [page])
    use(cache, [4])
    assert drained(cache) == [3, 4, 2, 1]


def test_lfu_counts_the_uses_of_children_that_are_gone() -> None:
    cache = RadixCache(1, "lfu")
    for leaf in (2, 3, 4):
        use(cache, [1, leaf])
    use(cache, [9])
    use(cache, [9])
    assert drained(cache) == [2, 3, 4, 9, 1]


@pytest.mark.parametrize(("policy", "expected"), [
    ("lfu", [2, 3, 8, 1, 9]),  # 1 was used twice as 8 and 9 were, and last between them
    ("slru", [2, 3, 8, 1, 9]),
    ("priority", [2, 8, 3, 1, 9]),
])
def test_a_parent_inherits_when_its_children_were_used(policy: str, expected: list[int]) -> None:
    cache = RadixCache(1, policy)
    use(cache, [8], 4)
    use(cache, [8], 4)
    use(cache, [1, 2], 5)
    use(cache, [1, 3], 4)
    use(cache, [9], 4)
    use(cache, [9], 4)
    cache.check()
    assert drained(cache) == expected


def test_priority_of_a_parent_is_the_best_of_its_children() -> None:
    cache = RadixCache(1, "priority")
    use(cache, [1, 2], 2)
    use(cache, [5], 2)
    use(cache, [1, 3], 4)
    assert drained(cache) == [3, 2, 5, 1], "1 is as good as 2 was, and was used last with 3"


def test_content_is_born_when_the_request_that_brought_it_locked() -> None:
    """However late it inserts, in however many chunks, and wherever it is split."""
    cache = RadixCache(1, "fifo")
    slow = cache.lock((), tokens_of([1, 2, 3]))
    use(cache, [7])
    for token in (1, 2, 3):
        cache.extend(slow, tokens_of([token]), np.array([token], dtype=np.int32))
        cache.unlock(cache.lock((), tokens_of([1])))  # so that each chunk becomes a node
        use(cache, [token + 10])
    cache.unlock(slow)
    cache.unlock(cache.lock((), tokens_of([1, 2])))
    assert drained(cache) == [3, 2, 1, 7, 11, 12, 13]


def test_slru_keeps_what_was_used_again() -> None:
    cache = RadixCache(1, "slru")
    for page in (1, 2, 1, 3, 4, 3, 3):
        use(cache, [page])
    assert drained(cache) == [2, 4, 1, 3]


def test_fifo_does_not_care_about_use() -> None:
    cache = RadixCache(1, "fifo")
    for page in (1, 2, 3, 1, 1, 2):
        use(cache, [page])
    assert drained(cache) == [1, 2, 3]


def test_priority_forgets_the_worst_first_then_the_oldest() -> None:
    cache = RadixCache(1, "priority")
    for page, priority in ((1, 0), (2, 5), (3, 5), (4, -1), (5, 9)):
        use(cache, [page], priority)
    use(cache, [5], 0)  # the best that used it counts
    use(cache, [2], 7)
    assert drained(cache) == [3, 2, 1, 5, 4]


def test_a_policy_of_ones_own() -> None:
    class Newest:
        def score(self, usage: Usage) -> int:
            return -usage.last

    cache = RadixCache(1, Newest())
    for page in (1, 2, 3):
        use(cache, [page])
    assert drained(cache) == [3, 2, 1]


@pytest.mark.parametrize("eviction", ["LRU", "", "random", None, 3, Slru])
def test_an_unknown_policy_is_refused_with_those_there_are(eviction: Any) -> None:
    with pytest.raises(ConfigError, match="eviction must be one of lru, lfu, slru, fifo, priority"):
        RadixCache(1, eviction)
    assert isinstance(policy_of("priority"), WorstPriority)


def test_the_names_are_those_of_the_scenario_files() -> None:
    assert tuple(POLICIES) == ("lru", "lfu", "slru", "fifo", "priority") == tuple(ORDERS)


# Handles that were not used.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handle_given_back_unused_leaves_no_trace(policy: str) -> None:
    """A candidate that is tried in every pass and not admitted must not make its prefix look popular."""
    gone = []
    for tries in (0, 50):
        cache = RadixCache(1, policy)
        for page in (1, 2, 3, 2):
            use(cache, [page, page + 10])
        for _ in range(tries):
            cache.unlock(cache.lock((), tokens_of([1, 11]), priority=-5), used=False)
        gone.append(drained(cache))
    assert gone[0] == gone[1]


# Soft pins.


def test_pinned_content_goes_last_and_the_oldest_pin_first() -> None:
    cache = RadixCache(1)
    for page in (1, 2, 3, 4):
        use(cache, [page])
    assert cache.retain((), tokens_of([2]), "x") == 1
    assert cache.retain((), tokens_of([1]), "y") == 1
    assert cache.evictable == 4, "a soft pin is no lock: capacity promises stand"
    assert drained(cache) == [3, 4, 2, 1]
    cache.check()


def test_c84_two_owners_pin_the_same_content() -> None:
    cache = RadixCache(1)
    for page in (1, 2):
        use(cache, [page])
    for gone, stays in (("x", "y"), ("y", "x")):
        cache.retain((), tokens_of([1]), "x")
        cache.retain((), tokens_of([1]), "y")
        cache.check()
        cache.unretain(gone)
        cache.check()
        assert cache.evict(1).tolist() == [2], f"still pinned by {stays}"
        use(cache, [2])
        cache.unretain(stays)
    assert drained(cache) == [1, 2]


def test_content_that_two_owners_pinned_is_as_old_as_its_newest_pin() -> None:
    cache = RadixCache(1)
    for page in (1, 2):
        use(cache, [page])
    cache.retain((), tokens_of([1]), "x")
    cache.retain((), tokens_of([2]), "y")
    cache.retain((), tokens_of([1]), "z")
    assert drained(cache) == [2, 1]


def test_a_pin_covers_its_prefix_to_the_page_and_moves_up_as_the_tail_goes() -> None:
    cache = RadixCache(2)
    handle = cache.lock((), tokens_of(range(12)))
    cache.extend(handle, tokens_of(range(12)), np.arange(6, dtype=np.int32))
    cache.unlock(handle)
    handle = cache.lock((), tokens_of([70, 71]))
    cache.extend(handle, tokens_of([70, 71]), np.array([70], dtype=np.int32))
    cache.unlock(handle)
    assert cache.retain((), tokens_of([*range(7), 99]), "x") == 6
    assert drained(cache) == [5, 4, 3, 70, 2, 1, 0]
    assert not cache._pins, "the pin is gone with the last of its content"
    cache.unretain("x")
    cache.check()


def test_a_pin_on_what_is_not_cached_is_no_pin() -> None:
    cache = RadixCache(1)
    use(cache, [1])
    before = fingerprint(cache)
    assert cache.retain((), tokens_of([2, 3]), "x") == 0
    assert cache.retain("other", tokens_of([1]), "x") == 0
    assert cache.retain((), tokens_of([]), "x") == 0
    cache.unretain("nobody")
    assert fingerprint(cache) == before


def test_a_pinned_leaf_does_not_grow_its_pin() -> None:
    cache = RadixCache(1)
    handle = cache.lock((), tokens_of([1]))
    cache.extend(handle, tokens_of([1]), np.array([1], dtype=np.int32))
    cache.retain((), tokens_of([1]), "x")
    cache.extend(handle, tokens_of([2]), np.array([2], dtype=np.int32))
    cache.unlock(handle)
    use(cache, [5])
    assert drained(cache) == [2, 5, 1]


def test_the_null_cache_pins_nothing() -> None:
    cache = NullCache(1)
    assert cache.retain((), tokens_of([1]), "x") == 0
    cache.unretain("x")
    assert cache.path((), tokens_of([1])) == ()


class WithPins(CacheMachine):
    """Random calls with soft pins too, held against the model page by page."""

    @rule(namespace=st.sampled_from(NAMESPACES), shape=shapes, owner=st.sampled_from("xyz"))
    def retain(self, namespace: Hashable, shape: Shape, owner: str) -> None:
        tokens = self.prompt(shape)
        assert isinstance(self.cache, RadixCache)
        self.model.time += 1
        for cell in self.model.path(namespace, tokens):
            cell.pins[self.model.time] = owner
        assert self.cache.retain(namespace, tokens_of(tokens), owner) == self.model.match(namespace, tokens)

    @rule(owner=st.sampled_from("xyz"))
    def unretain(self, owner: str) -> None:
        assert isinstance(self.cache, RadixCache)
        self.cache.unretain(owner)
        for cell in self.model.cells.values():
            cell.pins = {stamp: other for stamp, other in cell.pins.items() if other != owner}


def with_pins(policy: str) -> type[CacheMachine]:
    order = ORDERS[policy]

    def pins_last(cell: Cell) -> Any:
        return (1, max(cell.pins)) if cell.pins else (0, order(cell))

    return cache_machine(lambda size: RadixCache(size, policy), pins_last, WithPins)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_calls_with_pins_against_the_model(policy: str) -> None:
    run_state_machine_as_test(with_pins(policy), settings=SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_random_calls_with_pins_against_the_model_for_long(policy: str) -> None:
    run_state_machine_as_test(with_pins(policy), settings=LONG)


# The queue.


@attrs.define(eq=False)
class Thing:
    ticket: int = 0


def test_a_queue_yields_by_score_then_by_arrival() -> None:
    queue: VictimQueue[Thing] = VictimQueue(itertools.count(1))
    things = [Thing() for _ in range(5)]
    for thing, score in zip(things, (3, 1, 2, 1, 0), strict=True):
        queue.add(thing, score)
    order = []
    while (first := queue.first()) is not None:
        order.append(things.index(first))
        queue.withdraw(first)
    assert order == [4, 1, 3, 2, 0]
    assert len(queue) == 0


def test_entries_of_withdrawn_items_are_cleared_away() -> None:
    queue: VictimQueue[Thing] = VictimQueue(itertools.count(1))
    stays, moves = Thing(), Thing()
    queue.add(stays, 0)
    for score in range(1000):
        queue.add(moves, score)
        queue.withdraw(moves)
    assert len(queue._heap) <= 2 * 2 + SLACK + 1
    assert queue.items() == [stays]
    assert queue.first() is stays


def test_an_item_moves_between_queues_that_share_tickets() -> None:
    tickets = itertools.count(1)
    one: VictimQueue[Thing] = VictimQueue(tickets)
    other: VictimQueue[Thing] = VictimQueue(tickets)
    thing = Thing()
    one.add(thing, 0)
    one.withdraw(thing)
    other.add(thing, 0)
    assert one.first() is None
    assert other.first() is thing
    assert (len(one), len(other)) == (0, 1)
