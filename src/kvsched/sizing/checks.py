"""Checks of arguments that every part of sizing uses. What does not live here: anything that computes."""

from __future__ import annotations

from typing import Any

from kvsched.errors import ConfigError


def integer(name: str, value: Any, low: int = 0) -> int:
    """`value`, where it is an integer of at least `low`; else `ConfigError` naming it. True and False are no integers."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
    return value


def at_least(low: int) -> Any:
    """An attrs validator: an integer of at least `low`."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        integer(attribute.name, value, low)

    return check


def at_least_or_none(low: int) -> Any:
    """An attrs validator: an integer of at least `low`, or None."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value is not None:
            integer(attribute.name, value, low)

    return check
