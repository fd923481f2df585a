"""Bytes as people write and read them. What does not live here: arithmetic with them, which is in whole bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from kvsched.errors import ConfigError

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
UNITS = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""What the suffixes stand for: binary with an i, decimal without."""
_FORM = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str, name: str = "size") -> int:
    """Whole bytes of a number with or without a suffix. Raises `ConfigError` naming `name` and the suffixes that there are.

    A fraction of a byte is dropped, so that what is read is never more than what was written.

    >>> parse_bytes("80GiB"), parse_bytes("80 GB"), parse_bytes("1.5MiB"), parse_bytes("4096"), parse_bytes("85_899_345_920")
    (85899345920, 80000000000, 1572864, 4096, 85899345920)
    """
    found = _FORM.fullmatch(text.strip())
    unit = UNITS.get(found[2].upper() or "B") if found else None
    if found is None or unit is None:
        allowed = "KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        raise ConfigError(f"{name} must be a number of bytes, with a suffix or without ({allowed}), not {text!r}")
    return int(Fraction(found[1].replace("_", "")) * unit)


def gib(size: int) -> str:
    """Bytes in GiB to three places, as items are printed.

    >>> gib(31_800 * MIB)
    '31.055'
    """
    return f"{size / GIB:.3f}"
