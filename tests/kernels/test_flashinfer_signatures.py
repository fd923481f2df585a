"""Every call that the adapter makes on FlashInfer, read from its source, against the installed package (law I4).

What a call is on follows from names: `library` is the package, and what a call on `library` was assigned to is an object of
that class. So a new call is held without being listed, and a call that cannot be followed fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import flashinfer
import pytest

import kvsched_kernels.flashinfer as adapter

SOURCE = Path(inspect.getfile(adapter)).read_text(encoding="utf-8")
ROOTS = ("library", "self._library", "parent._library", "self.parent._library")
"""How the adapter names the package."""


@attrs.frozen
class Call:
    """A call: what on (`merge_states`, or `Class.method`), its keywords, and where."""

    target: str
    keywords: tuple[str, ...]
    line: int


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def made_by(tree: ast.AST) -> dict[str, str]:
    """Name of each object that a call on the package was assigned to, and its class."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            root, _, kind = dotted(node.value.func).rpartition(".")
            for target in node.targets:
                if root in ROOTS and isinstance(target, (ast.Name, ast.Attribute)):
                    name = dotted(target)
                    assert found.setdefault(name, kind) == kind, f"{name} is made twice, as a {found[name]} and as a {kind}"
    return found


def calls(source: str) -> Iterator[Call]:
    """Every call on the package or on an object of it. ValueError for one that cannot be followed."""
    tree = ast.parse(source)
    kinds = made_by(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        root, _, name = dotted(node.func).rpartition(".")
        if root in kinds:
            target = f"{kinds[root]}.{name}"
        elif root in ROOTS:
            target = name
        else:
            continue
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(f"line {node.lineno}: {target} must be called with named arguments alone, to be held by name")
        yield Call(target, tuple(keyword.arg for keyword in node.keywords if keyword.arg), node.lineno)


def handed_on(function: Any, owner: Any) -> list[Any]:
    """Methods that `function` hands its **kwargs on to, by its own source."""
    parameters = inspect.signature(function).parameters.values()
    name = next(parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    receivers = {
        node.func.attr for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value) == "self"
        and any(keyword.arg is None and dotted(keyword.value) == name for keyword in node.keywords)
    }
    return [getattr(owner, receiver) for receiver in sorted(receivers) if hasattr(owner, receiver)]


def refusals(function: Any, keywords: tuple[str, ...], owner: Any) -> Iterator[str]:
    """Why `function` would not take these keywords, each name for itself; nothing when it takes them."""
    parameters = inspect.signature(function).parameters
    named = {name for name, parameter in parameters.items() if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        followed = handed_on(function, owner)
        if not followed:
            yield "takes any keyword and hands it to nothing that can be read"
        for other in followed:
            yield from refusals(other, keywords, owner)
        return
    yield from (f"takes no {name}" for name in keywords if name not in named)
    yield from (
        f"demands {name}" for name, parameter in parameters.items()
        if name != "self" and parameter.default is parameter.empty and name not in keywords
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def differences(source: str, library: Any) -> list[str]:
    """Every difference between the calls in `source` and what `library` takes, all at once, as sentences."""
    out: list[str] = []
    for call in sorted(calls(source), key=lambda call: call.line):
        owner: Any = library
        for part in call.target.split("."):
            parent, owner = owner, getattr(owner, part, None)
            if owner is None:
                out.append(f"{call.target} (line {call.line}): is not there")
                break
        else:
            function = vars(owner)["__init__"] if isinstance(owner, type) else owner
            out.extend(f"{call.target} (line {call.line}): {why}" for why in refusals(function, call.keywords, parent))
    return out


def test_the_installed_package_takes_every_call() -> None:
    found = differences(SOURCE, flashinfer)
    assert not found, "\n".join([f"flashinfer {flashinfer.__version__}:", *found])


def test_the_calls_are_those_that_the_adapter_is_about() -> None:
    """That the reader finds calls at all; a new one needs no line here unless it is on something new."""
    assert {call.target for call in calls(SOURCE)} == {
        "BatchDecodeWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper.plan", "BatchDecodeWithPagedKVCacheWrapper.run",
        "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper.plan", "BatchPrefillWithPagedKVCacheWrapper.run",
        "append_paged_kv_cache", "merge_states",
    }


def test_nothing_else_reaches_the_package() -> None:
    """The package is named only where it is called, handed on under a name of ROOTS, or loaded."""
    assert "import flashinfer" not in SOURCE
    assert SOURCE.count('import_module("flashinfer")') == 1
    tree = ast.parse(SOURCE)
    handed = {dotted(node.targets[-1]) for node in ast.walk(tree) if isinstance(node, ast.Assign)
              and (dotted(node.value) in ROOTS or (isinstance(node.value, ast.IfExp) and dotted(node.value.orelse) in ROOTS))}
    assert handed <= set(ROOTS)
    assert handed


def test_decode_plan_is_followed_to_what_takes_its_keywords() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    assert handed_on(wrapper.plan, wrapper) == [wrapper._plan_impl]
    assert list(refusals(wrapper.plan, ("indptr", "indices", "page_sizes", "sm_scale"), wrapper)) == [
        "takes no page_sizes", "demands last_page_len", "demands num_qo_heads", "demands num_kv_heads", "demands head_dim", "demands page_size",
    ]


# The guard can fail.

CALLER = """
class Attention:
    def __init__(self, library):
        self._decode = library.Decode(buffer=1, layout="NHD")
        library.append(key=1, value=2)
    def begin(self):
        self._decode.plan(indptr=1, scale=2)
    def run(self):
        return self._decode.run(q=1)
"""


def decode(**methods: Any) -> Any:
    """A class of a made-up package."""
    def init(self: Any, buffer: int, layout: str = "NHD") -> None: ...
    def plan(self: Any, indptr: int, *args: Any, **kwargs: Any) -> None: ...
    def run(self: Any, q: int, *args: Any, out: int | None = None) -> None: ...
    return type("Decode", (), {"__init__": init, "plan": plan, "run": run, **methods})


class Handing:
    """plan() as the real one has it."""

    def plan(self, indptr: int, **kwargs: Any) -> Any:
        return self._plan(indptr, **kwargs)

    def _plan(self, indptr: int, *, scale: float = 1.0) -> None: ...


def append(key: int, value: int) -> None: ...


def test_a_package_that_takes_the_calls_has_no_differences() -> None:
    library = SimpleNamespace(Decode=decode(plan=Handing.plan, _plan=Handing._plan), append=append)
    assert differences(CALLER, library) == []


def test_every_difference_is_named_at_once() -> None:
    def init(self: Any, workspace: int, layout: str) -> None: ...
    def plan(self: Any, indptr: int, *, sm_scale: float = 1.0) -> None: ...

    library = SimpleNamespace(Decode=decode(__init__=init, plan=plan, run=None))
    assert differences(CALLER, library) == [
        "Decode (line 4): takes no buffer", "Decode (line 4): demands workspace", "append (line 5): is not there",
        "Decode.plan (line 7): takes no scale", "Decode.run (line 9): is not there",
    ]


def test_keywords_that_vanish_in_any_keywords_are_a_difference() -> None:
    def plan(self: Any, **kwargs: Any) -> None: ...

    found = differences(CALLER, SimpleNamespace(Decode=decode(plan=plan), append=append))
    assert found == ["Decode.plan (line 7): takes any keyword and hands it to nothing that can be read"]


@pytest.mark.parametrize(("change", "with_what"), [
    ("merge_states(v=states, s=scores)", "merge_states(v=states, lse=scores)"),
    ("q_data_type=store.dtype", "query_type=store.dtype"),
    ("return_lse=True", "returns_lse=True"),
    ("append_key=k, ", ""),
    ("library.BatchPrefillWithPagedKVCacheWrapper", "library.BatchPrefill"),
])
def test_a_call_of_the_adapter_that_drifts_is_caught(change: str, with_what: str) -> None:
    assert change in SOURCE
    assert differences(SOURCE.replace(change, with_what), flashinfer)


@pytest.mark.parametrize("source", [CALLER.replace("q=1", "1"), CALLER.replace("q=1", "**some"), CALLER.replace("q=1", "*some")])
def test_a_call_that_cannot_be_held_by_name_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"line 9: Decode.run must be called with named arguments alone"):
        differences(source, SimpleNamespace(Decode=decode(plan=Handing.plan, _plan=Handing._plan), append=append))
