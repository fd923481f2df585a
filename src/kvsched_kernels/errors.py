"""What can go wrong in the adapter, all of it the host's to mend: sizes, types, devices, plans it cannot run."""

from __future__ import annotations

from typing import Any


class KernelError(ValueError):
    """An argument that the adapter cannot take. The message names it and what is allowed; nothing has changed."""


def at_least_one(**sizes: Any) -> None:
    """Raise `KernelError` for a size that is not an integer of at least 1."""
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KernelError(f"{key} must be an integer of at least 1, not {value!r}")
