"""Memory as named line items, each once, against a budget (law G7).

What lives here: items, their sum, the count check, and what is wrong when a sum is right and an item is not. What does not:
reading a device (`kvsched_kernels.meter`), and what an item ought to be.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import MIB, gib
from kvsched.sizing.checks import at_least

COUNT_TOLERANCE = 3 * MIB
"""Items print to 0.001 GiB, so that six of them and a rest can be off by 3 MiB together (law G7)."""


class Provenance(enum.Enum):
    """Where a figure comes from."""

    CONFIGURED = "configured"  # somebody set it
    MEASURED = "measured"  # read from a device, or printed by a boot
    DERIVED = "derived"  # worked out of other figures


@attrs.frozen
class Item:
    """One line: its name, its size in bytes, where the figure comes from, and how it came about where that needs saying."""

    name: str
    bytes: int = attrs.field(validator=at_least(0))
    provenance: Provenance
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """The same as plain data."""
        return {"name": self.name, "bytes": self.bytes, "provenance": self.provenance.value, "note": self.note}


class CountMismatch(ConfigError):
    """What is left by the items and what is left by another reading differ. rest, found: both in bytes."""

    def __init__(self, message: str, *, rest: int, found: int) -> None:
        super().__init__(message)
        self.rest, self.found = rest, found


class Overbooked(ConfigError):
    """The items come to more than the budget. largest: the item that takes most."""

    def __init__(self, message: str, largest: Item) -> None:
        super().__init__(message)
        self.largest = largest


@attrs.frozen
class Account:
    """The items of one device and what they leave of its budget.

    Raises `ConfigError` for a name that comes twice: what was reserved under one name must not be reserved again.
    """

    budget: int = attrs.field(validator=at_least(0))
    items: tuple[Item, ...] = ()
    where: str = ""

    def __attrs_post_init__(self) -> None:
        names = [item.name for item in self.items]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{self._place}{', '.join(twice)} is booked twice: every item counts once")

    @property
    def _place(self) -> str:
        return f"{self.where}: " if self.where else ""

    @property
    def booked(self) -> int:
        """Sum of the items, in bytes."""
        return sum(item.bytes for item in self.items)

    @property
    def rest(self) -> int:
        """Budget less all items, in bytes; below 0 where they come to more."""
        return self.budget - self.booked

    def largest(self) -> Item:
        """The item that takes most; of several, the first."""
        return max(self.items, key=lambda item: item.bytes)

    def check(self) -> None:
        """Raise `Overbooked` where the items come to more than the budget, naming the largest."""
        if self.rest >= 0:
            return
        largest = self.largest()
        raise Overbooked(
            f"{self._place}the items come to {gib(self.booked)} GiB of {gib(self.budget)}, {gib(-self.rest)} too much; the largest is "
            f"{largest.name} with {gib(largest.bytes)} GiB ({largest.provenance.value})", largest)

    def check_count(self, found: int, tolerance: int = COUNT_TOLERANCE) -> None:
        """Raise `CountMismatch` unless what is left by another reading is what the items leave, within `tolerance` bytes."""
        if abs(self.rest - found) > tolerance:
            listed = ", ".join(f"{item.name} {gib(item.bytes)}" for item in self.items)
            raise CountMismatch(
                f"{self._place}rest is {gib(self.rest)} GiB by the items and {gib(found)} as found, {(self.rest - found) / MIB:+.1f} MiB, "
                f"where {tolerance / MIB:.1f} are allowed; the items are {listed}", rest=self.rest, found=found)


@attrs.frozen
class Misbooked:
    """An item of one rank that holds less than its share. booked, expected: bytes."""

    rank: int
    name: str
    booked: int
    expected: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.name} is booked with {gib(self.booked)} GiB, and its share is about {gib(self.expected)}"


def misbooked_weights(booked: Sequence[int], checkpoint: int, shares: Sequence[int]) -> tuple[Misbooked, ...]:
    """Ranks whose weights are booked too low to be true: all of them together hold less than the checkpoint (law G7).

    booked: bytes of weights by rank, as one layout books them. checkpoint: bytes that must stand on some rank. shares: by which
    it is split, layers of each rank, say. Every weight stands on at least one rank, so a sum below the checkpoint is wrong whatever
    the split; the ranks below their share are then named. A sum that reaches it shows nothing, and nothing is flagged.

    >>> [one.rank for one in misbooked_weights((5, 2, 3), 28, (2, 1, 1))], misbooked_weights((14, 7, 8), 28, (2, 1, 1))
    ([0, 1, 2], ())
    """
    if len(booked) != len(shares):
        raise ConfigError(f"shares must be as many as ranks, {len(booked)}, not {len(shares)}")
    if sum(booked) >= checkpoint:
        return ()
    expected = [checkpoint * share // sum(shares) for share in shares]
    return tuple(Misbooked(rank, "weights", have, due) for rank, (have, due) in enumerate(zip(booked, expected, strict=True)) if have < due)


@attrs.frozen
class Gain:
    """By how much the rest of one layout exceeds that of another, by item. real: without the items that are in doubt."""

    total: int
    by_item: Mapping[str, int]
    doubtful: tuple[str, ...]

    @property
    def real(self) -> int:
        """What is left of the gain when the doubtful items are left out, in bytes."""
        return self.total - sum(self.by_item.get(name, 0) for name in self.doubtful)


def gain(before: Sequence[Account], after: Sequence[Account], doubtful: Sequence[str] = ()) -> Gain:
    """What the ranks of one layout have left beyond those of another, and which items it comes from.

    doubtful: items that a check has flagged (`misbooked_weights`): a gain that rests on them is no gain yet.
    """
    def sums(accounts: Sequence[Account]) -> dict[str, int]:
        out: dict[str, int] = {}
        for account in accounts:
            for item in account.items:
                out[item.name] = out.get(item.name, 0) + item.bytes
        return out

    old, new = sums(before), sums(after)
    by_item = {name: old.get(name, 0) - new.get(name, 0) for name in dict.fromkeys((*old, *new))}
    total = sum(account.rest for account in after) - sum(account.rest for account in before)
    return Gain(total, {name: size for name, size in by_item.items() if size}, tuple(doubtful))
