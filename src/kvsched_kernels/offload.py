"""Copies of whole pages: to and from host memory, and from page to page on the device.

What lives here: `HostPages`, a buffer of pages on the host, and `copy_pages`, what a plan's `copies` ask for. What does
not: which page goes where and when (the host, and the scheduler's `Scheduler.hold_pages` while a copy is under way).
A page here is its keys and values of every layer. Bytes are moved as they are: what comes back is what left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvsched_kernels.errors import KernelError, at_least_one
from kvsched_kernels.store import PagedStore

PageIds = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Ids of pages, one dimension: what `hold_pages` gives, or a list."""


class Transfer:
    """A copy that may still be under way. Until it is done, nothing may write its sources or use its destinations elsewhere.

    Work that is queued later on the same stream comes after it by itself.
    """

    __slots__ = ("_event",)

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Whether the copy has ended. Does not wait."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when the copy has ended."""
        if self._event is not None:
            self._event.synchronize()


class HostPages:
    """Room for pages in host memory, one tensor [layers, 2, pages, page_size, kv_heads, head_dim]; index 1 of 2 is values.

    store: whose pages are kept; sizes and type are its own. pages: how many, ids 0 to pages - 1. The memory is pinned where
    the store is on a CUDA device, so that copies run beside the host, and taken here, once.

    >>> store = PagedStore(layers=2, pages=4, page_size=2, kv_heads=1, head_dim=3, dtype=torch.float32)
    >>> host = HostPages(store, pages=8)
    >>> host.copy_out([2], [5])  # page 2 of the device is now kept as page 5 of the host
    <kvsched_kernels.offload.Transfer object at ...>
    >>> host.copy_in([5], [0]).done
    True
    """

    def __init__(self, store: PagedStore, *, pages: int) -> None:
        at_least_one(pages=pages)
        self.store = store
        self.pages = pages
        self.pinned = store.device.type == "cuda"
        shape = (store.layers, 2, pages, store.page_size, store.kv_heads, store.head_dim)
        self.data = torch.zeros(shape, dtype=store.dtype, pin_memory=self.pinned)

    @property
    def bytes(self) -> int:
        """Bytes of the buffer."""
        return self.data.nbytes

    def copy_out(self, device_pages: PageIds, host_pages: PageIds, *, non_blocking: bool = False) -> Transfer:
        """Keep a copy of each device page as the host page at the same place of the other list.

        device_pages: ids of the store, its scratch page not among them. host_pages: as many ids of this buffer, none twice.
        non_blocking: return at once on a CUDA device, with the copy queued on the current stream; else when it has ended.
        Raises `KernelError` naming the ids that cannot be; nothing is copied then. Cost: per layer, one gather on the device
        for keys and one for values, and one transfer for each run of consecutive host pages.
        """
        sources, targets = self._checked(device_pages, host_pages, "device_pages", "host_pages", targets_on_host=True)
        order = np.argsort(targets, kind="stable")
        sources, targets = sources[order], targets[order]
        picked = _span(sources, self.store.device)
        for layer in range(self.store.layers):
            for side, pages in enumerate(self.store.layer(layer)):
                staged = pages[picked]
                for at, first, count in _runs(targets):
                    self.data[layer, side, first : first + count].copy_(staged[at : at + count], non_blocking=True)
        return self._transfer(non_blocking)

    def copy_in(self, host_pages: PageIds, device_pages: PageIds, *, non_blocking: bool = False) -> Transfer:
        """Bring back each host page as the device page at the same place of the other list: `copy_out` the other way round.

        device_pages: ids of the store, none twice; the host must own them, as it does with `hold_pages`. Everything else is
        as in `copy_out`: a gather on the device is a scatter here.
        """
        sources, targets = self._checked(host_pages, device_pages, "host_pages", "device_pages", targets_on_host=False)
        order = np.argsort(sources, kind="stable")
        sources, targets = sources[order], targets[order]
        picked = _span(targets, self.store.device)
        for layer in range(self.store.layers):
            for side, pages in enumerate(self.store.layer(layer)):
                direct = isinstance(picked, slice)
                staged = pages[picked] if direct else pages.new_empty((len(targets), *pages.shape[1:]))
                for at, first, count in _runs(sources):
                    staged[at : at + count].copy_(self.data[layer, side, first : first + count], non_blocking=True)
                if not direct:
                    pages[picked] = staged
        return self._transfer(non_blocking)

    def _checked(self, sources: PageIds, targets: PageIds, from_name: str, to_name: str, *,
                 targets_on_host: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        host = (self.pages, f"of the host buffer's {self.pages} pages")
        device = (self.store.pages, f"of the store's {self.store.pages} pages")
        from_limit, to_limit = (device, host) if targets_on_host else (host, device)
        first, second = _ids(from_name, sources, *from_limit), _ids(to_name, targets, *to_limit)
        if len(first) != len(second):
            raise KernelError(f"{from_name} and {to_name} must be of one length, not {len(first)} and {len(second)}")
        _once(to_name, second)
        return first, second

    def _transfer(self, non_blocking: bool) -> Transfer:
        """What was queued so far: every single copy was, and one wait is for all of them."""
        if self.store.device.type != "cuda":
            return Transfer()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves the constructor unannotated
        event.record()
        transfer = Transfer(event)
        if not non_blocking:
            transfer.wait()
        return transfer


def copy_pages(store: PagedStore, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages on the device, all at once: (source, destination) for each, as `kvsched.plan.Plan.copies` has them.

    Every source is read as it was before the first copy. So a destination may be a source too, in whatever order: (a, b),
    (b, a) exchanges two pages, and (a, b), (b, c) leaves in c what b held before. No destination may stand twice. Runs on
    the current stream; work queued there later sees the copies.
    Raises `KernelError` naming the ids that cannot be; nothing is copied then. Cost: per layer, a gather and a scatter for
    keys and for values, and room for the pages of one of them.
    """
    if any(len(pair) != 2 for pair in pairs):
        raise KernelError("pairs must be (source, destination) each")
    limit = (store.pages, f"of the store's {store.pages} pages")
    sources = _ids("sources", [source for source, _ in pairs], *limit)
    targets = _ids("destinations", [target for _, target in pairs], *limit)
    _once("destinations", targets)
    if not len(sources):
        return
    taken, put = (torch.from_numpy(ids).to(store.device) for ids in (sources, targets))
    for layer in range(store.layers):
        for pages in store.layer(layer):
            pages.index_copy_(0, put, pages.index_select(0, taken))  # the gather is whole before the first page is written


def _ids(name: str, values: PageIds, limit: int, whose: str) -> npt.NDArray[np.int64]:
    """The ids as an array of their own, each in its range."""
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise KernelError(f"{name} must be integers in one dimension, not {array.dtype} {list(array.shape)}")
    ids = array.astype(np.int64)
    outside = ids[(ids < 0) | (ids >= limit)]
    if len(outside):
        raise KernelError(f"{name} must be ids {whose}, 0 to {limit - 1}: {outside.tolist()} are not")
    return ids


def _once(name: str, ids: npt.NDArray[np.int64]) -> None:
    """Refuse destinations that stand twice: which copy would stay is nobody's choice."""
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise KernelError(f"{name} must not name a page twice: {values[counts > 1].tolist()}")


def _runs(ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive ids: where each starts in the list, its first id, and how many there are."""
    edges = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = [0, *edges.tolist()] if len(ids) else []
    for at, end in zip(starts, [*starts[1:], len(ids)], strict=False):
        yield at, int(ids[at]), end - at


def _span(ids: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """What to subscript a layer with: a slice where the ids are consecutive, which needs no staging, else an index."""
    if len(ids) and (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(ids).to(device)
