"""Conformance of a page pool: a suite of tests with names, and a state machine against a plain model.

What lives here: what `kvsched.protocols.Pool` promises and what kvsched relies on. What does not: anything about speed.

Run both on a pool of your own:

    from kvsched.testing.pool_suite import PoolConformance, pool_machine

    class TestMyPool(PoolConformance):
        def make(self, usable, page_size):
            return MyPool(usable, page_size)

    TestMyPoolMachine = pool_machine(MyPool).TestCase
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsched.errors import DoubleFree, HostError, PoolExhausted
from kvsched.protocols import Pool
from kvsched.units import Pages

PoolFactory = Callable[[int, int], Pool]
"""Makes a pool of so many usable pages, of so many tokens each."""


def refused(error: type[Exception], call: Callable[[], Any]) -> None:
    """Assert that a call raises `error`."""
    try:
        answer = call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got the answer {answer!r}")


def pages_of(*ids: int) -> Pages:
    """Page ids as the protocol wants them."""
    return np.array(ids, dtype=np.int32)


class PoolConformance:
    """Tests of one pool class. Define `make`; pytest collects the rest."""

    def make(self, usable: int, page_size: int) -> Pool:
        """A fresh pool of `usable` pages of `page_size` tokens, all free."""
        raise NotImplementedError

    def test_a_fresh_pool_is_all_free(self) -> None:
        pool = self.make(6, 16)
        assert (pool.usable, pool.free, pool.page_size) == (6, 6, 16)
        pool.check()

    def test_every_page_is_handed_out_once(self) -> None:
        pool = self.make(7, 4)
        first, second = pool.alloc(3), pool.alloc(4)
        pages = np.concatenate((first, second))
        assert first.dtype == np.int32, "pages are int32"
        assert first.ndim == 1, "pages have one dimension"
        assert len(first) == 3, "alloc(3) gives 3 pages"
        assert len(set(pages.tolist())) == 7, f"a page was handed out twice: {pages}"
        assert pool.free == 0
        pool.check()

    def test_alloc_of_nothing(self) -> None:
        pool = self.make(2, 1)
        assert len(pool.alloc(0)) == 0
        pool.release(pool.alloc(0))
        assert pool.free == 2

    def test_more_than_free_is_refused_and_changes_nothing(self) -> None:
        pool = self.make(5, 1)
        held = pool.alloc(3)
        refused(PoolExhausted, lambda: pool.alloc(3))
        assert pool.free == 2, "a refused alloc took pages"
        pool.check()
        rest = pool.alloc(2)
        assert len(set(held.tolist()) | set(rest.tolist())) == 5, "a refused alloc lost pages"

    def test_a_negative_count_is_refused(self) -> None:
        pool = self.make(3, 1)
        refused(HostError, lambda: pool.alloc(-1))
        assert pool.free == 3

    def test_released_pages_come_back(self) -> None:
        pool = self.make(5, 1)
        pages = pool.alloc(5)
        pool.release(pages[1:4])
        assert pool.free == 3
        pool.check()
        again = pool.alloc(3)
        assert set(again.tolist()) == set(pages[1:4].tolist()), "what came back is not what was released"

    def test_an_answer_does_not_change_later(self) -> None:
        pool = self.make(6, 1)
        held = pool.alloc(3)
        before = held.copy()
        other = pool.alloc(3)
        pool.release(other)
        pool.alloc(2)
        assert (held == before).all(), "alloc answered with a view of its own memory"

    def test_a_page_is_released_once(self) -> None:
        pool = self.make(4, 1)
        page = pool.alloc(1)
        pool.release(page)
        refused(DoubleFree, lambda: pool.release(page))
        assert pool.free == 4, "a refused release changed the count"
        assert len(set(pool.alloc(4).tolist())) == 4, "after a double free a page has two owners"

    def test_a_page_is_named_once_in_a_call(self) -> None:
        pool = self.make(4, 1)
        pages = pool.alloc(2)
        refused(DoubleFree, lambda: pool.release(np.concatenate((pages, pages[:1]))))
        assert pool.free == 2, "a refused release changed the count"
        pool.check()
        pool.release(pages)
        assert pool.free == 4

    def test_a_refused_release_takes_none_of_its_pages(self) -> None:
        pool = self.make(4, 1)
        pages = pool.alloc(3)
        pool.release(pages[2:])
        refused(DoubleFree, lambda: pool.release(pages))
        assert pool.free == 2, "part of a refused release was done"
        pool.release(pages[:2])
        assert pool.free == 4

    def test_pages_outside_the_pool_are_refused(self) -> None:
        pool = self.make(4, 1)
        pool.alloc(4)
        for page in (-1, 1_000_000, -(2**31), 2**31 - 1):
            refused(DoubleFree, partial(pool.release, pages_of(page)))
        assert pool.free == 0
        pool.check()

    def test_the_same_calls_give_the_same_pages(self) -> None:
        answers = []
        for _ in range(2):
            pool = self.make(9, 1)
            held = pool.alloc(6)
            pool.release(held[[4, 1, 2]])
            answers.append([held.tolist(), pool.alloc(2).tolist(), pool.alloc(4).tolist()])
        assert answers[0] == answers[1], "the order depends on something besides the calls"


class PoolMachine(RuleBasedStateMachine):
    """Random calls against a plain model: the set of pages that each of several owners holds."""

    factory: ClassVar[PoolFactory]

    @initialize(usable=st.integers(1, 12), page_size=st.integers(1, 3))
    def start(self, usable: int, page_size: int) -> None:
        self.pool: Pool = type(self).factory(usable, page_size)
        self.usable = usable
        self.owners: list[list[int]] = []
        self.everything: set[int] = set()
        assert self.pool.page_size == page_size

    def _held(self) -> list[int]:
        return [page for owner in self.owners for page in owner]

    @rule(n=st.integers(0, 14))
    def alloc(self, n: int) -> None:
        free = self.usable - len(self._held())
        if n > free:
            refused(PoolExhausted, lambda: self.pool.alloc(n))
            return
        pages = self.pool.alloc(n).tolist()
        assert len(pages) == n, f"alloc({n}) gave {pages}"
        assert not set(pages) & set(self._held()), f"a page of {pages} already has an owner: {self.owners}"
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(at=st.integers(0, 99), data=st.data())
    def release(self, at: int, data: st.DataObject) -> None:
        owner = self.owners[at % len(self.owners)]
        back = data.draw(st.permutations(owner), label="back")[: data.draw(st.integers(0, len(owner)), label="how many")]
        self.pool.release(pages_of(*back))
        owner[:] = [page for page in owner if page not in back]

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def release_wrongly(self, data: st.DataObject) -> None:
        held = self._held()
        good = data.draw(st.lists(st.sampled_from(held), unique=True), label="good")
        twice = good[:1] or [-1]
        known_free = sorted(self.everything - set(held))
        bad = data.draw(st.sampled_from([twice, [-1], [2**31 - 1], known_free[:1] or [-7]]), label="bad")
        call = data.draw(st.permutations(good + bad), label="call")
        refused(DoubleFree, lambda: self.pool.release(pages_of(*call)))

    @rule()
    def everything_can_be_taken(self) -> None:
        """What is free can be handed out to the last page, and is put back."""
        pages = self.pool.alloc(self.pool.free).tolist()
        held = self._held()
        assert len(set(pages) | set(held)) == self.usable, f"pages {pages} and {held} are not {self.usable} different ones"
        assert not self.everything or self.everything == set(pages) | set(held), "the pool's pages are not those it had before"
        self.everything = set(pages) | set(held)
        self.pool.release(pages_of(*pages))

    @invariant()
    def the_counts_hold(self) -> None:
        held = self._held()
        assert len(set(held)) == len(held), f"a page has two owners: {self.owners}"
        assert self.pool.usable == self.usable
        assert self.pool.free == self.usable - len(held), f"free is {self.pool.free} of {self.usable} while {held} are held"
        self.pool.check()


def pool_machine(factory: PoolFactory) -> type[PoolMachine]:
    """A hypothesis state machine over pools that `factory` makes. Its `TestCase` attribute is what a test runner collects."""

    class Machine(PoolMachine):
        pass

    Machine.factory = staticmethod(factory)
    Machine.__name__ = Machine.__qualname__ = f"PoolMachine[{getattr(factory, '__name__', 'factory')}]"
    return Machine
