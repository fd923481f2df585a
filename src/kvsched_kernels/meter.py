"""A memory meter: what a device's memory went to, as named line items that are each booked once (law G7).

What lives here: the items, how they are read, their sum against the budget, and the count check. What does not: how large a
pool should be. The meter counts what is there; nothing here predicts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.amounts import MIB, gib
from kvsched_kernels.errors import KernelError

ITEMS = ("weights", "holdback", "state", "speculative", "activation", "kv", "workspace", "graphs")
"""The line items of a server, in the order they are printed. weights: the model. holdback: set aside on purpose, for other
programs and for fragmentation. state: recurrent state. speculative: what drafts need. activation: the peak of a forward
pass. kv: pages. workspace: what kernels were given. graphs: what captured graphs keep."""

REST = "rest"
"""Budget less everything booked. It follows from the others, so nobody books it."""

COUNT_TOLERANCE = 3 * MIB
"""Law G7: items print to 0.001 GiB, so six of them can be off by 3 MiB together."""


class DoubleBooking(KernelError):
    """An item was to be booked that is booked already, or that would be counted inside another."""


class Overbooked(KernelError):
    """The items come to more than the budget. largest: the item that takes most."""

    def __init__(self, message: str, largest: Item) -> None:
        super().__init__(message)
        self.largest = largest


class CountMismatch(KernelError):
    """What is left and what should be left differ. rest: by the items. found: by another reading. Both in bytes."""

    def __init__(self, message: str, *, rest: int, found: int) -> None:
        super().__init__(message)
        self.rest, self.found = rest, found


def _check(name: Any, size: Any, provenance: Any) -> None:
    """Raise `KernelError` for what is no line item."""
    if not isinstance(name, str) or not name.strip():
        raise KernelError(f"name must be a word, not {name!r}")
    whole_bytes("bytes", size)
    if not isinstance(provenance, Provenance):
        raise KernelError(f"provenance must be one of {', '.join(map(str, Provenance))}, not {provenance!r}")


def whole_bytes(name: str, value: Any) -> None:
    """Raise `KernelError` unless `value` is a count of bytes: an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise KernelError(f"{name} must be an integer of at least 0, in bytes, not {value!r}")


@attrs.frozen
class Doubt:
    """An item whose figure is far from what an independent reckoning gives."""

    name: str
    booked: int
    expected: int


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of memory behind these tensors. Tensors that share memory (tied embeddings, views) count it once, and whole."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


class Measuring:
    """What `MemoryMeter.measure` hands to its block."""

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, *tensors: torch.Tensor) -> None:
        """Name tensors that belong to the item: its size on the CPU. On CUDA the device is read, and this changes nothing."""
        self.tensors.extend(tensors)


class MemoryMeter:
    """The account of one device.

    budget: bytes that the server may use, all items together. device: whose memory is read by `measure`. names: items that may
    be booked, in the order they are printed; a host adds its own, and a name that is not among them is refused, so that
    a slip does not book the same thing under two names. One thread.

    >>> meter = MemoryMeter(8 << 30)
    >>> meter.book("weights", 5 << 30, Provenance.CONFIGURED).bytes
    5368709120
    >>> with meter.measure("kv") as kv:
    ...     kv.add(torch.zeros(256, 1024, 1024))
    >>> print(meter.report())
    weights            5.000 GiB  configured
    kv                 1.000 GiB  measured
    rest               2.000 GiB  derived
    budget             8.000 GiB
    not booked: holdback, state, speculative, activation, workspace, graphs
    """

    def __init__(self, budget: int, *, device: torch.device | str = "cpu", names: Sequence[str] = ITEMS) -> None:
        whole_bytes("budget", budget)
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice or REST in names:
            raise KernelError(f"names must be distinct and without {REST!r}, which follows from the others: {twice or [REST]}")
        self.budget = budget
        self.device = torch.device(device)
        self.names = tuple(names)
        self._items: dict[str, Item] = {}
        self._measuring: str | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """What is booked, in the order of `names`."""
        return tuple(self._items[name] for name in self.names if name in self._items)

    @property
    def booked(self) -> int:
        """Sum of all items, in bytes."""
        return sum(item.bytes for item in self._items.values())

    @property
    def rest(self) -> int:
        """Budget less everything booked, in bytes. Below 0 where the items come to more: `check` says which is largest."""
        return self.budget - self.booked

    def book(self, name: str, size: int, provenance: Provenance) -> Item:
        """Put down an item whose size is known, in bytes.

        Raises `DoubleBooking` for one that is booked or being measured, `KernelError` for a name that is not among
        `names` or a size that is none. Changes nothing then.
        """
        _check(name, size, provenance)
        item = Item(name, size, provenance)
        self._check_free(name)
        self._items[name] = item
        return item

    @contextlib.contextmanager
    def measure(self, name: str, *, peak: bool = False) -> Iterator[Measuring]:
        """Book what the block takes, as measured.

        On CUDA: by how much the device's free memory fell over the block, which counts what libraries take beside torch, and
        what other programs take meanwhile. peak: instead, the most that torch's tensors took at once beyond what was there
        before: for what a forward pass needs and gives back. On the CPU: the bytes of the tensors named with `add`.
        A block that raises books nothing. Raises `DoubleBooking` as `book` does, and for one measurement inside another,
        whose memory would count twice; `KernelError` where nothing was named on the CPU, or the device had more free memory
        afterwards.
        """
        self._check_free(name)
        if self._measuring is not None:
            raise DoubleBooking(f"{name} cannot be measured inside {self._measuring}: its memory would count in both")
        self._measuring = name
        try:
            found = Measuring()
            before = self._read(peak=peak, start=True)
            yield found
            size = self._read(peak=peak, start=False) - before if self.device.type == "cuda" else self._named(name, found)
        finally:
            self._measuring = None
        if size < 0:
            raise KernelError(f"{name}: the device has {gib(-size)} GiB more free memory than before; something gave it back")
        self.book(name, size, Provenance.MEASURED)

    def check(self) -> None:
        """Raise `Overbooked` where the items come to more than the budget, naming the largest."""
        if self.rest >= 0:
            return
        largest = max(self.items, key=lambda item: item.bytes)
        raise Overbooked(
            f"{REST} is {gib(self.rest)} GiB: the items come to {gib(self.booked)} of {gib(self.budget)} GiB, and the largest is "
            f"{largest.name} with {gib(largest.bytes)} GiB ({largest.provenance.value})", largest)

    def check_count(self, found: int, *, tolerance: int = COUNT_TOLERANCE) -> None:
        """Raise `CountMismatch` unless what is left by another reading is what the items leave, within `tolerance` bytes.

        found: bytes left, read without the items: the device's free memory less what lies outside of the budget, or a figure
        that a host prints. A difference means that something is booked twice, or not at all.
        """
        if abs(self.rest - found) > tolerance:
            items = ", ".join(f"{item.name} {gib(item.bytes)}" for item in self.items)
            raise CountMismatch(
                f"{REST} is {gib(self.rest)} GiB by the items and {gib(found)} GiB as found: {(self.rest - found) / MIB:+.1f} "
                f"MiB, where {tolerance / MIB:.1f} are allowed; the items are {items}", rest=self.rest, found=found)

    def doubtful(self, expected: Mapping[str, int], *, within: float) -> tuple[Doubt, ...]:
        """Items further than a share `within` from what an independent reckoning expects, in the order of `names`.

        expected: name to bytes, for items that are booked: a checkpoint's size split over ranks, say. A sum can be right
        though two of its items are wrong (law G7), so a gain that rests on a doubtful item is no gain yet.
        """
        absent = [name for name in expected if name not in self._items]
        if absent:
            raise KernelError(f"expected must name items that are booked: {absent} are not")
        return tuple(Doubt(item.name, item.bytes, expected[item.name]) for item in self.items
                     if item.name in expected and abs(item.bytes - expected[item.name]) > within * expected[item.name])

    def report(self) -> str:
        """The items, the rest and the budget, one a line, in GiB to three places; and what is not booked."""
        lines = [f"{item.name:<16} {gib(item.bytes):>7} GiB  {item.provenance.value}" for item in self.items]
        lines.append(f"{REST:<16} {gib(self.rest):>7} GiB  {Provenance.DERIVED.value}")
        lines.append(f"{'budget':<16} {gib(self.budget):>7} GiB")
        absent = [name for name in self.names if name not in self._items]
        if absent:
            lines.append(f"not booked: {', '.join(absent)}")
        if self.rest < 0:
            lines.append(f"overbooked: the largest item is {max(self.items, key=lambda item: item.bytes).name}")
        return "\n".join(lines)

    def _check_free(self, name: str) -> None:
        if name not in self.names:
            raise KernelError(f"{name!r} is no item of this meter, which has {', '.join(self.names)}")
        if name in self._items:
            item = self._items[name]
            raise DoubleBooking(f"{name} is booked already, with {gib(item.bytes)} GiB ({item.provenance.value})")
        if name == self._measuring:
            raise DoubleBooking(f"{name} is being measured, which books it")

    def _named(self, name: str, found: Measuring) -> int:
        if not found.tensors:
            raise KernelError(
                f"{name}: no tensor was named with add(), and the memory of the CPU is not read; book() takes a figure")
        return tensor_bytes(*found.tensors)

    def _read(self, *, peak: bool, start: bool) -> int:
        """Bytes in use on the device: of all programs, or at torch's peak. 0 on the CPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        if peak:
            if start:
                torch.cuda.reset_peak_memory_stats(self.device)
                return torch.cuda.memory_allocated(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()  # what torch keeps of freed tensors is nobody's item
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)
