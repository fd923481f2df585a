"""Each order by itself: who goes first among those who wait."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest

from kvsched import Request
from kvsched.config import ORDERS as NAMES
from kvsched.live import Live
from kvsched.order import ORDERS, Rank, Ranked, Shares


@attrs.define
class Look:
    """A present made up for the test."""

    hits: dict[str, int] = attrs.field(factory=dict)
    passes: dict[str, int] = attrs.field(factory=dict)
    shares: dict[str, float] = attrs.field(factory=dict)
    weights: dict[str, float] = attrs.field(factory=dict)
    stale: dict[str, int] = attrs.field(factory=dict)
    aging_tokens: int = 0
    page_size: int = 1
    max_skips: int = 2

    def matched(self, live: Live) -> int:
        return self.hits.get(live.id, 0)

    def ranked(self, waiting: Iterable[Live], order: Ranked) -> list[tuple[Rank, int, Live]]:
        """From a bound that is too high for those in `stale`, as after an eviction."""
        return sorted((order.rank(live, self.stale.get(live.id, self.matched(live)), self), live.arrival, live) for live in waiting)

    def waited(self, live: Live) -> int:
        return self.passes.get(live.id, 0)

    def served(self, tenant: str) -> float:
        return self.shares.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


def queue(*shapes: tuple[str, int, int] | tuple[str, int, int, dict[str, object]]) -> list[Live]:
    """(id, prompt, new, further fields), in order of arrival."""
    lives = []
    for at, (key, prompt, new, *rest) in enumerate(shapes):
        fields = rest[0] if rest else {}
        lives.append(Live(key, Request(key, range(prompt), new, **fields), new, at + 1, 1, None))  # type: ignore[arg-type]  # by name
    return lives


def turn(name: str, waiting: list[Live], view: Look | None = None) -> str:
    return "".join(live.id for live in ORDERS[name]().arrange(waiting, view or Look()))


def test_there_is_a_class_for_every_name() -> None:
    assert tuple(ORDERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_equals_go_by_arrival(name: str) -> None:
    assert turn(name, queue(*((key, 10, 10) for key in "ABCDE"))) == "ABCDE"


def test_fcfs() -> None:
    assert turn("fcfs", queue(("A", 1000, 1), ("B", 10, 9, {"priority": -1}), ("C", 10, 9))) == "ABC"


def test_lpm_with_and_without_aging() -> None:
    waiting = queue(("C", 10, 1), ("H", 10, 1), ("I", 10, 1))
    hits = {"H": 115, "I": 60}
    assert turn("lpm", waiting, Look(hits)) == "HIC"
    for waited, expected in ((1, "HIC"), (3, "HCI"), (4, "HCI"), (5, "CHI")):  # 23 tokens a pass: level with 115 at the fifth
        assert turn("lpm", waiting, Look(hits, passes={"C": waited}, aging_tokens=23)) == expected


def test_dfs_weight_uses_up_the_heaviest_branch_first() -> None:
    """A, B and C share two cached tokens, of which B and C go on together; P has a branch of its own; U has none cached."""
    prompts = {"U": [9, 9], "P": [2, 2, 9], "A": [1, 1, 9], "B": [1, 1, 3, 3, 9], "C": [1, 1, 3, 3, 8]}
    waiting = [Live(key, Request(key, prompt, 1), 1, at + 1, 1, None) for at, (key, prompt) in enumerate(prompts.items())]
    assert turn("dfs-weight", waiting, Look({"P": 2, "A": 2, "B": 4, "C": 4})) == "BCAPU"
    assert turn("dfs-weight", waiting, Look({"P": 2, "A": 1, "B": 1, "C": 1})) == "ABCPU"


def test_a_rank_from_a_match_that_was_evicted_waits_its_real_turn() -> None:
    waiting = queue(("A", 100, 1), ("B", 100, 1), ("C", 100, 1), ("D", 100, 1))
    assert turn("lpm", waiting, Look({"A": 10, "B": 40, "C": 30}, stale={"A": 50, "B": 60, "C": 30})) == "BCAD"
    assert turn("sjf", waiting, Look({"A": 10, "B": 40, "C": 30}, stale={"A": 50, "B": 60, "C": 30})) == "BCAD"


def test_lof() -> None:
    assert turn("lof", queue(("A", 5, 10), ("B", 5, 30), ("C", 5, 20), ("D", 5, 30))) == "BDCA"


def test_priority() -> None:
    assert turn("priority", queue(("A", 5, 1, {"priority": 1}), ("B", 5, 1, {"priority": -2}), ("C", 5, 1), ("D", 5, 1, {"priority": -2}))) == "BDCA"


def test_sjf_counts_what_is_left_to_compute_and_bounds_skips() -> None:
    waiting = queue(("L", 100, 1), ("M", 30, 1), ("S", 20, 1), ("H", 90, 1))
    assert turn("sjf", waiting, Look({"H": 85})) == "HSML"
    waiting[0].skips = 1
    assert turn("sjf", waiting, Look({"H": 85})) == "HSML"
    waiting[0].skips = 2
    assert turn("sjf", waiting, Look({"H": 85})) == "LHSM"


def test_fair_takes_the_tenant_that_was_served_least_for_its_weight() -> None:
    """Costs count at once: A's first of 10 puts A level with B; then by arrival."""
    def by(tenant: str) -> dict[str, object]:
        return {"tenant": tenant}

    waiting = queue(("1", 10, 1, by("a")), ("2", 10, 1, by("a")), ("3", 10, 1, by("b")), ("4", 10, 1, by("b")), ("5", 10, 1, by("c")))
    assert turn("fair", waiting) == "13524"
    assert turn("fair", waiting, Look(shares={"a": 100.0})) == "35412"
    assert turn("fair", waiting, Look(weights={"a": 4.0})) == "13524"
    assert turn("fair", waiting, Look(shares={"b": 4.0, "c": 4.0}, weights={"a": 4.0})) == "12354"


def test_what_a_tenant_was_served_is_taken_back_exactly() -> None:
    """48 tokens at a weight of 3 are 16, and in floats (16 + 1 / 3) - 1 / 3 is something else."""
    shares = Shares({"a": 3.0})
    shares.charge("a", 48)
    before = shares.served("a")
    assert before + 1 / 3 - 1 / 3 != before
    shares.charge("a", 1)
    shares.take_back("a", 1)
    assert shares.served("a") == before == 16


def test_a_tenant_that_had_no_work_cannot_save_up() -> None:
    shares = Shares({"b": 2.0})
    shares.charge("b", 11)
    shares.charge("c", 9)
    shares.lift("a", ["b", "c"])
    assert shares.served("a") == 5.5
    shares.charge("a", 2)
    shares.lift("a", ["b", "c"])
    assert shares.served("a") == 7.5
    shares.lift("a", [])
    assert shares.served("a") == 7.5
    shares.take_back("a", 5)  # charged before it was lifted
    assert shares.served("a") == 5.5
    shares.forget(["b"])
    assert shares.served("a") == 5.5  # few names: nobody is forgotten yet
    shares.forget([])
    assert [shares.served(tenant) for tenant in "abc"] == [0.0, 0.0, 0.0]
    shares.take_back("a", 5)
    assert shares.served("a") == 0.0
