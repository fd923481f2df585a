"""How wide an element is, by the name of its type. What does not live here: which type a cache has; somebody says so.

A name that is not in the table raises, and so does "auto": a pool that is sized from a guessed width is wrong by a whole
factor, and nothing later would notice.
"""

from __future__ import annotations

import attrs

from kvsched.errors import ConfigError

WIDTHS = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "int8": 1,
}
"""Bytes per element of each type, under torch's names."""
ALIASES = {
    "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}
"""Other spellings that servers use."""


@attrs.frozen
class Dtype:
    """An element type: torch's name of it, and its width in bytes."""

    name: str
    width: int

    def __str__(self) -> str:
        return self.name


def dtype(name: object, key: str = "dtype") -> Dtype:
    """The type of that name. Raises `ConfigError`, naming `key` and what is allowed, for any other, "auto" included.

    >>> dtype("fp8").width, dtype("bfloat16").width, dtype("torch.float16")
    (1, 2, Dtype(name='float16', width=2))
    """
    known = name.removeprefix("torch.") if isinstance(name, str) else ""
    known = ALIASES.get(known, known)
    if known not in WIDTHS:
        raise ConfigError(f"{key} must be one of {', '.join((*WIDTHS, *ALIASES))}, not {name!r}")
    return Dtype(known, WIDTHS[known])
