"""A scenario file as a value: what may stand in one, checked in full before anything runs.

What does not live here: running the events (`runner`), and what `expect` may name of the state (`expect`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvsched.config import SETTABLE, SchedulerConfig
from kvsched.errors import ConfigError, HostError
from kvsched.scenario.expect import BadExpectation, check_expected

EVICTIONS = ("lru", "lfu", "slru", "fifo", "priority")

SCHEDULER_KEYS = (
    "page_size", "max_running", "max_step_tokens", "chunk_tokens", "long_prefill_tokens", "max_partial_prefills", "decode_every",
    "prefill_grant", "context_limit", "admission", "conservativeness", "ratio_start", "clip_new_tokens", "order", "aging_tokens",
    "max_skips", "head", "max_bypass", "preempt_priority", "hold_shared_prefill", "exchange_pages", "pin_limit_pages",
    "max_queued_requests", "max_queued_tokens", "max_inflight_prompt_tokens", "max_adapters", "max_in_flight", "lookahead_tokens", "stall_steps",
)
"""Keys of `config` that are keys of `SchedulerConfig` under the same name."""

NOT_SUPPORTED = ("window", "window_pages", "state_slots", "max_attended_tokens")
"""Keys that turn a feature on which is not built, unless they are null."""

WITHOUT_EFFECT = ("state_slots_per_request", "state_transient_slots")
"""Keys that say something of a state-slot pool, and nothing where there is none."""

EVENTS = (
    "submit", "ready", "abort", "abort_all", "pause", "resume", "flush", "step", "schedule", "commit", "rollback", "until", "set",
    "hold_pages", "release_pages", "expect",
)


class InvalidScenario(HostError, ValueError):
    """A scenario file that cannot be run as it stands. The message names the event, the key and what was allowed."""


@attrs.frozen
class Segment:
    """Part of a prompt. `name`: equal names share tokens; an int names the tokens of one event's request alone.

    generated: the segment is what the request `name` generated, up to `length` tokens of it.
    """

    name: str | int
    length: int
    generated: bool = False


@attrs.frozen
class Submit:
    """A `submit` event: the prompt as segments, when the stop token comes, and the other fields of `kvsched.Request`."""

    id: str
    prompt: tuple[Segment, ...]
    stop_after: int | None
    fields: Mapping[str, Any]


@attrs.frozen
class Event:
    """One event: its place in the file, its kind, and its checked value. `max_steps` belongs to `until` alone."""

    index: int
    kind: str
    value: Any
    max_steps: int = 0


@attrs.frozen
class Document:
    """A checked scenario file."""

    name: str
    config: SchedulerConfig
    pages: int
    reserved_pages: int
    prefix_cache: bool
    eviction: str
    events: tuple[Event, ...]


def load(path: Path | str) -> Document:
    """Read and check one file. Raises `InvalidScenario` for anything the format does not allow, and for a file that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidScenario(f"cannot be read: {error}") from None
    return parse(text, default_name=Path(path).stem)


def parse(text: str, default_name: str = "scenario") -> Document:
    """Check the text of one file. Raises `InvalidScenario`."""
    try:
        top = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except ValueError as error:
        raise InvalidScenario(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidScenario("not a scenario: nested too deeply") from None
    top = _object(top, "the file", ("name", "config", "events"), required=("config", "events"))
    if not isinstance(top["events"], list):
        raise InvalidScenario(f"events must be a list of objects with one key each, not {_shown(top['events'])}")
    config, rest = _config(top["config"])
    events = tuple(_event(index, raw) for index, raw in enumerate(top["events"]))
    return Document(name=_text(top.get("name", default_name), "name"), config=config, events=events, **rest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidScenario(f"the key {twice!r} stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise InvalidScenario(f"{name} is not a number of JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- values: each function checks one value, and names it `key` in what it raises -----------------------------------------


def _object(value: Any, key: str, allowed: tuple[str, ...], required: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidScenario(f"{key} must be an object with keys {', '.join(allowed)}, not {_shown(value)}")
    for name in value:
        if name not in allowed:
            raise InvalidScenario(f"{key} has an unknown key {name!r}; allowed: {', '.join(allowed)}")
    for name in required:
        if name not in value:
            raise InvalidScenario(f"{key} lacks the key {name!r}; required: {', '.join(required)}")
    return value


def _whole(low: int | None, null: bool = False) -> Callable[[Any, str], int | None]:
    bound = "" if low is None else f" of at least {low}"

    def check(value: Any, key: str) -> int | None:
        if value is None and null:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise InvalidScenario(f"{key} must be an integer{bound}{' or null' if null else ''}, not {_shown(value)}")
        return value

    return check


def _count(value: Any, key: str, low: int) -> int:
    found = _whole(low)(value, key)
    assert found is not None
    return found


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidScenario(f"{key} must be a string of at least one character, not {_shown(value)}")
    return value


def _text_or_null(value: Any, key: str) -> str | None:
    return None if value is None else _text(value, key)


def _any_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise InvalidScenario(f"{key} must be a string, not {_shown(value)}")
    return value


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidScenario(f"{key} must be true or false, not {_shown(value)}")
    return value


def _true(value: Any, key: str) -> bool:
    if value is not True:
        raise InvalidScenario(f"{key} must be true, not {_shown(value)}")
    return True


def _one_of(allowed: tuple[str, ...]) -> Callable[[Any, str], str]:
    def check(value: Any, key: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise InvalidScenario(f"{key} must be one of {', '.join(allowed)}, not {_shown(value)}")
        return value

    return check


# --- config ---------------------------------------------------------------------------------------------------------------


def _config(value: Any) -> tuple[SchedulerConfig, dict[str, Any]]:
    keys = (*SCHEDULER_KEYS, "pages", "reserved_pages", "prefix_cache", "eviction", *NOT_SUPPORTED, *WITHOUT_EFFECT)
    found = _object(value, "config", keys, required=("page_size", "pages"))
    for key in NOT_SUPPORTED:
        if found.get(key) is not None:
            raise InvalidScenario(f"config.{key} is not supported yet; allowed: null")
    for key in WITHOUT_EFFECT:
        _count(found.get(key, 0), f"config.{key}", 0)
    try:
        config = SchedulerConfig(**{key: found[key] for key in SCHEDULER_KEYS if key in found})
    except ConfigError as error:
        raise InvalidScenario(f"config.{error}") from None
    pages = _count(found["pages"], "config.pages", 1)
    reserved = _count(found.get("reserved_pages", 0), "config.reserved_pages", 0)
    if reserved >= pages:
        raise InvalidScenario(f"config.reserved_pages must be below pages = {pages}, not {reserved}")
    return config, {
        "pages": pages,
        "reserved_pages": reserved,
        "prefix_cache": _flag(found.get("prefix_cache", True), "config.prefix_cache"),
        "eviction": _one_of(EVICTIONS)(found.get("eviction", "lru"), "config.eviction"),
    }


# --- events ---------------------------------------------------------------------------------------------------------------


def _event(index: int, raw: Any) -> Event:
    try:
        return _checked(index, raw)
    except (InvalidScenario, BadExpectation) as error:
        raise InvalidScenario(f"event {index}: {error}") from None


def _checked(index: int, raw: Any) -> Event:
    if not isinstance(raw, dict) or not raw:
        raise InvalidScenario(f"must be an object with one key of {', '.join(EVENTS)}, not {_shown(raw)}")
    kind = next((key for key in raw if key in EVENTS), None)
    if kind is None:
        raise InvalidScenario(f"unknown key {next(iter(raw))!r}; allowed: {', '.join(EVENTS)}")
    beside = ("max_steps",) if kind == "until" else ()
    for key in raw:
        if key not in (kind, *beside):
            raise InvalidScenario(f"unknown key {key!r} beside {kind}; allowed: {', '.join(beside) or 'nothing'}")
    if kind == "submit":
        return Event(index=index, kind=kind, value=_submit(raw[kind], index))
    value = _VALUES[kind](raw[kind], kind)
    if not beside:
        return Event(index=index, kind=kind, value=value)
    if "max_steps" not in raw:
        raise InvalidScenario("until needs the key 'max_steps', an integer of at least 0")
    return Event(index=index, kind=kind, value=value, max_steps=_count(raw["max_steps"], "max_steps", 0))


def _namespace(value: Any, key: str) -> dict[str, str | None]:
    if value is None:
        return {}
    found = _object(value, key, ("version", "salt"))
    return {name: _text_or_null(part, f"{key}.{name}") for name, part in found.items()}


_FIELDS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "max_new": ("max_new_tokens", _whole(0, null=True)),
    "priority": ("priority", _whole(None)),
    "tenant": ("tenant", _any_text),
    "adapter": ("adapter", _text_or_null),
    "namespace": ("namespace", _namespace),
    "ignore_eos": ("ignore_eos", _flag),
    "n": ("n", _whole(1)),
    "ready": ("ready", _flag),
    "block_tokens": ("block_tokens", _whole(1, null=True)),
    "pin": ("pin", _whole(0)),
}
"""Keys of `submit` that become a field of the request: the field's name, and the check."""


def _submit(value: Any, index: int) -> Submit:
    found = _object(value, "submit", ("id", "prompt", "stop_after", *_FIELDS), required=("id", "prompt"))
    fields = {name: check(found[key], f"submit.{key}") for key, (name, check) in _FIELDS.items() if key in found}
    return Submit(
        id=_text(found["id"], "submit.id"),
        prompt=_prompt(found["prompt"], index),
        stop_after=_whole(1, null=True)(found.get("stop_after"), "submit.stop_after"),
        fields=fields,
    )


def _prompt(value: Any, index: int) -> tuple[Segment, ...]:
    if not isinstance(value, list):
        return (Segment(index, _count(value, "submit.prompt", 1)),)
    segments = []
    for place, part in enumerate(value):
        key = f"submit.prompt[{place}]"
        if not isinstance(part, list) or len(part) != 2:
            raise InvalidScenario(f"{key} must be a pair of a name and a length, not {_shown(part)}")
        name, length = _text(part[0], f"{key}[0]"), _count(part[1], f"{key}[1]", 1)
        segments.append(Segment(name[1:], length, generated=True) if name.startswith("@") else Segment(name, length))
    if not segments:
        raise InvalidScenario("submit.prompt must hold at least one token")
    return tuple(segments)


def _until(value: Any, key: str) -> tuple[str, str]:
    if value == "idle":
        return "idle", ""
    if isinstance(value, dict) and len(value) == 1:
        (kind, name), = value.items()
        if kind in ("finished", "running"):
            return kind, _text(name, f"{key}.{kind}")
    raise InvalidScenario(f'{key} must be "idle", {{"finished": id}} or {{"running": id}}, not {_shown(value)}')


def _commit(value: Any, key: str) -> dict[str, int]:
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise InvalidScenario(f'{key} must be true or {{"accepted": {{id: drafts}}}}, not {_shown(value)}')
    accepted = _object(value, key, ("accepted",)).get("accepted", {})
    if not isinstance(accepted, dict):
        raise InvalidScenario(f"{key}.accepted must be an object of ids and counts of drafts, not {_shown(accepted)}")
    return {name: _count(count, f"{key}.accepted.{name}", 0) for name, count in accepted.items()}


def _set(value: Any, key: str) -> dict[str, Any]:
    found = _object(value, key, SETTABLE)
    if not found:
        raise InvalidScenario(f"{key} must have at least one key of {', '.join(SETTABLE)}")
    return found


def _hold(value: Any, key: str) -> dict[str, Any]:
    found = _object(value, key, ("id", "pages", "steps"), required=("id", "pages"))
    return {
        "name": _text(found["id"], f"{key}.id"),
        "pages": _count(found["pages"], f"{key}.pages", 1),
        "steps": _whole(1, null=True)(found.get("steps"), f"{key}.steps"),
    }


def _release(value: Any, key: str) -> str:
    return _text(_object(value, key, ("id",), required=("id",))["id"], f"{key}.id")


_VALUES: dict[str, Callable[[Any, str], Any]] = {
    "ready": _text,
    "abort": _text,
    "abort_all": _true,
    "pause": _one_of(("retract", "hold")),
    "resume": _true,
    "flush": _true,
    "step": _whole(1),
    "schedule": _true,
    "commit": _commit,
    "rollback": _true,
    "until": _until,
    "set": _set,
    "hold_pages": _hold,
    "release_pages": _release,
    "expect": check_expected,
}
"""The check of each event's value, `submit` apart."""
