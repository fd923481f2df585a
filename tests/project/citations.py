"""Proves that what a document cites exists: files, and symbols in them, by syntax tree (law I5).

A citation is a span in backticks, outside a fenced block, of one of these forms:
    path/file.py            a file of the repository, seen from its root (any of the suffixes below)
    path/file.py:Symbol     a symbol of that file: Name, Class.member, CONSTANT (`::` reads the same)
    path/                   a folder
    kvsched.module.Symbol   a module or a symbol of the package, of kvsched_kernels or of reference_server, through re-exports; a trailing () is allowed
and so is the target of a relative link. Everything else in backticks is no citation. What is checked is that a name
exists, not that the sentence around it is true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

SUFFIXES = ("py", "md", "toml", "txt", "json", "yml", "cfg", "typed")
_DEPTH = 8
_FILE = re.compile(rf"(?P<path>[\w.-]+(?:/[\w.-]+)*\.(?:{'|'.join(SUFFIXES)}))(?:::?(?P<symbol>[^\s]+))?")
_FOLDER = re.compile(r"(?:[\w.-]+/)+")
_DOTTED = re.compile(r"(?:kvsched(?:_kernels)?|reference_server)(?:\.\w+)+(?:\(\))?")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@attrs.frozen
class Broken:
    """A citation that does not resolve."""

    file: str
    line: int
    citation: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{self.citation}`: {self.why}"


def spans(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a link) of every code span and relative link outside fenced blocks."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif not fence:
            for found in _SPAN.finditer(line):
                yield number, found[1].strip(), False
            for found in _LINK.finditer(line):
                if not re.match(r"[a-z]+:|#", found[1]):
                    yield number, found[1].split("#")[0], True


def is_citation(span: str) -> bool:
    """Whether a code span has one of the forms that the checker proves."""
    return any(form.fullmatch(span) for form in (_FILE, _FOLDER, _DOTTED))


def _targets(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield node.attr
    elif isinstance(node, (ast.Tuple, ast.List)):
        for item in node.elts:
            yield from _targets(item)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))


def _members(body: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that the statements bind. In a class also what its methods set on self, and the entries of `__slots__`."""
    bound: dict[str, ast.stmt] = {}
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update({alias.asname or alias.name.split(".")[0]: node for alias in node.names})
        elif isinstance(node, ast.Assign):
            bound.update({name: node for target in node.targets for name in _targets(target)})
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            bound.update(dict.fromkeys(_targets(node.target), node))
    return bound


def _class_members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    bound = _members(node.body)
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(method):
                if isinstance(inner, ast.Assign):
                    names = [name for target in inner.targets for name in _attributes(target)]
                elif isinstance(inner, (ast.AnnAssign, ast.AugAssign)):
                    names = list(_attributes(inner.target))
                else:
                    continue
                for name in names:
                    bound.setdefault(name, method)
    return bound


def _attributes(node: ast.expr) -> Iterator[str]:
    if not isinstance(node, ast.Name):
        yield from _targets(node)


class Checker:
    """Resolves citations against the tree under `root`, whose packages lie in root/src, but for the reference server in root/examples."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[Path, ast.Module] = {}

    def broken(self, document: Path) -> list[Broken]:
        """Every citation of one Markdown file that does not resolve, in order."""
        name = document.relative_to(self.root).as_posix()
        out = []
        for line, span, link in spans(document.read_text(encoding="utf-8")):
            why = self._link(document, span) if link else self.why_not(span)
            if why:
                out.append(Broken(name, line, span, why))
        return out

    def cited(self, document: Path) -> list[str]:
        """The citations of one Markdown file, in order."""
        return [span for _, span, link in spans(document.read_text(encoding="utf-8")) if not link and is_citation(span)]

    def why_not(self, span: str) -> str | None:
        """Why a code span does not resolve; None when it does, or when it is no citation."""
        if found := _FILE.fullmatch(span):
            path = self.root / found["path"]
            if not path.is_file():
                return "no such file, seen from the root of the repository"
            return self._symbol(path, found["symbol"].removesuffix("()").split(".")) if found["symbol"] else None
        if _FOLDER.fullmatch(span):
            return None if (self.root / span).is_dir() else "no such folder, seen from the root of the repository"
        if _DOTTED.fullmatch(span):
            return self._dotted(span.removesuffix("()").split("."))
        return None

    def _link(self, document: Path, target: str) -> str | None:
        return None if (document.parent / target).exists() else "the link leads nowhere"

    def _tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[path]

    def _module(self, parts: list[str]) -> Path | None:
        base = self.root.joinpath("examples" if parts[0] == "reference_server" else "src", *parts)
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.is_file():
                return path
        return None

    def _dotted(self, parts: list[str], depth: int = 0) -> str | None:
        for length in range(len(parts), 0, -1):
            path = self._module(parts[:length])
            if path is not None:
                return self._symbol(path, parts[length:], depth) if length < len(parts) else None
        return f"no module {parts[0]}"

    def _symbol(self, path: Path, names: list[str], depth: int = 0) -> str | None:
        if path.suffix != ".py":
            return "only a Python file has symbols"
        node = _members(self._tree(path).body).get(names[0])
        if node is None:
            return f"{self._shown(path)} has no {names[0]}"
        if isinstance(node, ast.ImportFrom):
            return self._imported(node, names, depth)
        if len(names) == 1:
            return None
        if isinstance(node, ast.ClassDef):
            return self._member(path, node, names[1:], depth)
        return f"{names[0]} in {self._shown(path)} is no class"

    def _imported(self, node: ast.ImportFrom, names: list[str], depth: int) -> str | None:
        """Follow a re-export of the package; what comes from elsewhere is bound, and no more is asked."""
        source = (node.module or "").split(".")
        if node.level or not source[0].startswith("kvsched") or depth >= _DEPTH:
            return None
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == names[0])
        return self._dotted([*source, original, *names[1:]], depth + 1)

    def _member(self, path: Path, node: ast.ClassDef, names: list[str], depth: int) -> str | None:
        member = _class_members(node).get(names[0])
        if member is None:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if depth < _DEPTH and any(self._symbol(path, [base, *names], depth + 1) is None for base in bases if base != "object"):
                return None
            return f"{node.name} in {self._shown(path)} has no {names[0]}"
        if len(names) == 1:
            return None
        if isinstance(member, ast.ClassDef):
            return self._member(path, member, names[1:], depth)
        return f"{names[0]} of {node.name} in {self._shown(path)} is no class"

    def _shown(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
