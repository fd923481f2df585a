"""Checked access to the fields of a config.json. What does not live here: what the fields mean.

Every complaint names the key, as a path, and what was allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsched.config import MOST
from kvsched.errors import ConfigError


class Fields:
    """The fields of one object of a config.json.

    where: its place in the file, as a prefix of keys. defaults: what stands for keys that are absent; each one that is used is
    noted in `used`, because the reader of a result should know of it.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.defaults = defaults or {}
        self.used: dict[str, Any] = {}

    def name(self, key: str) -> str:
        """The key with its place in the file."""
        return self.where + key

    def get(self, key: str) -> Any:
        """The value, or its default, or None. A default stands for a key that is absent; one that is null says "none"."""
        if key not in self.raw and key in self.defaults:
            self.used[key] = self.defaults[key]
            return self.defaults[key]
        return self.raw.get(key)

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self.get(key) is not None

    def integer(self, key: str, otherwise: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`. otherwise: what an absent key stands for; None: it must be there."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise ConfigError(f"config.json has no {self.name(key)}, which must be an integer of at least {low}")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"config.json: {self.name(key)} must be an integer of at least {low}, not {value!r}")
        if value > MOST:
            raise ConfigError(f"config.json: {self.name(key)} must be at most {MOST}, not {value!r}")
        return value

    def optional(self, key: str, low: int = 1) -> int | None:
        """An integer of at least `low`, or None where the key is absent."""
        return self.integer(key, low=low) if self.has(key) else None

    def flag(self, key: str, otherwise: bool) -> bool:
        """True or False. otherwise: what an absent key stands for."""
        value = self.get(key)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {self.name(key)} must be true or false, not {value!r}")
        return value

    def integers(self, key: str, below: int) -> tuple[int, ...]:
        """A list of integers from 0 to `below` - 1: numbers of layers."""
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one < below for one in value
        ):
            raise ConfigError(f"config.json: {self.name(key)} must be a list of integers from 0 to {below - 1}, not {value!r}")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"config.json: {self.name(key)} must be a list of strings, not {value!r}")
        return tuple(value)

    def inner(self, key: str) -> Fields:
        """The object under `key`. Raises `ConfigError` where there is none."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {self.name(key)} must be an object, not {value!r}")
        return Fields(value, self.name(key) + ".")
