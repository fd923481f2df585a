"""Pages to the host and back, byte for byte, and copies on the device as one assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched import PagePool, Request, Scheduler, SchedulerConfig
from kvsched_kernels import KernelError, PagedStore
from kvsched_kernels.offload import HostPages, copy_pages

PAGES = 12
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")])


def filled(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PagedStore:
    """A store of random bits: not-a-numbers and subnormals among them."""
    store = PagedStore(layers=2, pages=PAGES, page_size=3, kv_heads=2, head_dim=5, dtype=dtype, device=device)
    random = torch.Generator().manual_seed(seed)
    for tensor in (*store.k, *store.v):
        bits = torch.randint(0, 256, (tensor.nbytes,), generator=random, dtype=torch.uint8)
        tensor.copy_(bits.view(dtype).view(tensor.shape))
    return store


def bits(store: PagedStore) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of every page, [pages + 1, bytes]: the scratch page is the last."""
    sides = [tensor.cpu().contiguous().view(torch.uint8).reshape(PAGES + 1, -1) for tensor in (*store.k, *store.v)]
    return torch.cat(sides, 1).numpy().copy()


def pages(most: int = PAGES) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, most - 1), unique=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_comes_back_is_what_left(device: str, dtype: torch.dtype) -> None:
    store = filled(device, dtype)
    host = HostPages(store, pages=20)
    before = bits(store)
    assert host.copy_out([3, 0, 7, 8], [19, 4, 5, 0]).done
    for tensor in (*store.k, *store.v):
        tensor.fill_(1.0)
    blank = bits(store)
    host.copy_in([0, 19, 5, 4], [8, 3, 7, 0]).wait()
    after = bits(store)
    for page in range(PAGES + 1):
        assert (after[page] == (before if page in {0, 3, 7, 8} else blank)[page]).all(), page


@settings(max_examples=40, deadline=None)
@given(out=pages(), back=pages(), places=st.permutations(range(PAGES)), seed=st.integers(0, 99))
def test_any_pages_to_any_places(out: list[int], back: list[int], places: list[int], seed: int) -> None:
    store = filled(seed=seed)
    host = HostPages(store, pages=PAGES)
    wanted = bits(store)
    kept = {place: wanted[page].copy() for place, page in zip(places, out, strict=False)}
    host.copy_out(out, places[: len(out)])
    assert (bits(store) == wanted).all()
    sources = list(kept)[: len(back)]
    for place, page in zip(sources, back, strict=False):
        wanted[page] = kept[place]
    host.copy_in(sources, back[: len(sources)])
    assert (bits(store) == wanted).all()


def test_the_buffer_is_laid_out_as_it_says() -> None:
    store = filled()
    host = HostPages(store, pages=4)
    assert (host.data.shape, host.data.dtype, host.pinned) == ((2, 2, 4, 3, 2, 5), torch.bfloat16, False)
    assert host.bytes == 2 * 2 * 4 * 3 * 2 * 5 * 2
    host.copy_out([6], [2])
    for layer in range(2):
        for side, tensor in enumerate(store.layer(layer)):
            assert torch.equal(host.data[layer, side, 2].view(torch.int16), tensor[6].view(torch.int16))
    assert not host.data[:, :, [0, 1, 3]].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_copy_that_does_not_wait_has_an_event() -> None:
    store = filled("cuda")
    host = HostPages(store, pages=PAGES)
    assert host.pinned
    wanted = bits(store)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch leaves the constructor unannotated
        transfer = host.copy_out(range(PAGES), range(PAGES)[::-1], non_blocking=True)
        transfer.wait()
        assert transfer.done
        for tensor in (*store.k, *store.v):
            tensor[:PAGES].zero_()
        host.copy_in(range(PAGES)[::-1], range(PAGES), non_blocking=True).wait()
    assert (bits(store) == wanted).all()


def test_held_pages_are_offloaded_as_the_scheduler_gives_them() -> None:
    """The ids of hold_pages are numpy int32; while the host holds them nobody else writes there."""
    scheduler = Scheduler(SchedulerConfig(page_size=3), PagePool(PAGES, 3))
    scheduler.submit(Request("r", [1, 2, 3, 4], max_new_tokens=2))
    store = filled()
    wanted = bits(store)
    host = HostPages(store, pages=8)
    held = scheduler.hold_pages("to the host", 3)
    host.copy_out(held, np.arange(3)).wait()
    for tensor in (*store.k, *store.v):
        tensor[torch.from_numpy(held.astype(np.int64))] = 0
    host.copy_in(np.arange(3), held).wait()
    assert (bits(store) == wanted).all()
    scheduler.release_pages("to the host")


def test_nothing_to_copy_is_nothing() -> None:
    store = filled()
    host, before = HostPages(store, pages=2), bits(store)
    host.copy_out([], [])
    host.copy_in([], [])
    copy_pages(store, ())
    assert (bits(store) == before).all()


@pytest.mark.parametrize(("device_pages", "host_pages", "message"), [
    ([0, 1], [0], "must be of one length, not"),
    ([PAGES], [0], r"device_pages must be ids of the store's 12 pages, 0 to 11: \[12\] are not"),
    ([-1], [0], r"device_pages must be ids of the store's 12 pages, 0 to 11: \[-1\] are not"),
    ([0, 1], [5, 4], r"host_pages must be ids of the host buffer's 4 pages, 0 to 3: \[5, 4\] are not"),
    ([0.5], [0], "device_pages must be integers in one dimension, not float64"),
    ([[0]], [0], r"device_pages must be integers in one dimension, not int64 \[1, 1\]"),
    ([True], [0], "device_pages must be integers in one dimension, not bool"),
])
def test_ids_that_cannot_be_are_named_and_nothing_is_copied(device_pages: Any, host_pages: Any, message: str) -> None:
    store = filled()
    host, before = HostPages(store, pages=4), bits(store)
    calls: list[Callable[[], Any]] = [lambda: host.copy_out(device_pages, host_pages), lambda: host.copy_in(host_pages, device_pages)]
    for call in calls:
        with pytest.raises(KernelError, match=message):
            call()
    assert (bits(store) == before).all()
    assert not host.data.any()


def test_a_destination_may_not_stand_twice_and_a_source_may() -> None:
    store = filled()
    host, before = HostPages(store, pages=4), bits(store)
    with pytest.raises(KernelError, match=r"host_pages must not name a page twice: \[1\]"):
        host.copy_out([2, 3, 4], [1, 1, 0])
    with pytest.raises(KernelError, match=r"device_pages must not name a page twice: \[7\]"):
        host.copy_in([0, 1], [7, 7])
    with pytest.raises(KernelError, match=r"destinations must not name a page twice: \[5\]"):
        copy_pages(store, [(1, 5), (2, 5)])
    assert (bits(store) == before).all()
    host.copy_out([2, 2], [0, 3])
    host.copy_in([0, 0], [5, 6])
    assert (bits(store)[[5, 6]] == before[2]).all()


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_the_size_of_the_buffer_is_checked(size: Any) -> None:
    with pytest.raises(KernelError, match="pages must be an integer of at least 1"):
        HostPages(filled(), pages=size)


# On the device: all sources are read before the first page is written.


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("pairs", "held"), [
    ([(1, 2)], {2: 1}),
    ([(1, 2), (2, 1)], {2: 1, 1: 2}),  # an exchange
    ([(1, 2), (2, 3)], {2: 1, 3: 2}),  # a chain, from the front ...
    ([(2, 3), (1, 2)], {2: 1, 3: 2}),  # ... and from the back: the order of the list does not count
    ([(1, 2), (1, 3), (4, 4)], {2: 1, 3: 1}),
    ([(0, 1), (1, 2), (2, 0)], {1: 0, 2: 1, 0: 2}),
])
def test_copies_on_the_device_are_one_assignment(device: str, pairs: list[tuple[int, int]], held: dict[int, int]) -> None:
    store = filled(device)
    before = bits(store)
    copy_pages(store, pairs)
    after = bits(store)
    for page in range(PAGES + 1):
        assert (after[page] == before[held.get(page, page)]).all(), page


@settings(max_examples=40, deadline=None)
@given(targets=pages(), data=st.data())
def test_any_copies_on_the_device(targets: list[int], data: st.DataObject) -> None:
    sources = data.draw(st.lists(st.integers(0, PAGES - 1), min_size=len(targets), max_size=len(targets)))
    store = filled()
    wanted = bits(store)
    wanted[targets] = wanted[sources]
    copy_pages(store, list(zip(sources, targets, strict=True)))
    assert (bits(store) == wanted).all()


@pytest.mark.parametrize(("pairs", "message"), [
    ([(PAGES, 0)], r"sources must be ids of the store's 12 pages, 0 to 11: \[12\] are not"),
    ([(0, PAGES)], r"destinations must be ids of the store's 12 pages, 0 to 11: \[12\] are not"),
    ([(0, 1, 2)], r"pairs must be \(source, destination\) each"),
    ([(0, 1.0)], "destinations must be integers in one dimension, not float64"),
])
def test_pairs_that_cannot_be_are_named(pairs: Any, message: str) -> None:
    store = filled()
    before = bits(store)
    with pytest.raises(KernelError, match=message):
        copy_pages(store, pairs)
    assert (bits(store) == before).all()
