"""What a scenario may expect of the state, and the comparison of the two.

The shape of the state stands here once, as data: the runner builds a state of this shape, and a key that the shape does
not have makes a file invalid. What does not live here: where the state comes from (`state`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from kvsched.errors import HostError

REQUEST_KEYS = (
    "status", "computed", "cached", "generated", "pages", "retractions", "wait_reason", "short_by", "waited_steps", "finish",
)
TOTALS_KEYS = (
    "finished", "aborted", "retractions", "prefill_tokens", "recomputed_tokens", "cached_tokens", "emitted", "evicted_pages",
    "steps",
)
PLAN_KEYS = ("prefill", "decode", "retracted", "evicted", "copies")
REFUSED_KEYS = ("reason", "needed", "available", "retryable")
FLUSHED_KEYS = ("ok", "reason")


@attrs.frozen
class ById:
    """An object keyed by request ids: any id may be named, and null says that the id is not there."""

    value: Any


LEAF = None
"""A number, a string, a truth value, a list or null: compared as a whole."""


def _leaves(keys: tuple[str, ...]) -> dict[str, Any]:
    return dict.fromkeys(keys, LEAF)


STATE: Mapping[str, Any] = {
    **_leaves(("step", "usable", "free", "cached", "locked", "private", "quarantined", "outstanding", "reserved", "ratio")),
    **_leaves(("running", "waiting")),
    "refused": ById(_leaves(REFUSED_KEYS)),
    "flushed": _leaves(FLUSHED_KEYS),
    "stalled": LEAF,
    "plan": _leaves(PLAN_KEYS),
    "requests": ById(_leaves(REQUEST_KEYS)),
    "max_gap": ById(LEAF),
    "totals": _leaves(TOTALS_KEYS),
    "max_servable_tokens": LEAF,
}
"""The state as a tree: an object with fixed keys is a mapping, one keyed by ids is `ById`, everything else is `LEAF`."""

BOUNDS = ("min", "max")
RELATIVE_TOLERANCE = 1e-9
"""Ratios are quotients worked out in another order than on paper; counts are integers and compared exactly."""


class BadExpectation(HostError, ValueError):
    """An `expect` names a key that the state does not have, or a bound that is none."""


@attrs.frozen
class Mismatch:
    """One value that is not what was expected. `path` is dotted; `got` is `ABSENT` where there is nothing."""

    path: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        got = "absent" if self.got is ABSENT else json.dumps(self.got)
        return f"{self.path}: expected {json.dumps(self.expected)}, got {got}"


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""What stands for an id that the state does not know."""


def check_expected(value: Any, key: str = "expect") -> dict[str, Any]:
    """Return `value` if the state has every key that it names. Raises `BadExpectation`, naming the key and what was allowed."""
    if not isinstance(value, dict):
        raise BadExpectation(f"{key} must be an object with keys {', '.join(STATE)}, not {json.dumps(value)}")
    _check(value, STATE, key)
    return value


def _check(value: Any, shape: Any, path: str) -> None:
    if shape is LEAF:
        _check_leaf(value, path)
    elif value is None:
        return
    elif not isinstance(value, dict):
        names = "ids" if isinstance(shape, ById) else f"keys {', '.join(shape)}"
        raise BadExpectation(f"{path} must be null or an object with {names}, not {json.dumps(value)}")
    elif isinstance(shape, ById):
        for name, inner in value.items():
            _check(inner, shape.value, f"{path}.{name}")
    else:
        for name, inner in value.items():
            if name not in shape:
                raise BadExpectation(f"{path} has an unknown key {name!r}; allowed: {', '.join(shape)}")
            _check(inner, shape[name], f"{path}.{name}")


def _check_leaf(value: Any, path: str) -> None:
    if isinstance(value, list):
        _check_list(value, path)
    if not isinstance(value, dict):
        return
    if not value:
        raise BadExpectation(f"{path} is an object without keys; allowed: {', '.join(BOUNDS)}")
    for name, bound in value.items():
        if name not in BOUNDS:
            raise BadExpectation(f"{path} has an unknown key {name!r}; allowed: {', '.join(BOUNDS)}")
        if not _is_number(bound):
            raise BadExpectation(f"{path}.{name} must be a number, not {json.dumps(bound)}")


def _check_list(value: list[Any], path: str) -> None:
    for place, part in enumerate(value):
        if isinstance(part, dict):
            raise BadExpectation(f"{path}[{place}] must not be an object: lists match exactly, not {json.dumps(part)}")
        if isinstance(part, list):
            _check_list(part, f"{path}[{place}]")


def compare(expected: Any, got: Any, shape: Any = STATE, path: str = "") -> list[Mismatch]:
    """Every mismatch between a checked expectation and the state, in the order in which they are expected."""
    if shape is LEAF:
        return [] if _equal(expected, got) else [Mismatch(path, expected, got)]
    if expected is None or not isinstance(got, Mapping):
        return [] if expected is None and got in (None, ABSENT) else [Mismatch(path, expected, got)]
    inner = [shape.value if isinstance(shape, ById) else shape[name] for name in expected]
    found: list[Mismatch] = []
    for (name, value), part in zip(expected.items(), inner, strict=True):
        found += compare(value, got.get(name, ABSENT), part, f"{path}.{name}" if path else name)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equal(expected: Any, got: Any) -> bool:
    if isinstance(expected, dict):
        return _is_number(got) and expected.get("min", -math.inf) <= got <= expected.get("max", math.inf)
    if expected is None:
        return got is None or got is ABSENT
    if isinstance(expected, list):
        return isinstance(got, (list, tuple)) and len(expected) == len(got) and all(map(_equal, expected, got))
    if _is_number(expected):
        if not _is_number(got):
            return False
        if isinstance(expected, int) and isinstance(got, int):
            return expected == got
        return math.isclose(expected, got, rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0)
    return type(expected) is type(got) and bool(expected == got)
