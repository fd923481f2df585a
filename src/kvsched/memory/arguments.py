"""Checks of the arguments that pool and caches take.

What does not live here: whether a page is free or a handle alive; each class knows its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvsched.errors import ConfigError, InvalidRequest

LARGEST = np.iinfo(np.int32).max


def configured(name: str, value: Any, low: int) -> int:
    """An integer of at least `low`, from a configuration. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
    return int(value)


def count(n: Any) -> int:
    """A number of pages. Raises `InvalidRequest`."""
    if type(n) is int and n >= 0:
        return n
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise InvalidRequest(f"n must be an integer of at least 0, not {n!r}")
    return int(n)


def int32(values: Any, name: str) -> npt.NDArray[np.int32]:
    """`values` as a contiguous int32 array in one dimension: itself, where it is one. Raises `InvalidRequest`."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1 and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(f"{name} must be integers in one dimension, not {values!r}")
    if array.size and (int(array.min()) < -LARGEST - 1 or int(array.max()) > LARGEST):
        raise InvalidRequest(f"{name} must fit into 32 bits, not {int(array.min())} to {int(array.max())}")
    return np.ascontiguousarray(array, dtype=np.int32)
