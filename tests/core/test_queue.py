"""The waiting queue: its counts, and who is tried before whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvsched import Request
from kvsched.live import Live
from kvsched.queue import WaitingQueue


def live(arrival: int, priority: int = 0, *, prompt: int = 3, ready: bool = True) -> Live:
    return Live(f"R{arrival}", Request(f"R{arrival}", range(prompt), 5, priority=priority, ready=ready), 5, arrival, 1, None)


def arrivals(queue: WaitingQueue, order: str = "fcfs") -> list[int]:
    def arrange(waiting: Iterable[Live]) -> Iterable[Live]:
        return sorted(waiting, key=lambda one: -one.arrival) if order == "latest" else waiting

    return [one.arrival for one in queue.candidates(arrange)]


def test_counts_go_with_who_never_started() -> None:
    queue = WaitingQueue()
    one, two, three = live(1, prompt=10), live(2, prompt=20, ready=False), live(3, 5)
    for each in (one, two):
        queue.add(each)
    queue.add_resuming(three)
    assert (len(queue), queue.tokens, queue.unready, queue.best_priority()) == (3, 30, 1, 0)
    assert [each.arrival for each in queue] == [3, 1, 2]
    queue.made_ready(two)
    assert (two.ready, queue.unready) == (True, 0)
    queue.remove(one)
    assert (len(queue), queue.tokens, queue.best_priority()) == (2, 20, 0)
    queue.remove(two)
    assert (len(queue), queue.tokens, queue.best_priority()) == (1, 0, 5)
    queue.remove(three)
    assert (len(queue), queue.best_priority()) == (0, None)


def test_every_change_is_a_new_version() -> None:
    queue, seen = WaitingQueue(), list[int]()
    one, two = live(1, ready=False), live(2)
    changes: list[Callable[[], None]] = [
        lambda: queue.add(one), lambda: queue.made_ready(one), lambda: queue.remove(one), lambda: queue.add_resuming(two), lambda: queue.remove(two),
    ]
    for change in changes:
        change()
        seen.append(queue.version)
    assert seen == sorted(set(seen))


def test_who_comes_back_after_a_rollback_stands_where_it_stood() -> None:
    queue = WaitingQueue()
    first, second, third = live(1), live(2), live(3)
    for each in (first, second, third):
        queue.add(each)
    queue.remove(first)
    queue.remove(second)
    queue.add(second)
    queue.add(first)
    assert arrivals(queue) == [1, 2, 3]


def test_resuming_go_before_the_same_and_worse_priority_only() -> None:
    queue = WaitingQueue()
    for arrival, priority in ((1, 2), (2, 0), (3, 1), (4, 2)):
        queue.add(live(arrival, priority))
    queue.add_resuming(live(6, 1))
    queue.add_resuming(live(5, 2))
    assert arrivals(queue) == [2, 6, 3, 5, 1, 4]
    assert arrivals(queue, "latest") == [2, 6, 3, 5, 4, 1]


@given(fresh=st.lists(st.integers(0, 3), max_size=6), resuming=st.lists(st.integers(0, 3), max_size=4), latest=st.booleans())
def test_candidates_against_the_rule(fresh: list[int], resuming: list[int], latest: bool) -> None:
    """Nobody that never started stands before a resuming one of the same or better priority, and else the order is kept."""
    queue = WaitingQueue()
    for index, priority in enumerate(fresh):
        queue.add(live(index + 1, priority))
    for index, priority in enumerate(resuming):
        queue.add_resuming(live(100 - index, priority))
    found = list(queue.candidates(lambda waiting: sorted(waiting, key=lambda one: -one.arrival) if latest else waiting))
    assert {one.arrival for one in found} == {one.arrival for one in queue}
    assert len(found) == len(queue)
    back = [(one.priority, one.arrival) for one in found if one.arrival > 50]
    assert back == sorted(back)
    for at, one in enumerate(found):
        for later in found[at + 1 :]:
            if one.arrival <= 50 < later.arrival:
                assert one.priority < later.priority
    for priority in range(4):
        same = [one.arrival for one in found if one.arrival <= 50 and one.priority == priority]
        assert same == sorted(same, reverse=latest)
