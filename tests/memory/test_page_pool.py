"""PagePool: the conformance suite, and what the protocol leaves to it (reserved pages, order, sizes)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test
from trees import LONG, SHORT

from kvsched.errors import AccountingError, ConfigError, DoubleFree, InvalidRequest, PoolExhausted
from kvsched.memory import PagePool
from kvsched.testing.pool_suite import PoolConformance, pages_of, pool_machine


class TestPagePool(PoolConformance):
    def make(self, usable: int, page_size: int) -> PagePool:
        return PagePool(usable, page_size)


class TestPagePoolWithReservedPages(PoolConformance):
    def make(self, usable: int, page_size: int) -> PagePool:
        return PagePool(usable + 3, page_size, reserved_pages=3)


class AtOnce(PagePool):
    """A pool that takes few pages back in the way it takes many."""

    def _taken_back_one_by_one(self, pages: list[int]) -> bool:
        return self._taken_back_at_once(np.array(pages, dtype=np.int32))


class TestManyPagesAtOnce(PoolConformance):
    def make(self, usable: int, page_size: int) -> PagePool:
        return AtOnce(usable, page_size)


def test_random_calls_against_the_model() -> None:
    run_state_machine_as_test(pool_machine(AtOnce), settings=SHORT)
    run_state_machine_as_test(pool_machine(lambda usable, size: PagePool(usable + 2, size, 2)), settings=SHORT)


@pytest.mark.soak
def test_random_calls_against_the_model_for_long() -> None:
    run_state_machine_as_test(pool_machine(lambda usable, size: PagePool(usable + 1, size, 1)), settings=LONG)


def test_reserved_pages_are_never_handed_out_nor_taken_back() -> None:
    pool = PagePool(pages=8, page_size=16, reserved_pages=2)
    assert (pool.usable, pool.pages) == (6, 8)
    assert sorted(pool.alloc(6).tolist()) == [2, 3, 4, 5, 6, 7]
    for page in (0, 1):
        with pytest.raises(DoubleFree, match=f"page {page} is reserved"):
            pool.release(pages_of(page))
    assert pool.free == 0


def test_lowest_ids_go_first_and_what_comes_back_goes_first_again() -> None:
    pool = PagePool(8, 1, reserved_pages=1)
    assert pool.alloc(3).tolist() == [1, 2, 3]
    second = pool.alloc(3)
    assert second.tolist() == [4, 5, 6]
    pool.release(second)
    assert pool.alloc(4).tolist() == [4, 5, 6, 7]


def test_giving_back_what_was_just_taken_restores_the_pool_exactly() -> None:
    one, other = PagePool(32, 1), PagePool(32, 1)
    for pool in (one, other):
        held = pool.alloc(20)
        pool.release(held[[3, 17, 5, 9]])
    for n in (1, 5, 0, 16):
        one.release(one.alloc(n))
    assert one.alloc(16).tolist() == other.alloc(16).tolist()


@pytest.mark.parametrize(("call", "text"), [
    ([5, 5], "page 5 is named twice"), ([9], "page 9 is already free"), ([5, 99], "page 99 is out of range: ids go from 0 to 15"),
    ([-1], "page -1 is out of range"), ([2**31 - 1], "is out of range"), ([5, 6, 9], "page 9 is already free"),
])
@pytest.mark.parametrize("kind", [PagePool, AtOnce])
def test_a_refused_release_names_the_page_and_changes_nothing(kind: type[PagePool], call: list[int], text: str) -> None:
    pool = kind(16, 1)
    pool.alloc(8)
    with pytest.raises(DoubleFree, match=text):
        pool.release(np.array(call))
    assert pool.free == 8
    assert pool.handed_out().tolist() == [*range(8)]
    pool.check()


def test_c22_a_page_freed_twice_is_not_handed_out_twice() -> None:
    pool = PagePool(16, 1, reserved_pages=1)
    pages = pool.alloc(15)
    pool.release(pages[7:8])
    with pytest.raises(DoubleFree):
        pool.release(pages[7:8])
    assert pool.free == 1
    assert pool.alloc(1).tolist() == pages[7:8].tolist()
    with pytest.raises(PoolExhausted, match="1 pages were asked for and 0 of 15 are free"):
        pool.alloc(1)


@pytest.mark.parametrize("pages", [[[1, 2]], [1.5], ["a"], [True, False], [2**40]])
def test_what_is_no_list_of_page_ids_is_refused(pages: Any) -> None:
    pool = PagePool(4, 1)
    pool.alloc(4)
    with pytest.raises(InvalidRequest, match=r"^pages must (be integers in one dimension|fit into 32 bits)"):
        pool.release(pages)
    assert pool.free == 0


def test_other_integer_sequences_are_accepted() -> None:
    pool = PagePool(6, 1)
    pool.alloc(6)
    plain: Any = [0, 1]
    pool.release(plain)
    wide: Any = np.array([2, 3])
    pool.release(wide)
    pool.release(np.arange(6, dtype=np.int32)[4:6])
    assert pool.free == 6


@pytest.mark.parametrize("n", [-1, 1.0, True, "2", None])
def test_a_count_that_is_none_is_refused(n: Any) -> None:
    pool = PagePool(4, 1)
    with pytest.raises(InvalidRequest, match="n must be an integer of at least 0"):
        pool.alloc(n)
    assert pool.free == 4


@pytest.mark.parametrize(("sizes", "key"), [
    ({"pages": 0, "page_size": 1}, "pages"), ({"pages": -4, "page_size": 1}, "pages"), ({"pages": 2.0, "page_size": 1}, "pages"),
    ({"pages": True, "page_size": 1}, "pages"), ({"pages": 4, "page_size": 0}, "page_size"), ({"pages": 4, "page_size": "16"}, "page_size"),
    ({"pages": 4, "page_size": 1, "reserved_pages": -1}, "reserved_pages"), ({"pages": 4, "page_size": 1, "reserved_pages": 4}, "reserved_pages"),
    ({"pages": 2**31, "page_size": 1}, "pages"),
])
def test_bad_sizes_are_refused_by_name(sizes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} must be"):
        PagePool(**sizes)


def test_a_million_pages() -> None:
    pool = PagePool(1_000_000, 16, reserved_pages=1)
    pages = pool.alloc(999_999)
    pool.release(pages[::2])
    assert pool.free == 500_000
    again = pool.alloc(500_000)
    assert len(np.intersect1d(again, pages[1::2])) == 0
    pool.check()


@pytest.mark.parametrize(("break_it", "text"), [
    (lambda pool: pool._stack.__setitem__(0, 3), "a page is free twice"),
    (lambda pool: pool._mark.__setitem__(3, 0), "free [+] handed out is not usable"),
    (lambda pool: setattr(pool, "_top", 9), "the stack is higher than the pool"),
    (lambda pool: pool._mark.__setitem__(0, 0), "a reserved page is handed out"),
    (lambda pool: pool._stack.__setitem__(0, 0), "a free page is reserved"),
])
def test_check_finds_what_is_broken_and_prints_the_state(break_it: Any, text: str) -> None:
    pool = PagePool(8, 1, reserved_pages=1)
    pool.check()
    break_it(pool)
    with pytest.raises(AccountingError, match=text) as caught:
        pool.check()
    assert "usable=7 reserved=1" in str(caught.value)
