"""Holds test doubles against what they stand in for (law I4).

What lives here: the comparison, and the search for classes that look like doubles. What does not: the list of our
doubles, which stands in the test.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def members(thing: Any) -> set[str]:
    """Public names of a class or an object: attributes, annotated fields, and slots, those of its bases included."""
    names = set(dir(thing))
    for kind in (thing if isinstance(thing, type) else type(thing)).__mro__:
        names |= set(vars(kind).get("__annotations__", ()))
    return {name for name in names if not name.startswith("_")}


def missing_members(double: Any, real: Any) -> list[str]:
    """Every public member of `real` that `double` lacks, sorted: all of them at once, so that one run shows the whole drift."""
    return sorted(members(real) - members(double))


def unlike_members(double: Any, real: Any) -> list[str]:
    """Every shared public member that cannot be called as the real one can, as sentences, sorted.

    A member drifts when one of the two is callable and the other is not, and when the real method takes a parameter, by
    position or by name, that the double does not.
    """
    out: list[str] = []
    for name in sorted(members(double) & members(real)):
        ours, theirs = inspect.getattr_static(double, name, None), inspect.getattr_static(real, name, None)
        if inspect.isfunction(theirs) and isinstance(theirs, type(ours)):
            out.extend(f"{name}: {what}" for what in _narrower(ours, theirs))
        elif inspect.isfunction(theirs) != inspect.isfunction(ours) and None not in (ours, theirs):
            out.append(f"{name}: one is a method and the other is not")
    return out


def _narrower(ours: Any, theirs: Any) -> Iterator[str]:
    mine, want = (list(inspect.signature(f).parameters.values())[1:] for f in (ours, theirs))
    if any(parameter.kind in _ANY_NUMBER for parameter in mine):
        return
    names = [parameter.name for parameter in mine]
    for at, parameter in enumerate(want):
        if parameter.kind in _ANY_NUMBER:
            continue
        if parameter.name not in names:
            yield f"takes no {parameter.name}"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and names.index(parameter.name) != at:
            yield f"takes {parameter.name} in another place"
    wanted = {parameter.name for parameter in want}
    yield from (
        f"demands {parameter.name}" for parameter in mine if parameter.name not in wanted and parameter.default is parameter.empty
    )


def lookalikes(source: str, shapes: Mapping[str, frozenset[str]], real: frozenset[str] = frozenset(), share: int = 2) -> dict[str, str]:
    """Classes in `source` that define the methods of a shape: class name to the name of the shape it most resembles.

    shapes: name of a real thing to its public members. real: names of real classes; what inherits from one cannot lack its
    members and is left out. A class looks like a shape when it defines itself (not by a base) at least `share` of its
    members, or all of them where there are fewer.
    """
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    heirs = set(real)
    for _ in classes:
        heirs |= {node.name for node in classes if any(isinstance(base, ast.Name) and base.id in heirs for base in node.bases)}
    found = {}
    for node in classes:
        own = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
        scores = {name: len(own & shape) for name, shape in shapes.items() if len(own & shape) >= min(share, len(shape))}
        if scores and node.name not in heirs:
            found[node.name] = max(scores, key=lambda name: (scores[name], name))
    return found
