"""Reads test files for what would hide a failure (law I3): by syntax tree, one sentence a breach.

The rules: a skip says why; an expected failure is strict; nothing is run again until it passes; a skip never stands where
a failing assertion would land, and neither does silence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

RERUN = frozenset({"flaky", "pytest_rerunfailures", "rerunfailures", "pytest_retry", "tenacity", "backoff", "retrying"})
"""Packages and markers that run a failed test again."""
BROAD = frozenset({"AssertionError", "Exception", "BaseException", "Failed"})
"""Exceptions whose handler also catches a failing assertion."""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr | None) -> bool:
    """Whether the expression says something: any but an empty literal."""
    return node is not None and not (isinstance(node, ast.Constant) and not str(node.value or "").strip())


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_skip(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] in ("skip", "skipTest", "importorskip", "xfail")


def _call(call: ast.Call) -> Iterator[str]:
    name = _dotted(call.func)
    last = name.split(".")[-1]
    marker = name.startswith(("pytest.mark.", "mark."))
    if name not in (last, f"pytest.{last}") and not marker:
        return
    if last in ("skip", "importorskip", "skipif"):
        first = call.args[0] if call.args and last == "skip" else None
        if not _text(_keyword(call, "reason") or first):
            yield f"{name} without a reason"
    elif last == "xfail" and marker:
        strict = _keyword(call, "strict")
        if not (isinstance(strict, ast.Constant) and strict.value is True):
            yield "xfail without strict=True"
        if not _text(_keyword(call, "reason")):
            yield "xfail without a reason"
    elif last == "xfail":
        yield f"{name}() turns a failure into a pass"


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(_dotted(kind).split(".")[-1] in BROAD for kind in kinds)


def _try(node: ast.Try) -> Iterator[str]:
    asserts = any(isinstance(inner, ast.Assert) for statement in node.body for inner in ast.walk(statement))
    for handler in node.handlers:
        if not _catches(handler):
            continue
        inside = [inner for statement in handler.body for inner in ast.walk(statement)]
        if any(map(_is_skip, inside)):
            yield "a skip that a failing assertion would reach"
        elif asserts and not any(isinstance(inner, (ast.Raise, ast.Assert)) for inner in inside):
            yield "a handler that swallows a failing assertion"


def _with(node: ast.With) -> Iterator[str]:
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and _dotted(call.func).split(".")[-1] == "suppress":
            kinds = {_dotted(argument).split(".")[-1] for argument in call.args}
            if kinds & BROAD:
                yield "a suppress that swallows a failing assertion"


def breaches(source: str) -> list[str]:
    """Every breach in one test file, as `line: what`, in order of line."""
    out: list[tuple[int, str]] = []
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            out.extend((node.lineno, what) for what in _call(node))
        elif isinstance(node, ast.Try):
            out.extend((node.lineno, what) for what in _try(node))
        elif isinstance(node, ast.With):
            out.extend((node.lineno, what) for what in _with(node))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name.split(".")[0] for alias in node.names} | {(getattr(node, "module", None) or "").split(".")[0]}
            out.extend((node.lineno, f"imports {name}, which runs failed tests again") for name in sorted(names & RERUN))
        elif isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name.startswith("pytest.mark.") and node.attr in RERUN:
                out.append((node.lineno, f"{name} runs failed tests again"))
            elif name in ("pytest.mark.skip", "pytest.mark.xfail") and id(node) not in called:
                out.append((node.lineno, f"{name} without a reason"))
            elif name in ("unittest.skip", "unittest.skipIf", "unittest.skipUnless", "unittest.expectedFailure"):
                out.append((node.lineno, f"{name}: the rules are held for pytest's own marks"))
    return [f"{line}: {what}" for line, what in sorted(out)]
