"""Laws D1 to D5, D7 and D8: what a match may do, what is always computed, what is shared, locked, evicted, pinned, kept."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from loop import ask, chunks, make, pages, running, step, submit, totals, why

from kvsched import Event, Namespace, RadixCache, RefusalReason, Refused, Request, Scheduler, StepResult
from kvsched.units import Tokens


def cached(*runs: tuple[list[int], list[int]], page_size: int = 4) -> RadixCache:
    """A tree that holds each run of tokens in the given pages, unlocked."""
    tree = RadixCache(page_size)
    for tokens, held in runs:
        grow(tree, tokens, held)
    return tree


def grow(tree: RadixCache, tokens: list[int], held: list[int]) -> None:
    array = np.array(tokens, dtype=np.int32)
    handle = tree.lock(None, array)
    done = handle.length // tree.page_size
    tree.extend(handle, array[handle.length :], np.array(held[done:], dtype=np.int32))
    tree.unlock(handle)


def tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int32)


def numbers(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# -- D1 ---------------------------------------------------------------------------------------------------------------


def test_d1_a_match_changes_nothing() -> None:
    """A match that ends inside a node does not split it, and the one that was matched is still the first to be evicted."""
    tree = cached((numbers(16), [0, 1, 2, 3]), (numbers(8, 100), [4, 5]))
    for _ in range(3):
        assert tree.match(None, tokens(*numbers(8), 77)) == 8
    whole = tree.path(None, np.arange(16, dtype=np.int32))
    assert len(whole) == 2  # root and one node
    assert (tree.evictable, tree.locked) == (6, 0)
    assert tree.evict(1).tolist() == [3]  # least recently used, whatever was matched


def test_d1_explaining_and_waiting_touch_no_cached_page() -> None:
    """Eight passes over a deferred request with a hit leave the tree as it was: that hit is the first to be evicted."""
    sched = make(6, 4, cache=True, admission="guaranteed")
    submit(sched, ask("X", 8, 1, first=0))
    step(sched)
    submit(sched, ask("Y", 8, 1, first=500))
    step(sched)
    sched.hold_pages("lease", 2)
    submit(sched, ask("B", 13, 4, first=0))  # 4 pages, 2 of them X's: 2 more are wanted, and only Y's could be evicted
    sched.pause("hold")
    step(sched, 8)
    sched.explain("B")
    sched.snapshot()
    sched.resume()
    sched.abort("B")
    assert pages(sched) == (0, 4, 0, 0, 2)
    submit(sched, ask("Z", 8, 1))
    step(sched)
    submit(sched, ask("probe", 9, 1, first=500), ask("probe2", 9, 1, first=0))
    sched.pause("hold")
    assert [sched._core.match(sched._core.lives[key]) for key in ("probe", "probe2")] == [8, 0]


def test_d1_match_and_lock_are_one() -> None:
    """4 pages, X caches one, 3 are free. A matches X and lacks one page, B wants 3: B cannot have X's page (case C13)."""
    sched = make(4, 16, cache=True, admission="guaranteed", head="skip")
    submit(sched, ask("X", 16, 1, first=0))
    step(sched)
    submit(sched, ask("A", 17, 1, first=0), ask("B", 48, 1))
    plan = sched.schedule()
    assert plan.admitted == ("A",)
    assert chunks(plan) == [("A", 16, 1)]
    assert why(sched, "B") == ("pages", 1)
    assert pages(sched) == (2, 0, 1, 1, 0)


def test_d1_unlock_goes_by_what_was_recorded() -> None:
    """A node is locked whole and then split by somebody else's insertion: giving the handle back unlocks both halves."""
    tree = cached((numbers(16), [0, 1, 2, 3]))
    handle = tree.lock(None, np.arange(16, dtype=np.int32))
    assert (tree.locked, tree.evictable) == (4, 0)
    grow(tree, [*numbers(8), 50, 51, 52, 53], [0, 1, 9])
    assert len(tree.path(None, np.arange(16, dtype=np.int32))) == 3
    assert (tree.locked, tree.evictable) == (4, 1)
    tree.unlock(handle)
    assert (tree.locked, tree.evictable) == (0, 5)
    tree.check()


# -- D2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "prompt", "hit"), [(1, 64, 63), (16, 64, 48), (16, 65, 64), (16, 16, 0), (64, 64, 0), (16, 63, 48)])
def test_d2_a_fully_cached_prompt_computes_something(page_size: int, prompt: int, hit: int) -> None:
    sched = make(200 // page_size + 2, page_size, cache=True)
    submit(sched, ask("X", 80 if page_size < 64 else 64, 1, first=0))
    step(sched)
    before = pages(sched)
    submit(sched, ask("R", prompt, 1, first=0))
    assert chunks(step(sched)) == [("R", hit, prompt - hit)]
    assert totals(sched, "cached_tokens") == hit
    assert pages(sched) == before  # the page that was computed again is in the tree once


# -- D3 ---------------------------------------------------------------------------------------------------------------


def _hit(sched: Scheduler, key: str, **fields: Any) -> int:
    submit(sched, ask(key, 17, 1, first=0, **fields))
    plan = step(sched)
    return plan.prefill[0].start


def test_d3_the_adapter_is_part_of_the_namespace_said_or_not() -> None:
    sched = make(100, 16, cache=True)
    assert _hit(sched, "a", adapter="X") == 0
    assert _hit(sched, "b") == 0  # no adapter
    assert _hit(sched, "c", adapter="Y") == 0
    assert _hit(sched, "d", adapter="X") == 16
    assert _hit(sched, "e", adapter="X", namespace=Namespace(adapter="X")) == 16  # said, and the same
    assert _hit(sched, "f", adapter="X", namespace=Namespace(version="2")) == 0  # reloaded
    assert _hit(sched, "g", namespace=Namespace(salt="X")) == 0  # a salt is not an adapter
    assert _hit(sched, "h", namespace=Namespace(version="X")) == 0
    assert _hit(sched, "i", namespace=Namespace(version="a", salt="b")) == 0
    assert _hit(sched, "j", namespace=Namespace(version="ab")) == 0
    assert _hit(sched, "k", namespace=Namespace(salt="ab")) == 0  # fields are compared, not joined


def test_d3_a_tenant_is_no_namespace() -> None:
    sched = make(100, 16, cache=True)
    assert _hit(sched, "a", tenant="one") == 0
    assert _hit(sched, "b", tenant="two") == 16


# -- D4 ---------------------------------------------------------------------------------------------------------------


def test_d4_the_protected_length_follows_what_is_committed() -> None:
    """16,384 tokens in chunks of 8,192: while the second chunk is in flight 8,192 are protected, and not 16,384."""
    sched = make(1100, 16, cache=True, chunk_tokens=8192)
    submit(sched, ask("R", 16_384, 2))
    protected = []
    for _ in range(2):
        plan = sched.schedule()
        protected.append(pages(sched)[2] * 16)
        sched.commit(plan, StepResult(tokens=[7]))
        protected.append(pages(sched)[2] * 16)
    assert protected == [0, 8192, 8192, 16_384]


def test_d4_it_never_shrinks_and_ends_at_a_page() -> None:
    sched = make(100, 16, cache=True, chunk_tokens=23, max_in_flight=2)
    submit(sched, ask("R", 100, 20))
    last = 0
    for at in range(12):
        plan = sched.schedule()
        if at % 3 == 1:
            sched.rollback(plan)
            plan = sched.schedule()
        sched.commit(plan, StepResult(tokens=[7]))
        handle = sched._core.lives["R"].handle
        assert handle is not None
        computed = sched.request_state("R")["computed"]
        assert last <= handle.length == min(computed, 100) // 16 * 16
        last = handle.length
    assert last == 96  # what is generated is not protected while it runs


# -- D5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "evicted"), [(40, 7), (47, 0), (46, 1), (0, 47)])
def test_d5_eviction_asks_for_the_shortfall_in_pages(free: int, evicted: int) -> None:
    """Page 64, 3,000 tokens are 47 pages (case C20)."""
    sched = make(100, 64, cache=True)
    submit(sched, ask("X", 64 * 60, 1))
    step(sched)
    if free < 40:
        sched.hold_pages("lease", 40 - free)
    elif free > 40:
        sched._core.pool.release(sched._core.cache.evict(free - 40) if sched._core.cache is not None else np.zeros(0, np.int32))
    submit(sched, ask("R", 3000, 1))
    assert sched.schedule().evicted == evicted


def test_d5_growing_within_a_page_evicts_nothing() -> None:
    """Page 64: 63 tokens become 64, and no page is missing; the 65th takes one (case C18)."""
    sched = make(3, 64, cache=True)
    submit(sched, ask("X", 128, 1))
    step(sched)
    submit(sched, ask("R", 63, 4))
    assert [step(sched).evicted for _ in range(4)] == [0, 0, 1, 0]


def _calls_to_evict(leaves: int, count: int) -> int:
    tree = cached(*(([leaf + 10, leaf + 10], [leaf]) for leaf in range(leaves)), page_size=2)
    calls = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        for _ in range(count):
            tree.evict(1)
    finally:
        sys.setprofile(None)
    return calls


def test_d5_the_cost_of_an_eviction_does_not_grow_with_the_tree() -> None:
    """Counted in calls, not in time: 50 pages out of 100 leaves and out of 6,400."""
    small, large = _calls_to_evict(100, 50), _calls_to_evict(6400, 50)
    assert large <= 2 * small


# -- D7 ---------------------------------------------------------------------------------------------------------------


class Ear:
    """Keeps what it hears of pins."""

    def __init__(self) -> None:
        self.pins: list[tuple[str, str]] = []

    def event(self, event: Event) -> None:
        if event.kind == "pinned":
            self.pins.append((event.id, event.detail))


def test_d7_a_pin_lowers_the_ceiling_until_its_owner_lets_go() -> None:
    """100 pages, at most 20 pinned. A 21st is not (case C84)."""
    ear = Ear()
    sched = make(100, 4, cache=True, pin_limit_pages=20, sink=ear)
    submit(sched, ask("X", 84, 1, pin=21))
    step(sched)
    assert ear.pins == [("X", "20 of 21 pages")]
    assert sched.max_servable_tokens == 80 * 4
    refused = sched.submit(ask("R", 81 * 4, 1))
    assert refused == Refused("R", RefusalReason.NEVER_FITS, 81, 80, retryable=False)
    submit(sched, ask("S", 80 * 4, 1))
    plan = step(sched)
    assert plan.admitted == ("S",)
    assert pages(sched)[2] == 20  # the pin is still there: what made room was the 21st page
    assert sched.unpin("X") is True
    assert sched.unpin("X") is False
    assert sched.max_servable_tokens == 100 * 4
    submit(sched, ask("R", 81 * 4, 1))


def test_d7_two_owners_pin_one_page_until_both_let_go() -> None:
    sched = make(100, 4, cache=True, pin_limit_pages=15)
    submit(sched, ask("X", 41, 1, first=0, pin=10))
    step(sched)
    submit(sched, ask("Y", 41, 1, first=0, pin=10))
    step(sched)
    assert sched.max_servable_tokens == 90 * 4  # ten pages, not twenty
    sched.unpin("X")
    assert sched.max_servable_tokens == 90 * 4
    sched.unpin("Y")
    assert sched.max_servable_tokens == 100 * 4


def test_d7_a_pin_is_cut_short_for_an_accepted_request() -> None:
    """While X runs, R with a need of 85 of 100 pages is accepted: X's pin of 20 gets 15, and says so."""
    ear = Ear()
    sched = make(100, 4, cache=True, pin_limit_pages=20, sink=ear)
    submit(sched, ask("X", 80, 2, pin=20))
    step(sched)
    submit(sched, ask("R", 85 * 4, 1))
    step(sched)
    assert ear.pins == [("X", "15 of 20 pages")]
    assert sched.max_servable_tokens == 85 * 4
    assert step(sched).admitted == ("R",)


def test_d7_without_a_limit_nothing_is_pinned() -> None:
    ear = Ear()
    sched = make(100, 4, cache=True, sink=ear)
    submit(sched, ask("X", 80, 1, pin=20))
    step(sched)
    assert ear.pins == [("X", "0 of 20 pages")]
    assert (sched.max_servable_tokens, pages(sched)) == (400, (80, 20, 0, 0, 0))


def test_d7_an_aborted_or_retracted_request_pins_nothing() -> None:
    sched = make(100, 4, cache=True, pin_limit_pages=20)
    submit(sched, ask("X", 80, 9, pin=20))
    step(sched, 2)
    sched.pause("retract")
    assert sched.max_servable_tokens == 400
    sched.resume()
    step(sched)
    sched.abort("X")
    assert sched.max_servable_tokens == 400


def test_d7_a_soft_pin_is_evicted_last() -> None:
    tree = cached((numbers(4), [0]), (numbers(4, 10), [1]), (numbers(4, 20), [2]))
    assert tree.retain(None, tokens(*numbers(4)), "owner") == 4
    assert tree.evictable == 3  # it promises no less
    assert [int(tree.evict(1)[0]) for _ in range(3)] == [1, 2, 0]


# -- D8 ---------------------------------------------------------------------------------------------------------------


def test_d8_prompt_pages_enter_at_the_commit_that_computes_them() -> None:
    sched = make(20, 4, cache=True, chunk_tokens=6)
    submit(sched, ask("R", 10, 4))
    plan = sched.schedule()
    assert pages(sched) == (18, 0, 0, 2, 0)
    sched.commit(plan, StepResult(tokens=[7]))
    assert pages(sched) == (18, 0, 1, 1, 0)  # 6 tokens are one whole page
    step(sched)
    assert pages(sched) == (17, 0, 2, 1, 0)


def test_d8_generated_pages_enter_at_the_end() -> None:
    """P = 6, N = 7: 12 slots, 3 pages. While it runs one of them is in the tree, then all."""
    sched = make(20, 4, cache=True)
    submit(sched, ask("R", 6, 7, first=0))
    step(sched, 6)
    assert pages(sched) == (17, 0, 1, 2, 0)
    step(sched)
    assert not sched.has_work()
    assert pages(sched) == (17, 3, 0, 0, 0)
    prompt = np.concatenate((np.arange(6), np.full(7, 7)))
    submit(sched, Request("S", prompt=prompt, max_new_tokens=1))
    assert chunks(step(sched)) == [("S", 12, 1)]


def test_d8_generated_pages_enter_at_retraction() -> None:
    sched = make(20, 4, cache=True)
    submit(sched, ask("R", 6, 20))
    step(sched, 8)  # 6 + 7 slots
    sched.pause("retract")
    assert pages(sched) == (17, 3, 0, 0, 0)


def test_d8_at_abort_private_pages_are_freed_and_cached_ones_stay() -> None:
    sched = make(20, 4, cache=True)
    submit(sched, ask("R", 6, 20))
    step(sched, 8)
    assert pages(sched) == (16, 0, 1, 3, 0)
    sched.abort("R")
    assert pages(sched) == (19, 1, 0, 0, 0)


def test_d8_a_failed_request_keeps_nothing_of_the_step_that_failed() -> None:
    sched = make(20, 4, cache=True)
    submit(sched, ask("R", 8, 20))
    sched.commit(sched.schedule(), StepResult(tokens=[7], failed=[0]))
    sched.check()
    assert not sched.has_work()
    assert pages(sched) == (20, 0, 0, 0, 0)


def test_d8_a_chunk_that_failed_is_kept_by_nobody_and_those_beside_it_are() -> None:
    """Three rows: a decode, a chunk that is good and one that failed."""
    sched = make(20, 4, cache=True)
    submit(sched, ask("A", 3, 9))
    step(sched)
    submit(sched, ask("B", 4, 9), ask("C", 4, 9, first=0))
    sched.commit(sched.schedule(), StepResult(tokens=[7, 7, 7], failed=[2]))
    sched.check()
    assert running(sched) == ["A", "B"]
    assert pages(sched) == (18, 0, 1, 1, 0)
    submit(sched, ask("D", 5, 1, first=0))
    assert chunks(step(sched)) == [("D", 0, 5)]


def test_d8_what_may_not_be_written_to_the_cache_is_not() -> None:
    sched = make(20, 4, cache=True)
    submit(sched, ask("R", 8, 2, first=0, cache_write=False))
    step(sched, 2)
    assert pages(sched) == (20, 0, 0, 0, 0)
    submit(sched, ask("S", 8, 1, first=0))
    step(sched)
    submit(sched, ask("T", 9, 1, first=0, cache_read=False))
    assert chunks(step(sched)) == [("T", 0, 9)]


def test_d8_eviction_comes_when_the_pages_are_written() -> None:
    """8 pages cached of 10. R is promised 6 and writes 2 in each step: nothing goes at admission, then 2 at a time."""
    sched = make(10, 4, cache=True, admission="guaranteed", chunk_tokens=8)
    submit(sched, ask("X", 32, 1))
    step(sched, 4)
    submit(sched, ask("R", 24, 1))
    seen = []
    for _ in range(3):
        plan = step(sched)
        seen.append((plan.evicted, pages(sched)[1]))
    assert seen == [(0, 8), (2, 6), (2, 4 + 6)]
    assert running(sched) == []
