"""The package as a user gets it: what its import costs, its public names, its doctests, and the built wheel."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT, tracked

import kvsched
import kvsched_kernels
from kvsched import units, verdict
from kvsched.admission import budget, ledger
from kvsched.verdict import Verdict, decide

COST = """
import json, sys, time
import numpy, numpy.typing
before = set(sys.modules)
start = time.perf_counter()
import kvsched
spent = time.perf_counter() - start
print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.modules), spent]))
"""


def test_the_import_is_cheap_and_brings_no_edge_package(record_property: Callable[[str, object], None]) -> None:
    """Modules are counted, so that the answer is the same on every machine; the time is only reported."""
    ran = subprocess.run([sys.executable, "-c", COST], cwd=ROOT, capture_output=True, text=True, check=True)
    new, everything, spent = json.loads(ran.stdout)
    tops = {name.split(".")[0] for name in everything}
    assert not tops & {"torch", "click", "rich", "hypothesis", "pytest", "kvsched_kernels"}
    foreign = [name for name in new if name.split(".")[0] not in sys.stdlib_module_names | {"kvsched"}]
    record_property("import_ms_beyond_numpy", round(spent * 1e3, 1))
    record_property("third_party_modules_beyond_numpy", len(foreign))
    assert len(foreign) <= 60, foreign
    assert {name.split(".")[0] for name in foreign} <= {"attr", "attrs", "numpy"}


def test_the_package_file_is_imports_and_names_only() -> None:
    path = ROOT / "src" / "kvsched" / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    rest = tree.body[1:]
    names = [node for node in rest if isinstance(node, ast.Assign)]
    assert len(names) == 1, "one assignment: __all__"
    assert [target.id for target in names[0].targets if isinstance(target, ast.Name)] == ["__all__"]
    assert all(isinstance(node, ast.ImportFrom) for node in rest if node not in names)
    imported = {alias.asname or alias.name for node in rest if isinstance(node, ast.ImportFrom) for alias in node.names}
    listed = ast.literal_eval(names[0].value)
    assert sorted(listed) == listed, "in order, so that a change shows as one line"
    assert set(listed) == imported - {"annotations"}


def test_the_public_names_are_these() -> None:
    """A name that leaves or joins the public API is a decision: it changes this list and the changelog."""
    assert kvsched.__all__ == [
        "Accepted", "Agreed", "Chunk", "Condition", "Deltas", "Ended", "Event", "Explanation", "Finish", "Flushed", "Health",
        "HostError",
        "InternalError", "KvschedError", "Namespace", "NullCache", "Outcome", "PagePool", "Plan", "RadixCache", "RefusalReason",
        "Refused", "Request", "Scheduler", "SchedulerConfig", "State", "Status", "StepResult", "WaitReason",
    ]
    assert all(hasattr(kvsched, name) for name in kvsched.__all__)


def test_the_built_wheel_works_by_itself(tmp_path: Path) -> None:
    """The wheel, not the checkout: it is built from tracked files, installed into a folder of its own, and used from there."""
    tree, wheels, target = tmp_path / "tree", tmp_path / "wheels", tmp_path / "target"
    for path in tracked():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, tree], check=True, capture_output=True)
    (wheel,) = wheels.glob("kvsched-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    shipped = {path.relative_to(ROOT / "src").as_posix() for path in tracked() if path.is_relative_to(ROOT / "src" / "kvsched")}
    assert shipped <= set(held), sorted(shipped - set(held))
    assert "kvsched/py.typed" in held
    assert any(name.endswith("LICENSE") for name in held)
    assert not [name for name in held if name.startswith(("tests", "docs", "examples"))]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", target, wheel], check=True, capture_output=True)
    use = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import kvsched\n"
        f"assert kvsched.__file__.startswith({str(target)!r}), kvsched.__file__\n"
        "from importlib.metadata import version; print(version('kvsched'))\n"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", use], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == metadata.version("kvsched")


HOSTS = ("kvsched.hosts.vllm", "kvsched.hosts.transformers")
"""Rooms that need a host installed; tests/hosts imports them where it is."""


def modules(home: ModuleType, names: str) -> list[str]:
    """Modules of a package that can be imported without a host."""
    out = []
    for found in pkgutil.iter_modules(home.__path__, names):
        if not found.name.startswith(HOSTS):
            out.append(found.name)
            if found.ispkg:
                out += modules(importlib.import_module(found.name), f"{found.name}.")
    return out


MODULES = sorted([*modules(kvsched, "kvsched."), *modules(kvsched_kernels, "kvsched_kernels.")])


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_there_are_doctests() -> None:
    """A collector that finds nothing proves nothing."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 5


def test_the_decision_takes_no_chunk_size() -> None:
    """Law B1: a chunk bounds the compute of a step, so it must have no way into the decision or into a need."""
    assert decide(1, 1, 1) is Verdict.ADMIT
    with pytest.raises(TypeError, match="chunk_tokens"):
        decide(1, 1, 1, chunk_tokens=512)  # type: ignore[call-arg]
    assert budget.reach(100, 50, guaranteed=True, ratio=1.0, clip=1) == 100
    with pytest.raises(TypeError, match="chunk_tokens"):
        budget.reach(100, 50, guaranteed=True, ratio=1.0, clip=1, chunk_tokens=512)  # type: ignore[call-arg]
    for module in (verdict, budget, units):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            assert not [word for word in inspect.signature(function).parameters if "chunk" in word], f"{module.__name__}.{name}"
    for module in (verdict, budget, units, ledger):
        tree = ast.parse(inspect.getsource(module))
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not read & {"chunk_tokens", "long_prefill_tokens", "max_step_tokens"}, module.__name__


def test_a_large_request_is_charged_whole_and_not_by_its_chunk() -> None:
    """The case of law B1: charged its 512-token chunk, a request of 327,680 tokens is under-charged 640-fold."""
    slots = units.total_slots(327_680, 1)
    assert budget.reach(slots, 327_680, guaranteed=False, ratio=0.098, clip=4096) == 327_680 == 640 * 512
