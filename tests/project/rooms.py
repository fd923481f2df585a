"""Reads the table of rooms in docs/architecture.md and holds source text against it.

What lives here: the parser of the table, the reader of imports (by syntax tree, nothing is imported) and the rules. What
does not: the table itself, which stands in the document, and the walk over the real tree, which stands in the test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

import attrs

PACKAGE = "kvsched"
NEVER = frozenset({"torch", "kvsched_kernels"})
"""What no module of the library imports, lazily or not."""
IMPURE = frozenset({
    "asyncio", "concurrent", "datetime", "importlib", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid", "warnings",
})
"""Standard modules through which a clock, chance, the environment, files, threads or logs would enter a decision."""
IMPURE_CALLS = frozenset({"print", "open", "input", "__import__", "exec", "eval"})


@attrs.frozen
class Room:
    """One row of the table: a module, or a package with everything in it."""

    level: int
    name: str
    pure: bool
    third_parties: frozenset[str]

    def holds(self, module: str) -> bool:
        """Whether `module` lives in this room. The package's own `__init__` is a room without the others in it."""
        return module == self.name or (self.name != PACKAGE and module.startswith(self.name + "."))


def rooms(text: str) -> tuple[Room, ...]:
    """The rows of the table whose header starts with Level and Room, in its order. Raises ValueError for a row that is malformed."""
    found: list[Room] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells[:2] == ["Level", "Room"]:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set(cells[0]) <= set("-: "):
            try:
                level, name, pure, third = int(cells[0]), cells[1].strip("`"), {"core": True, "edge": False}[cells[2]], cells[3]
            except (KeyError, ValueError, IndexError):
                raise ValueError(f"a row must read | level | `room` | core or edge | third parties | ..., not: {line}") from None
            parties = frozenset(party.strip() for party in third.split(",") if party.strip() not in ("", "none"))
            found.append(Room(level, name, pure, parties))
    return tuple(found)


@attrs.frozen
class Import:
    """One import statement's target: a dotted name and the line where it stands."""

    target: str
    line: int


def imports(module: str, tree: ast.AST, known: frozenset[str], package: bool = False) -> Iterator[Import]:
    """Every import in `tree`, lazy and type-checking ones included, absolute, and as deep as a module of `known` reaches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if package else 0)]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield Import(deeper if deeper in known else base, node.lineno)


def _impurities(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield node.lineno, f"calls {node.func.id}()"
        elif isinstance(node, ast.Attribute) and node.attr == "random" and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
            yield node.lineno, "uses numpy's random generators"


def _cycle(edges: Mapping[str, set[str]]) -> list[str] | None:
    """The members of some cycle, or None. Peels off what imports nothing that is left."""
    left = {node: set(targets) for node, targets in edges.items()}
    while left:
        free = [node for node, targets in left.items() if not targets & left.keys() - {node}]
        if not free:
            return sorted(left)
        for node in free:
            del left[node]
    return None


def violations(sources: Mapping[str, str], table: tuple[Room, ...], packages: frozenset[str] = frozenset()) -> list[str]:
    """Every breach of the table by `sources` (module name to source text), as sentences; empty when the table holds.

    packages: the modules of `sources` that are a package's `__init__`.
    """
    out: list[str] = []
    known = frozenset(sources)
    homes: dict[str, Room] = {}
    for module in sources:
        holders = [room for room in table if room.holds(module)]
        if not holders:
            out.append(f"{module}: stands in no room of the table")
        else:
            homes[module] = max(holders, key=lambda room: len(room.name))
    out.extend(f"{room.name}: stands in the table and holds no module" for room in table if not any(map(room.holds, sources)))
    inner: dict[str, set[str]] = {module: set() for module in homes}
    for module, room in homes.items():
        tree = ast.parse(sources[module])
        for found in imports(module, tree, known, module in packages):
            top = found.target.split(".")[0]
            where = f"{module}:{found.line}"
            if top in NEVER:
                out.append(f"{where}: imports {found.target}, which nothing in {PACKAGE} may")
            elif top == PACKAGE:
                home = homes.get(found.target)
                if home is None:
                    out.append(f"{where}: imports {found.target}, which is in no room")
                elif home is room:
                    inner[module].add(found.target)
                elif home.level >= room.level:
                    out.append(f"{where}: level {room.level} imports {found.target} of level {home.level}")
            elif top not in sys.stdlib_module_names:
                if top not in room.third_parties:
                    out.append(f"{where}: imports {top}, and {room.name} may import {', '.join(sorted(room.third_parties)) or 'no third party'}")
            elif room.pure and top in IMPURE:
                out.append(f"{where}: imports {top}, and {room.name} is core")
        if room.pure:
            out.extend(f"{module}:{line}: {what}, and {room.name} is core" for line, what in _impurities(tree))
    cycle = _cycle(inner)
    if cycle:
        out.append(f"import cycle among {', '.join(cycle)}")
    return list(dict.fromkeys(out))
