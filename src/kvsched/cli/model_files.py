"""What the sizing commands read and what they share: config.json files, lists of sizes, and one-line complaints.

What does not live here: any arithmetic (`kvsched.sizing`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import parse_bytes
from kvsched.sizing.dtypes import Dtype, dtype
from kvsched.sizing.geometry import Model
from kvsched.sizing.reading import read_model

INVALID = 2
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files beside a config.json that state how large the checkpoint is."""


class Invalid(click.ClickException):
    """The input cannot be used; the message says which part and why."""

    exit_code = INVALID


def options(*several: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one, in the order in which they are to be shown."""

    def apply(function: Any) -> Any:
        for option in reversed(several):
            function = option(function)
        return function

    return apply


def opt(flag: str, kind: Any, default: Any, text: str, **more: Any) -> Callable[[Any], Any]:
    """One option that shows its default."""
    return click.option(flag, type=kind, default=default, show_default=default is not None, help=text, **more)


COUNT = click.IntRange(min=1)


if TYPE_CHECKING:
    _Kind = click.ParamType[Any]
else:
    _Kind = click.ParamType  # it takes no type argument in every release that is allowed


def _flag(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None else "value"


class Bytes(_Kind):
    """Bytes with or without a suffix. many: a comma-separated list, one for each pipeline stage."""

    name = "SIZE"

    def __init__(self, *, many: bool = False) -> None:
        self.many = many
        self.name = "SIZE[,SIZE...]" if many else "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 -- click's signature
        if not isinstance(value, str):
            return value
        try:
            sizes = tuple(parse_bytes(part, _flag(param)) for part in value.split(","))
        except ConfigError as error:
            raise Invalid(str(error)) from None
        if len(sizes) > 1 and not self.many:
            raise Invalid(f"{_flag(param)} must be one size, not {len(sizes)}")
        return sizes if self.many else sizes[0]


class Numbers(_Kind):
    """A comma-separated list of integers."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 -- click's signature
        if not isinstance(value, str):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            raise Invalid(f"{_flag(param)} must be integers with commas between them, not {value!r}") from None


class Share(_Kind):
    """A share from above 0 to 1, kept exact."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 -- click's signature
        if isinstance(value, Fraction):
            return value
        try:
            share = Fraction(str(value))
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise Invalid(f"{_flag(param)} must be a share above 0 and at most 1, not {value!r}")
        return share


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `ConfigError` with one line where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no text in UTF-8, so no JSON") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: no JSON: {error.msg}, line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{path}: no JSON that can be read: nested too deep") from None


def model_at(path: Path) -> tuple[Model, Path]:
    """The model of a config.json, or of the one in a directory, and the file it stands in."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return read_model(read_json(file)), file
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(str(file)) else f"{file}: {text.removeprefix('config.json: ').removeprefix('config.json ')}") from None


def checkpoint_beside(file: Path) -> tuple[int, str] | None:
    """Bytes of the checkpoint by the index file beside a config.json, and that file's name; None where there is none."""
    for name in INDEXES:
        index = file.parent / name
        if index.is_file():
            metadata = read_json(index).get("metadata", {})
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            if isinstance(total, int) and not isinstance(total, bool) and total > 0:
                return total, name
    return None


def per_stage(flag: str, sizes: tuple[int, ...] | None, stages: int) -> tuple[int, ...] | None:
    """One size for all stages, or one for each. Raises `ConfigError` for any other number of them."""
    if sizes is None:
        return None
    if len(sizes) not in {1, stages}:
        raise ConfigError(f"{flag} must be one size{f', or one for each of {stages} stages' if stages > 1 else ''}, not {len(sizes)}")
    return sizes * stages if len(sizes) == 1 else sizes


def cache_dtype(stated: str | None, model: Model) -> tuple[Dtype, str]:
    """The type of the KV cache and where that is said. Raises `ConfigError` where nobody says it."""
    if stated is not None:
        return dtype(stated, "--kv-dtype"), "--kv-dtype"
    if model.dtype is None:
        raise ConfigError(f"--kv-dtype must be given: {model.dtype_note}")
    return model.dtype, model.dtype_note


def state_dtypes(state: str | None, conv: str | None, model: Model) -> tuple[Dtype | None, Dtype | None]:
    """Types of recurrent states and of their convolutions, where the model has any."""
    if not model.recurrents:
        return None, None
    given = dtype(state, "--state-dtype") if state is not None else model.state_dtype or model.dtype
    if given is None:
        raise ConfigError(f"--state-dtype must be given, the model has recurrent layers: {model.dtype_note}")
    past = dtype(conv, "--conv-dtype") if conv is not None else model.dtype or given
    return given, past
