"""Rows: who has one, which pages stand in it, and how the table grows."""

from __future__ import annotations

import numpy as np

from kvsched import Request
from kvsched.live import Live
from kvsched.residents import Residents


def live(key: str, prompt: int = 10, new: int = 5, **fields: int) -> Live:
    return Live(key, Request(key, range(prompt), new, **fields), new, 1, 4, None)  # type: ignore[arg-type]  # block_tokens only


def pages(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, dtype=np.int32)


def test_a_row_from_enter_to_vacate() -> None:
    residents = Residents(4, rows=2, columns=2)
    one = live("A")
    row = residents.enter(one, 8, pages(5, 6))
    assert (row, one.row, residents.count) == (0, 0, 1)
    assert [int(getattr(residents, name)[row]) for name in ("ctx", "held", "room", "total", "total_pages", "target")] == [8, 2, 8, 14, 4, 10]
    assert residents.taken_rows().tolist() == [0]
    assert residents.active_rows().tolist() == []
    residents.set_active(row, value=True)
    assert residents.active_rows().tolist() == [0]
    assert residents.append(np.array([0]), pages(9)).tolist() == [2]
    residents.append_many(0, pages(10, 11))
    assert residents.pages(0).tolist() == [5, 6, 9, 10, 11]
    assert (int(residents.held[0]), int(residents.room[0])) == (5, 20)
    assert residents.table.shape == (2, 8)  # doubled, and doubled again
    assert residents.truncate(0, 2).tolist() == [10, 11]
    assert (int(residents.held[0]), int(residents.room[0])) == (3, 12)
    residents.leave(0)
    assert (residents.count, residents.taken_rows().tolist(), residents.active_rows().tolist()) == (0, [], [])
    assert residents.pages(0).tolist() == [5, 6, 9]  # until no plan names it
    assert residents.enter(live("B"), 0, pages()) == 1
    residents.vacate(0)
    assert residents.enter(live("C"), 0, pages()) == 0


def test_the_lowest_free_row_goes_first_and_rows_double() -> None:
    residents = Residents(4, rows=2, columns=2)
    rows = [residents.enter(live(f"R{index}"), 0, pages(index)) for index in range(5)]
    assert rows == [0, 1, 2, 3, 4]
    assert residents.rows == 8
    assert [residents.pages(row).tolist() for row in rows] == [[0], [1], [2], [3], [4]]
    for row in (3, 1):
        residents.leave(row)
        residents.vacate(row)
    assert residents.enter(live("X"), 0, pages()) == 1
    assert [one.id for one in residents] == ["R0", "X", "R2", "R4"]


def test_names_are_as_they_were_when_asked_for() -> None:
    residents = Residents(4, rows=2)
    residents.enter(live("A"), 0, pages())
    names = residents.names()
    residents.leave(0)
    residents.vacate(0)
    residents.enter(live("B"), 0, pages())
    assert (names[0], residents.names()[0]) == ("A", "B")


def test_rows_are_a_slice_where_they_are_dense() -> None:
    residents = Residents(4)
    assert residents.index(np.arange(3)) == slice(0, 3)
    sparse = np.array([0, 2])
    assert residents.index(sparse) is sparse
    empty = np.arange(0)
    assert residents.index(empty) is empty


def test_blocks_are_counted() -> None:
    residents = Residents(4)
    residents.enter(live("A", block_tokens=4), 0, pages())
    residents.enter(live("B"), 0, pages())
    assert residents.blocks == 1
    residents.leave(0)
    assert residents.blocks == 0
