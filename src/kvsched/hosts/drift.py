"""Whether a host is still the one that its adapter was written for: members and signatures, all differences named at once.

What lives here: the comparison. What does not: what is expected, which stands beside each adapter as data (`Contract`). Nothing
of a host is imported here by name.

A contract says for a dotted name of the host which of these must hold:
    signature   the parameters as inspect.signature writes them, annotations left out; a method's self included
    fields      fields that must be there; and no other one may be required when an object is made
    members     attributes that must be there (of a class: its own, inherited, or assigned to self by a method)
    abstract    exactly the abstract methods
    values      exactly the names of an enumeration
    reads       exactly the attributes of `self.NAME` that the source reads, for a host that relies on what no interface states
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import attrs


@attrs.frozen
class Expected:
    """What an adapter relies on of one name of its host; see the module's first lines. None: not looked at."""

    signature: str | None = None
    fields: frozenset[str] | None = None
    members: frozenset[str] | None = None
    abstract: frozenset[str] | None = None
    values: frozenset[str] | None = None
    reads: tuple[str, frozenset[str]] | None = None


Contract = Mapping[str, Expected]
"""What an adapter relies on, by dotted name."""


def names(text: str) -> frozenset[str]:
    """The words of a text, so that a contract reads as lists."""
    return frozenset(text.split())


def differences(contract: Contract) -> list[str]:
    """Every difference between a contract and the host that is installed, as `name: what`; empty when it holds."""
    found = []
    for name, expected in contract.items():
        try:
            thing = find(name)
        except (ImportError, AttributeError):
            found.append(f"{name}: is gone")
            continue
        found += [f"{name}: {what}" for what in _compare(thing, expected)]
    return found


def find(name: str) -> Any:
    """The object of a dotted name: a module as far as one can be imported, then attributes. Raises `AttributeError` or `ImportError`."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if cut == 1 or not ".".join(parts[:cut]).startswith(error.name or "."):
                raise
            continue
        for part in parts[cut:]:
            thing = inspect.getattr_static(thing, part) if inspect.isclass(thing) else getattr(thing, part)
        return thing
    raise ImportError(name)


def parameters(thing: Any) -> str:
    """The parameters of a callable without annotations: `(self, a, b=1, *, c)`. A class means its constructor."""
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    shown = [
        parameter.replace(annotation=parameter.empty, default=parameter.default if _plain(parameter.default) else ...)
        for parameter in inspect.signature(thing).parameters.values()
    ]
    return str(inspect.Signature(shown))


def _plain(value: Any) -> bool:
    """Whether a default reads the same in every process."""
    return value is inspect.Parameter.empty or value is None or isinstance(value, (bool, int, float, str))


def _compare(thing: Any, expected: Expected) -> Iterator[str]:
    if expected.signature is not None:
        now = parameters(thing) if callable(thing) or isinstance(thing, (classmethod, staticmethod)) else "nothing: it cannot be called"
        if now != expected.signature:
            yield f"takes {now} and not {expected.signature}"
    if expected.fields is not None:
        yield from _fields(thing, expected.fields)
    if expected.members is not None:
        yield from (f"has no {name}" for name in sorted(expected.members - members(thing)))
    if expected.abstract is not None:
        yield from _sets("abstract method", expected.abstract, frozenset(getattr(thing, "__abstractmethods__", ())))
    if expected.values is not None:
        yield from _sets("value", expected.values, frozenset(thing.__members__) if isinstance(thing, enum.EnumMeta) else frozenset())
    if expected.reads is not None:
        owner, known = expected.reads
        yield from _sets(f"attribute read of self.{owner}", known, reads(thing, owner))


def _sets(what: str, expected: frozenset[str], now: frozenset[str]) -> Iterator[str]:
    yield from (f"{what} {name} is gone" for name in sorted(expected - now))
    yield from (f"{what} {name} is new" for name in sorted(now - expected))


def fields(thing: Any) -> dict[str, bool] | None:
    """Fields of a dataclass or msgspec structure: whether each is required when an object is made. None for anything else."""
    if dataclasses.is_dataclass(thing):
        missing = dataclasses.MISSING
        return {field.name: field.init and field.default is missing and field.default_factory is missing
                for field in dataclasses.fields(thing)}
    given = getattr(thing, "__struct_fields__", None)
    if given is None:
        return None
    optional = len(thing.__struct_defaults__)
    return {name: at < len(given) - optional for at, name in enumerate(given)}


def _fields(thing: Any, expected: frozenset[str]) -> Iterator[str]:
    now = fields(thing)
    if now is None:
        yield "is no record with fields"
        return
    yield from (f"field {name} is gone" for name in sorted(expected - now.keys()))
    yield from (f"field {name} is new and required" for name, required in sorted(now.items()) if required and name not in expected)


def members(thing: Any) -> frozenset[str]:
    """Names that a class or module has; of a class also what its methods assign to self."""
    found = set(dir(thing))
    if inspect.isclass(thing):
        found.update(name for base in thing.__mro__ for name in getattr(base, "__annotations__", {}))
        for base in thing.__mro__:
            for function in vars(base).values():
                if inspect.isfunction(function):
                    found |= _assigned(function)
    return frozenset(found)


def _tree(thing: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError):
        return None  # made by a decorator: it has no text


def _assigned(function: Any) -> set[str]:
    tree = _tree(function)
    return {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    } if tree is not None else set()


def reads(thing: Any, owner: str) -> frozenset[str]:
    """Attributes that the source of a class or module reads of `self.owner`."""
    tree = _tree(thing)
    return frozenset(
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == owner
        and isinstance(node.value.value, ast.Name) and node.value.value.id == "self"
    ) if tree is not None else frozenset()
