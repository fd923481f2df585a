"""Cold requests with one prefix: who waits for whose prefill, and that looking at the cache is no use of it."""

from __future__ import annotations

from typing import Any

import pytest
from loop import ask, chunks, drain, make, pages, running, step, submit, totals, why

from kvsched import StepResult


@pytest.mark.parametrize(("hold", "computed"), [(True, 1024 + 4 * 16), (False, 4 * 1040)])
def test_a_burst_with_one_prefix_computes_it_once(hold: bool, computed: int) -> None:
    """Case C83: four requests of 1,024 shared tokens and 16 of their own."""
    sched = make(1000, 16, cache=True, hold_shared_prefill=hold)
    for key in range(4):
        request = ask(f"R{key}", 1040, 1, first=0)
        tokens = request.tokens.copy()
        tokens[1024:] += 10_000 * (key + 1)
        submit(sched, type(request)(request.id, tokens, 1))
    step(sched)
    if hold:
        assert {why(sched, f"R{key}") for key in (1, 2, 3)} == {("shared_prefill", None)}
        assert pages(sched)[3] == 0  # they hold nothing, and R0 has ended
    drain(sched, 5)
    assert totals(sched, "prefill_tokens") == computed


@pytest.mark.parametrize(("leader", "follower", "waits"), [
    ({}, {}, True),
    ({"cache_write": False}, {}, False),
    ({}, {"cache_read": False}, False),
    ({"adapter": "a"}, {}, False),
    ({"adapter": "a"}, {"adapter": "a"}, True),
    ({"prompt": 7}, {}, True),
    ({"prompt": 3}, {}, False),  # its prompt ends before the page does
    ({}, {"prompt": 4}, False),  # it computes its last page itself
    ({}, {"prompt": 5}, True),
    ({}, {"first": 1}, False),
], ids=str)
def test_who_waits_for_whose_prefill(leader: dict[str, Any], follower: dict[str, Any], waits: bool) -> None:
    """Page 4, chunks of one: the leader is at its first token, and the follower lacks the first page."""
    sched = make(100, 4, cache=True, hold_shared_prefill=True, chunk_tokens=1)
    submit(sched, ask("L", **{"prompt": 9, "new": 1, "first": 0, **leader}))
    submit(sched, ask("F", **{"prompt": 9, "new": 1, "first": 0, **follower}))
    step(sched)
    assert (why(sched, "F")[0] == "shared_prefill") is waits
    assert running(sched) == (["L"] if waits else ["L", "F"])


def test_a_follower_starts_at_what_the_leader_has_finished() -> None:
    """Pages of finished chunks can be had before the leader ends; the follower waits for those that are still to come."""
    sched = make(100, 4, cache=True, hold_shared_prefill=True, chunk_tokens=4)
    submit(sched, ask("L", 20, 1, first=0), ask("F", 11, 1, first=0), ask("G", 20, 1, first=0))
    step(sched, 2)
    assert running(sched) == ["L"]
    plan = step(sched)
    assert chunks(plan) == [("L", 8, 4), ("F", 8, 3)]
    assert why(sched, "G") == ("shared_prefill", None)


def test_without_the_option_strangers_wait_for_nobody_and_children_for_each_other_only() -> None:
    sched = make(100, 4, cache=True, chunk_tokens=4)
    submit(sched, ask("X", 9, 1, first=0), ask("R", 9, 1, first=0, n=2))
    assert chunks(step(sched)) == [("X", 0, 4), ("R/0", 0, 4)]
    assert why(sched, "R/1") == ("shared_prefill", None)


@pytest.mark.parametrize("head", ["strict", "backfill", "skip"])
def test_a_look_that_led_to_nothing_is_no_use(head: str) -> None:
    """X was cached before Y. B matches X in pass after pass and is not admitted: X is the first to be evicted all the same."""
    sched = make(8, 4, cache=True, admission="guaranteed", head=head)
    for key, first in (("X", 0), ("Y", 500)):
        submit(sched, ask(key, 8, 1, first=first))
        step(sched)
    submit(sched, ask("R", 9, 20, cache_write=False), ask("B", 24, 1, first=0))
    plan = sched.schedule()
    assert plan.admitted == ("R",)
    for _ in range(4):
        sched.rollback(plan)
        plan = sched.schedule()
    sched.rollback(plan)
    sched.abort_all()
    submit(sched, ask("Z", 24, 1, cache_write=False))
    assert step(sched).evicted == 2
    submit(sched, ask("X2", 9, 1, first=0), ask("Y2", 9, 1, first=500))
    assert chunks(sched.schedule()) == [("X2", 0, 9), ("Y2", 8, 1)]


@pytest.mark.parametrize("exchange", [True, False])
def test_a3_pages_computed_twice_are_exchanged_or_given_back_at_the_end(exchange: bool) -> None:
    """Page 4: L and F compute the same two pages side by side. The commit exchanges F's page, and the next plan tells the host.

    Without `exchange_pages` a row keeps its own copy while it runs, and gives it back when it leaves.
    """
    sched = make(100, 4, cache=True, exchange_pages=exchange, chunk_tokens=4)
    submit(sched, ask("L", 9, 8, first=0), ask("F", 9, 4, first=0))
    plan = sched.schedule()
    leader, follower = sched.block_table[:2, 0].tolist()
    assert leader != follower
    sched.commit(plan, StepResult(tokens=[7, 7]))
    assert sched.block_table[:2, 0].tolist() == [leader, leader if exchange else follower]
    told = step(sched).deltas
    entries = list(zip(told.row.tolist(), told.column.tolist(), told.page.tolist(), strict=True))
    assert [entry for entry in entries if entry[1] == 0] == ([(1, 0, leader)] if exchange else [])
    step(sched)  # both prompts are computed: two pages of each are full, and each has one of its own
    assert sched.occupancy["locked"] == 2
    assert sched.occupancy["private"] == (2 if exchange else 4)
    drain(sched, 20)
    assert sched.occupancy == {"usable": 100, "free": 96, "cached": 4, "locked": 0, "private": 0, "quarantined": 0}
