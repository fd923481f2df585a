"""A plan as tensors: which tokens, at which positions, into which slots, over which pages.

What lives here: `Batch`, the tensors of one step, and `BatchBuilder`, which keeps a copy of the block table and the last
token of each row, and makes a batch of a plan with numpy alone: no Python runs per decode. What does not: attention.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvsched.plan import Plan
from kvsched_kernels.errors import KernelError, at_least_one

ALIGN = 32
"""Each array of a pack starts at a multiple of this many elements: 128 bytes of int32, a cache line of a GPU."""


@attrs.frozen(eq=False)
class Batch:
    """The tensors of one step: n rows, T tokens. Views of buffers that the builder uses again two builds later.

    plan: what it was made of. rows, tokens: n and T. decodes: leading rows that compute exactly one token each.
    sampling: int64[m] host array, which of the n rows sample a token. starts: int64[n] host array, position of the first token
    of each row: the plan's, less the drafts in flight that were rejected. max_q, max_kv: most tokens computed, and attended to, by one row.
    Host, int32: qo_indptr_host[n + 1], kv_indptr_host[n + 1], kv_len_host[n], last_page_len_host[n].
    Device, int32: the same four without the suffix; kv_indices[kv_indptr[n]], page ids of all rows one after another;
    batch_indices[T], the row of each token. Device, int64: positions[T]; slots[T] = page x page_size + offset; token_ids[T];
    last[m], where in T the last token of each sampling row is; table_rows[n].
    """

    plan: Plan
    rows: int
    tokens: int
    decodes: int
    sampling: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    max_q: int
    max_kv: int
    qo_indptr_host: npt.NDArray[np.int32]
    kv_indptr_host: npt.NDArray[np.int32]
    kv_len_host: npt.NDArray[np.int32]
    last_page_len_host: npt.NDArray[np.int32]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    token_ids: torch.Tensor
    last: torch.Tensor
    table_rows: torch.Tensor


class _Pack:
    """Arrays of one type, one after another in one host buffer and its device twin, so that one copy moves them all."""

    __slots__ = ("device", "host", "memory", "twin", "used")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.memory = torch.zeros(0, dtype=dtype)
        self.twin = self.memory
        self.host: npt.NDArray[Any] = self.memory.numpy()
        self.used = 0

    def reset(self, wanted: int) -> None:
        """Start anew with room for `wanted` elements."""
        self.used = 0
        if wanted > len(self.memory):
            dtype, on_host = self.memory.dtype, self.device.type == "cpu"
            self.memory = torch.zeros(2 * wanted, dtype=dtype, pin_memory=not on_host)
            self.twin = self.memory if on_host else torch.zeros(2 * wanted, dtype=dtype, device=self.device)
            self.host = self.memory.numpy()

    def take(self, size: int) -> tuple[npt.NDArray[Any], torch.Tensor]:
        """The next array of `size` elements: on the host, and its twin, which `send` fills."""
        start = self.used
        self.used = start + -(-size // ALIGN) * ALIGN
        return self.host[start : start + size], self.twin[start : start + size]

    def send(self) -> None:
        """Copy what was written to the device."""
        if self.twin is not self.memory:
            self.twin[: self.used].copy_(self.memory[: self.used], non_blocking=True)


@attrs.frozen(eq=False)
class _Note:
    """What `note` replaced: rows of the table, and the last tokens and their positions that stood there."""

    plan: Plan
    rows: npt.NDArray[np.int64]
    on_device: torch.Tensor
    last: torch.Tensor
    following: npt.NDArray[np.int64]


class BatchBuilder:
    """Makes batches of plans. It must see every plan of a scheduler once, in order, empty ones included (`apply`).

    page_size: tokens per page, the scheduler's. device: where the tensors go.

    It holds a copy of the block table, which the plans' deltas keep true, and the last token of each row and its position, which `note`
    keeps: the input of the row's next decode. All grow as rows and columns appear. Plans run in the order in which they were made, and
    one that ran and is rolled back is told to `take_back`. Cost of `build`: numpy over rows, tokens and pages of the step; Python for each
    chunk of prefill.
    """

    def __init__(self, *, page_size: int, device: torch.device | str = "cpu") -> None:
        at_least_one(page_size=page_size)
        self.page_size = page_size
        self.device = torch.device(device)
        self._table = np.zeros((16, 16), np.int32)
        self._last = torch.zeros(16, dtype=torch.int64, device=self.device)
        self._next = np.zeros(16, np.int64)  # position of the last token; looked at where there are drafts
        self._drafting = False
        self._noted: deque[_Note] = deque(maxlen=2)
        self._packs = [(_Pack(torch.int32, self.device), _Pack(torch.int64, self.device)) for _ in range(2)]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The copy of the block table, int32 [rows, columns]; 0 where nothing was written yet."""
        return self._table

    def apply(self, plan: Plan) -> None:
        """Take in a plan's deltas: all that an empty plan needs. `build` does it for the others."""
        deltas = plan.deltas
        if len(deltas) == 0:
            return
        rows, columns = self._table.shape
        height, width = int(deltas.row.max()) + 1, int(deltas.column.max()) + 1
        if height > rows or width > columns:
            grown = np.zeros((max(rows, 2 * height), max(columns, 2 * width)), np.int32)
            grown[:rows, :columns] = self._table
            self._table = grown
        if height > len(self._last):
            last = torch.zeros(2 * height, dtype=torch.int64, device=self.device)
            last[: len(self._last)] = self._last
            self._last = last
            self._next = np.concatenate((self._next, np.zeros(2 * height - len(self._next), np.int64)))
        self._table[deltas.row, deltas.column] = deltas.page

    def build(self, plan: Plan, drafts: npt.NDArray[np.integer[Any]] | None = None) -> Batch:
        """The tensors of a plan with rows.

        drafts: int [decodes, lookahead], guesses that follow each decode's last token; needed where a decode computes more
        than one token. Raises `KernelError` for an empty plan, and for drafts that are missing or too narrow.
        """
        n = len(plan)
        if n == 0:
            raise KernelError(f"plan {plan.step} has no rows ({plan.status.value}); apply() takes in its deltas")
        counts = plan.counts
        wide = int(counts[: plan.decodes].max()) if plan.decodes else 1
        if wide > 1 and (drafts is None or drafts.ndim != 2 or len(drafts) != plan.decodes or drafts.shape[1] < wide - 1):
            given = "none" if drafts is None else f"an array of shape {drafts.shape}"
            raise KernelError(f"drafts must be integers [{plan.decodes}, at least {wide - 1}] for plan {plan.step}, not {given}")
        self.apply(plan)
        self._drafting |= wide > 1
        starts = plan.starts
        if self._drafting:  # the plan assumed that every draft in flight is taken
            starts = starts.copy()
            starts[: plan.decodes] = self._next[plan.rows[: plan.decodes]]
        ends = starts + counts
        self._next[plan.rows[plan.decodes :]] = ends[plan.decodes :]  # also where the step fails and nothing is noted
        columns = -(-ends // self.page_size)
        tokens, pages = int(counts.sum()), int(columns.sum())
        turn = self._turn = 1 - self._turn
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()  # the buffers of two steps ago have left for the device
        small, large = self._packs[turn]
        small.reset(pages + tokens + 4 * n + 2 + 6 * ALIGN)
        large.reset(3 * tokens + 2 * n + 5 * ALIGN)

        qo_host, qo = small.take(n + 1)
        kv_host, kv = small.take(n + 1)
        length_host, length = small.take(n)
        tail_host, tail = small.take(n)
        indices_host, indices = small.take(pages)
        owner_host, owner = small.take(tokens)
        qo_host[0] = kv_host[0] = 0
        np.cumsum(counts, out=qo_host[1:])
        np.cumsum(columns, out=kv_host[1:])
        length_host[:] = ends
        tail_host[:] = ends - (columns - 1) * self.page_size
        within = np.arange(pages) - np.repeat(kv_host[:-1], columns)
        indices_host[:] = self._table[np.repeat(plan.rows, columns), within]
        owner_host[:] = np.repeat(np.arange(n, dtype=np.int32), counts)

        place_host, place = large.take(tokens)
        slot_host, slot = large.take(tokens)
        id_host, ids = large.take(tokens)
        rows_host, rows = large.take(n)
        place_host[:] = np.arange(tokens) - np.repeat(qo_host[:-1] - starts, counts)
        slot_host[:] = self._table[np.repeat(plan.rows, counts), place_host // self.page_size]
        slot_host *= self.page_size
        slot_host += place_host % self.page_size
        rows_host[:] = plan.rows
        at = int(qo_host[plan.decodes])
        if wide > 1 and drafts is not None:
            for column in range(wide - 1):
                has = counts[: plan.decodes] > column + 1
                id_host[qo_host[: plan.decodes][has] + column + 1] = drafts[has, column]
        for chunk in plan.prefill:
            id_host[at : at + chunk.length] = chunk.tokens
            at += chunk.length
        sampling = np.arange(n)
        if plan.prefill:
            sampling = sampling[np.array([True] * plan.decodes + [chunk.last for chunk in plan.prefill])]
        last_host, last = large.take(len(sampling))
        last_host[:] = qo_host[1:][sampling] - 1

        small.send()
        large.send()
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves the constructor unannotated
            event.record()
            self._sent[turn] = event
        if plan.decodes:
            first = slice(0, plan.decodes) if wide == 1 else qo[: plan.decodes].long()
            ids[first] = self._last[rows[: plan.decodes]]
        return Batch(
            plan=plan, rows=n, tokens=tokens, decodes=plan.decodes if wide == 1 else 0, sampling=sampling, starts=starts,
            max_q=int(counts.max()), max_kv=int(ends.max()), qo_indptr_host=qo_host, kv_indptr_host=kv_host,
            kv_len_host=length_host, last_page_len_host=tail_host, qo_indptr=qo, kv_indptr=kv, kv_len=length,
            last_page_len=tail, kv_indices=indices, batch_indices=owner, positions=place, slots=slot, token_ids=ids,
            last=last, table_rows=rows,
        )

    def note(self, batch: Batch, tokens: torch.Tensor, accepted: npt.NDArray[np.integer[Any]] | None = None) -> None:
        """Keep the newest token, int64 [m], of each sampling row of the batch: what its next decode starts from.

        accepted: integers [m], drafts taken besides it; None for none. Call it before the next batch is built.
        """
        plan, which = batch.plan, batch.sampling
        rows = plan.rows[which]
        on_device = batch.table_rows if len(which) == batch.rows else batch.table_rows[torch.from_numpy(which).to(self.device)]
        self._noted.append(_Note(plan, rows, on_device.clone(), self._last[on_device], self._next[rows]))
        self._last[on_device] = tokens
        after = batch.starts[which] + np.where(which < plan.decodes, 1, plan.counts[which])
        self._next[rows] = after if accepted is None else after + np.where(which < plan.decodes, accepted, 0)

    def take_back(self, plan: Plan) -> None:
        """A plan was rolled back, the newest first: forget what `note` kept of it. Nothing happens for one that was not noted.

        The block table needs no such care: the scheduler tells in its next deltas what it wants to be otherwise.
        Raises `KernelError` where a newer plan was noted and is still there.
        """
        if not any(note.plan is plan for note in self._noted):
            return
        if self._noted[-1].plan is not plan:
            raise KernelError(f"plan {plan.step} is not the newest that was noted; that is plan {self._noted[-1].plan.step}")
        note = self._noted.pop()
        self._last[note.on_device] = note.last
        self._next[note.rows] = note.following
