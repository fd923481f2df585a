"""What can be funded: needs, the peak over time, the banker's check, the start of a deferred head. Against plain arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
from kvsched.admission.budget import (
    Funds,
    first_fit,
    memory_reason,
    needs,
    over_promised,
    pages_wanted,
    reach,
    released_in_turn,
    safe,
)
from kvsched.core import Core
from kvsched.live import Live
from kvsched.units import NO_PAGES, pages_for

# -- reach and needs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "base", "guaranteed", "ratio", "clip", "slots"), [
    (149, 100, True, 0.0, 1, 149), (149, 100, False, 0.0, 4096, 100), (149, 100, False, 1.0, 4096, 149), (149, 100, False, 0.7, 4096, 135),
    (149, 100, False, 0.1, 4096, 105), (149, 100, False, 0.7, 10, 110), (200_099, 100, False, 0.7, 1024, 1124), (100, 100, False, 0.7, 9, 100),
    (149, 148, False, 0.01, 9, 149), (149, 149, False, 1.0, 9, 149),
])
def test_reach(total: int, base: int, guaranteed: bool, ratio: float, clip: int, slots: int) -> None:
    assert reach(total, base, guaranteed=guaranteed, ratio=ratio, clip=clip) == slots


def build(pages: int, page_size: int = 1, *, cache: bool = False, **config: Any) -> Scheduler:
    config.setdefault("max_step_tokens", 100_000)
    return Scheduler(SchedulerConfig(page_size=page_size, **config), PagePool(pages, page_size), RadixCache(page_size) if cache else None)


def put(sched: Scheduler, key: str, prompt: int, new: int, first: int = -1, **fields: Any) -> Live:
    tokens = np.arange(prompt) + max(first, 0)
    if first < 0:
        tokens[0] = 10_000 + len(key) + 100 * sched._core.arrivals
    assert sched.submit(Request(key, tokens, new, **fields))
    return sched._core.lives[key]


def tick(sched: Scheduler) -> None:
    plan = sched.schedule()
    sched.commit(plan, StepResult(tokens=[7] * len(plan)))


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=5), page=st.sampled_from([1, 4]),
       ratio=st.floats(0, 1), clip=st.integers(1, 20), guaranteed=st.booleans(), chunk=st.sampled_from([None, 3]), ticks=st.integers(1, 6))
def test_needs_of_residents(shapes: list[tuple[int, int, bool]], page: int, ratio: float, clip: int, guaranteed: bool, chunk: int | None,
                            ticks: int) -> None:
    """Each resident by itself, in whole numbers of pages; the vector is what `reach` says of each."""
    sched = build(10_000, page, clip_new_tokens=clip, chunk_tokens=chunk, admission="guaranteed" if guaranteed else "expected")
    for index, (prompt, new, ignore) in enumerate(shapes):
        put(sched, f"R{index}", prompt, new, ignore_eos=ignore)
    for _ in range(ticks):
        tick(sched)
    core = sched._core
    core.ratio.value = ratio
    expected = []
    for live in core.residents:
        held, ctx = int(core.residents.held[live.row]), int(core.residents.ctx[live.row])
        sure = guaranteed or live.request.ignore_eos
        total = live.prompt + max(live.limit, 1) - 1
        base = max(ctx, live.prompt)
        slots = total if sure else min(total, base + min(math.ceil(ratio * (total - base)), clip))
        expected.append(math.ceil(slots / page) - held)
    assert needs(core, core.residents.taken_rows()).tolist() == expected
    assert over_promised(core) == (sum(expected) > core.pool.free)


def test_a_page_of_growth_is_wanted_by_who_comes_back() -> None:
    sched = build(100, 4, conservativeness=0)
    live = put(sched, "R", 8, 30)
    assert pages_wanted(sched._core, live) == 2
    tick(sched)
    sched.pause("retract")
    assert pages_wanted(sched._core, live) == 3 + 1  # 9 tokens now, and one page
    live.total_pages = 3
    assert pages_wanted(sched._core, live) == 3


# -- the peak over time -----------------------------------------------------------------------------------------------


def peak_by_time(people: list[tuple[int, int, int]], room: int, page: int) -> bool:
    """(slots now, tokens left, pages held) of everybody; moment by moment, those who have ended given back."""
    for moment in range(max(left for _, left, _ in people) + 1):
        back = sum(pages_for(base + left, page) for base, left, _ in people if left < moment)
        held = sum(held for _, left, held in people if left < moment)
        grown = sum(pages_for(base + moment, page) - held for base, left, held in people if left >= moment)
        if grown + (back - held) > room + back:
            return False
    return True


@settings(max_examples=150, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4), page=st.sampled_from([1, 3]),
       last=st.tuples(st.integers(1, 12), st.integers(1, 12)), room=st.integers(0, 60), guaranteed=st.booleans())
def test_the_peak_is_that_of_every_moment(shapes: list[tuple[int, int]], page: int, last: tuple[int, int], room: int, guaranteed: bool) -> None:
    sched = build(10_000, page, admission="guaranteed" if guaranteed else "expected")
    for index, (prompt, new) in enumerate(shapes):
        put(sched, f"R{index}", prompt, new, ignore_eos=True)
    plan = sched.schedule()
    sched.commit(plan, StepResult(tokens=[7] * len(plan)))
    core = sched._core
    people = [(live.prompt, live.total - live.prompt, int(core.residents.held[live.row])) for live in core.residents]
    newcomer = put(sched, "N", *last, ignore_eos=True)
    core.floor, core.floor_from = room, core.available()  # so that `room` pages are there, whatever the pool has
    assert Funds(core).peak_fits(newcomer, NO_PAGES) == peak_by_time([*people, (newcomer.prompt, newcomer.total - newcomer.prompt, 0)], room, page)


def test_the_peak_counts_a_shared_page_when_its_last_holder_leaves() -> None:
    """Page 4. A and B share 2 pages. A leaves first and gives back its own page only."""
    sched = build(100, 4, cache=True, admission="guaranteed")
    put(sched, "X", 8, 1, first=0)
    tick(sched)
    for key, new in (("A", 3), ("B", 9)):
        put(sched, key, 9, new, first=0, ignore_eos=True)
    tick(sched)
    core = sched._core
    rows = core.residents.taken_rows()
    assert released_in_turn(core, rows).tolist() == [1, 3]
    assert released_in_turn(core, rows[::-1]).tolist() == [1, 3]


def test_released_in_turn_counts_a_newcomer_where_it_leaves() -> None:
    sched = build(100, 4, cache=True, admission="guaranteed")
    put(sched, "X", 8, 1, first=0)
    tick(sched)
    put(sched, "A", 9, 5, first=0)
    tick(sched)
    core = sched._core
    rows = core.residents.taken_rows()
    match = core.residents.pages(int(rows[0]))[:2].copy()
    assert released_in_turn(core, rows, match).tolist() == [1]  # who never leaves keeps what it matched
    assert released_in_turn(core, rows, match, 0).tolist() == [0, 3]
    assert released_in_turn(core, rows, match, 1).tolist() == [1, 2]


def test_pinned_and_held_pages_do_not_come_back() -> None:
    sched = build(100, 4, cache=True, admission="guaranteed", pin_limit_pages=10)
    put(sched, "X", 8, 1, first=0, pin=1)
    tick(sched)
    put(sched, "A", 17, 5, first=0)
    tick(sched)
    core = sched._core
    rows = core.residents.taken_rows()
    assert released_in_turn(core, rows).tolist() == [4]  # 5 pages, one of them pinned
    sched.hold_pages("A", 1)
    assert released_in_turn(core, rows).tolist() == [3]


# -- the banker's check -----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4), room=st.integers(0, 30),
       grants=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_safe_is_that_some_order_of_ends_works(shapes: list[tuple[int, int]], room: int, grants: list[int]) -> None:
    sched = build(10_000, admission="guaranteed", chunk_tokens=4)
    for index, (prompt, new) in enumerate(shapes):
        put(sched, f"R{index}", prompt, new)
    tick(sched)
    core = sched._core
    rows = core.residents.taken_rows().tolist()
    core.floor, core.floor_from = room, core.available()
    lacks = {live.row: live.total - int(core.residents.held[live.row]) for live in core.residents}
    extra = {row: min(grants[index], lacks[row]) for index, row in enumerate(rows)}
    held = {row: int(core.residents.held[row]) + extra[row] for row in rows}

    def works(turn: tuple[int, ...]) -> bool:
        left = room - sum(extra.values())
        for row in turn:
            if lacks[row] - extra[row] > left:
                return False
            left += held[row]
        return True

    if room >= sum(extra.values()):
        assert safe(core, extra) == any(works(turn) for turn in itertools.permutations(rows))


# -- the start of a deferred head -------------------------------------------------------------------------------------


def fit(core: Core, need: int) -> int | None:
    return first_fit(core, need, Funds(core), NO_PAGES)


def test_a_head_starts_at_the_first_release_after_which_it_fits() -> None:
    """100 slots: A writes 20 and ends first, B 30, C 40; 10 are nobody's."""
    sched = build(100, admission="guaranteed")
    put(sched, "C", 10, 31)
    put(sched, "A", 16, 5)
    put(sched, "B", 20, 11)
    tick(sched)
    core = sched._core
    assert Funds(core).fundable() == 10
    assert fit(core, 10) == 0  # now
    assert fit(core, 11) == 10 + 20 - 11  # when A has ended
    assert fit(core, 30) == 0
    assert fit(core, 31) == 10 + 20 + 30 - 31
    assert fit(core, 61) == 100 - 61
    assert fit(core, 100) == 0
    assert fit(core, 101) is None


def test_what_the_head_matched_is_released_by_nobody() -> None:
    """Page 4, 8 pages: A holds 3, of which 2 are the head's hit too. When A ends, its own page comes back."""
    sched = build(8, 4, cache=True, admission="guaranteed")
    put(sched, "X", 8, 1, first=0)
    tick(sched)
    put(sched, "A", 9, 4, first=0)
    tick(sched)
    core = sched._core
    cache = core.cache
    assert cache is not None
    head = put(sched, "H", 32, 1, first=0)
    handle = cache.lock(head.space, head.tokens[:8])
    assert Funds(core).fundable() == 5
    assert first_fit(core, 6, Funds(core), handle.pages) == 0
    assert first_fit(core, 7, Funds(core), handle.pages) is None
    cache.unlock(handle)


# -- the word for a shortage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "need", "fundable", "available", "word"), [
    (0, 10, 9, 9, "pages"), (0, 10, 9, 10, "commitment"), (0, 10, 4, 9, "pages"), (0, 10, 4, 10, "commitment"),
    (3, 10, 9, 9, "pinned_pages"), (3, 10, 7, 9, "pinned_pages"), (3, 10, 6, 9, "pages"), (3, 10, 6, 10, "commitment"),
    (3, 10, 10, 10, "commitment"),
])
def test_a_shortage_is_of_held_pages_of_pages_or_of_promises(held: int, need: int, fundable: int, available: int, word: str) -> None:
    """Would fit if held pages came back; else lacks pages; else fits there, and not beside what is promised."""
    sched = build(50)
    if held:
        sched.hold_pages("lease", held)
    reason, short = memory_reason(sched._core, need, fundable, available)
    assert (reason.value, short) == (word, need - fundable)
