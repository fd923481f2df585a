"""A step's result held against its plan: what does not fit raises `InvalidResult` and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvsched.errors import InvalidResult
from kvsched.inflight import InFlight
from kvsched.plan import StepResult
from kvsched.units import NO_INTS, Ints

BYTES = 4
"""Bytes of the smallest integer type that holds every token id."""


@attrs.define(eq=False)
class Checked:
    """A result that fits its plan."""

    tokens: npt.NDArray[np.signedinteger[Any]]
    accepted: Ints | None
    finished: Ints
    failed: Ints
    final: Ints


def check_result(record: InFlight, result: StepResult) -> Checked:
    """Hold a result against its plan. O(rows). Raises `InvalidResult` naming the field and what was allowed."""
    if not isinstance(result, StepResult):
        raise InvalidResult(f"commit takes a StepResult, not {type(result).__name__}")
    count = len(record.plan.rows)
    tokens = result.tokens if isinstance(result.tokens, np.ndarray) else _array(result.tokens if result.tokens is not None else [], "tokens")
    if not tokens.size and tokens.dtype.kind == "f":
        tokens = tokens.astype(np.int64)
    width = 1 if record.decode_widths is None else int(record.decode_widths.max())
    kind = tokens.dtype.kind
    if kind not in "iu":
        raise InvalidResult(f"tokens must be integers, not {tokens.dtype}")
    if kind == "u" or tokens.dtype.itemsize < BYTES:
        tokens = tokens.astype(np.int64)  # -1 marks what is not delivered, so the type must have one
    if not (tokens.shape == (count,) or (tokens.ndim == 2 and tokens.shape[0] == count and tokens.shape[1] >= width)):
        allowed = f"({count},) or ({count}, at least {width})"
        raise InvalidResult(f"tokens must have the shape {allowed}, one row per row of the plan, not {tokens.shape}")
    accepted = None
    if result.accepted is not None:
        accepted = _array(result.accepted, "accepted")
        if accepted.shape != (count,) or (count and accepted.dtype.kind not in "iu"):
            raise InvalidResult(f"accepted must hold {count} integers, not {result.accepted!r}")
        most = np.zeros(count, dtype=np.int64)
        if record.decode_widths is not None:
            most[: record.plan.decodes] = record.decode_widths - 1
        if record.blocks is not None:
            most[: record.plan.decodes][record.blocks] = 0
        bad = ((accepted < 0) | (accepted > most)).nonzero()[0]
        if len(bad):
            at = int(bad[0])
            raise InvalidResult(f"accepted[{at}] must be from 0 to {int(most[at])}, the drafts of that row, not {int(accepted[at])}")
        if tokens.ndim == 1 and accepted.any():
            raise InvalidResult("tokens must have two dimensions when drafts were accepted")
    finished = _positions(result.finished, "finished", count)
    failed = _positions(result.failed, "failed", count)
    final = _positions(result.final, "final", count)
    if len(final):
        blocks = set() if record.blocks is None else set(record.blocks.nonzero()[0].tolist())
        for at in final.tolist():
            if at not in blocks:
                raise InvalidResult(f"final names position {at}, which is no block row")
        if tokens.ndim == 1 and width > 1:
            raise InvalidResult("tokens must have two dimensions when a block is final")
    _check_ids(record, tokens, failed)
    return Checked(tokens, accepted, finished, failed, final)


def _array(value: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except Exception:  # noqa: BLE001  # whatever a foreign array raises
        raise InvalidResult(f"{name} must hold integers, one row for each row of the plan, not {value!r}") from None


def _check_ids(record: InFlight, tokens: npt.NDArray[np.signedinteger[Any]], failed: Ints) -> None:
    """Token ids that would be delivered must be ids. Rows that sample nothing may hold anything."""
    flat = tokens if tokens.ndim == 1 else tokens[:, 0]
    if not len(flat) or (int(flat.min()) >= 0 and (flat.dtype.itemsize == BYTES or int(flat.max()) < 2**31)):
        return
    silent = {record.plan.decodes + at for at, entry in enumerate(record.prefill) if not entry.chunk.last}
    silent.update(failed.tolist())
    if record.blocks is not None:
        silent.update(record.blocks.nonzero()[0].tolist())
    for at in ((flat < 0) | (flat >= 2**31)).nonzero()[0].tolist():
        if at not in silent:
            raise InvalidResult(f"tokens[{at}] must be a token id of at least 0, not {int(flat[at])}")


def _positions(value: Sequence[int] | Ints | None, name: str, count: int) -> Ints:
    if value is None:
        return NO_INTS
    array = _array(value, name)
    if not array.size:
        return NO_INTS
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidResult(f"{name} must hold positions in the plan, not {value!r}")
    if int(array.min()) < 0 or int(array.max()) >= count:
        raise InvalidResult(f"{name} must hold positions from 0 to {count - 1}, not {value!r}")
    return array.astype(np.int64)
