"""Every test double against what it stands in for, and proof that the guard can fail (law I4)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from typing import Any

import attrs
import flashinfer
import pytest
from checkout import ROOT
from doubles import lookalikes, members, missing_members, unlike_members

from kvsched import Scheduler, protocols
from kvsched.order.orders import View
from kvsched.sim.cost import CostModel

SHAPES: dict[str, Any] = {
    **{name: getattr(protocols, name) for name in ("Pool", "TreeCache", "Handle", "Executor", "EventSink")},
    "CostModel": CostModel, "View": View, "Scheduler": Scheduler,
    "FlashInfer decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper, "FlashInfer prefill": flashinfer.BatchPrefillWithPagedKVCacheWrapper,
}
"""What a double can stand in for: a protocol, or a real class that is handed around."""

REAL = frozenset({"PagePool", "RadixCache", "NullCache", "Scheduler", "LinearCost", "RuleBasedStateMachine", "Protocol"})
"""Real classes, whose heirs have all of their members (a planted fault is such an heir), and state machines, whose rules
are called after what they call. A protocol is no double."""

DOUBLES: dict[str, str] = {
    "src/kvsched/testing/executor.py:SimulatedExecutor": "Executor",
    "src/kvsched/testing/host.py:_Ear": "EventSink",
    "src/kvsched/sim/replay.py:ConstantExecutor": "Executor",
    "tests/sim/test_replay.py:PerRow": "CostModel",
    "tests/core/test_orders.py:Look": "View",
    "tests/test_cases.py:Ear": "EventSink",
    "tests/laws/test_d_cache.py:Ear": "EventSink",
    "tests/test_bad_input.py:Meddler": "EventSink",
    "tests/kernels/emulated_flashinfer.py:BatchDecodeWithPagedKVCacheWrapper": "FlashInfer decode",
    "tests/kernels/emulated_flashinfer.py:BatchPrefillWithPagedKVCacheWrapper": "FlashInfer prefill",
}
"""Every class of tests/, of kvsched.testing and of the simulator that is put in the place of a real object: where it
stands, and what it stands in for. A class that looks like one and is missing here fails the search below."""

NO_DOUBLES: dict[str, str] = {
    "src/kvsched/testing/cache_model.py:PlainCache": "a model, compared with a cache and never put in its place",
    "src/kvsched/testing/host.py:CheckedHost": "a host, which drives a scheduler",
    "src/kvsched/testing/model.py:PlainModel": "a model, compared with a scheduler and never put in its place",
    "tests/test_executor.py:Odd": "planted drift, which its test sees caught",
}
"""Classes that share method names with a protocol and are never put in its place: where, and what they are."""

SEARCHED = [*sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "src" / "kvsched").rglob("testing/**/*.py")),
            *sorted((ROOT / "src" / "kvsched" / "sim").rglob("*.py"))]


def load(place: str) -> Any:
    """The class at `path:Name`, from the package or from a test file; one that stands inside a function is made anew."""
    file, _, name = place.partition(":")
    path = ROOT / file
    if path.is_relative_to(ROOT / "src"):
        module = importlib.import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    else:
        spec = importlib.util.spec_from_file_location(f"double_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name and not hasattr(module, name):
            exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
    return getattr(module, name)


@pytest.mark.parametrize("place", DOUBLES)
def test_a_double_has_drifted_from_nothing(place: str) -> None:
    double, real = load(place), SHAPES[DOUBLES[place]]
    assert missing_members(double, real) == []
    assert unlike_members(double, real) == []


def test_every_class_that_looks_like_a_double_is_listed() -> None:
    shapes = {name: frozenset(members(real)) for name, real in SHAPES.items()}
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{name}": shape
        for path in SEARCHED for name, shape in lookalikes(path.read_text(encoding="utf-8"), shapes, REAL).items()
    }
    unlisted = {place: shape for place, shape in found.items() if place not in DOUBLES and place not in NO_DOUBLES}
    assert not unlisted, f"list each in DOUBLES, or in NO_DOUBLES with the reason: {unlisted}"


def test_nothing_is_listed_that_is_not_there() -> None:
    for place in (*DOUBLES, *NO_DOUBLES):
        file, _, name = place.partition(":")
        path = ROOT / file
        assert path.is_file(), place
        assert f"class {name}" in path.read_text(encoding="utf-8"), place


class Real:
    """What the planted doubles below stand in for."""

    size: int

    def grow(self, by: int, *, quietly: bool = False) -> int:
        return by if quietly else self.size + by

    def shrink(self, by: int) -> int:
        return self.size - by

    @property
    def empty(self) -> bool:
        return self.size == 0


def test_every_missing_member_is_named_at_once() -> None:
    class Drifted:
        def grow(self, by: int, *, quietly: bool = False) -> int:
            return by

    assert missing_members(Drifted, Real) == ["empty", "shrink", "size"]
    assert missing_members(Real, Real) == []
    assert missing_members(Real(), Real) == []


@pytest.mark.parametrize(("name", "real"), SHAPES.items())
def test_a_double_that_lacks_a_member_of_a_protocol_is_caught(name: str, real: Any) -> None:
    shared = sorted(members(real))
    for lost in shared:
        double = type(f"Half{name}", (), {member: None for member in shared if member != lost})
        assert missing_members(double, real) == [lost]


def test_a_double_with_another_signature_is_caught() -> None:
    class Narrow:
        size = 1
        empty = False

        def grow(self, amount: int) -> int:
            return amount

        shrink = 3

    class Demanding:
        def shrink(self, by: int, why: str) -> int:
            return by

        def empty(self) -> bool:
            return True

    class Swapped:
        def grow(self, why: str = "", by: int = 1, *, quietly: bool = False) -> int:
            return by

    class Open:
        def grow(self, *args: Any, **kwargs: Any) -> int:
            return 1

        def shrink(self, by: int, why: str = "") -> int:
            return by

    assert unlike_members(Narrow, Real) == [
        "grow: takes no by", "grow: takes no quietly", "grow: demands amount", "shrink: one is a method and the other is not",
    ]
    assert unlike_members(Demanding, Real) == ["empty: one is a method and the other is not", "shrink: demands why"]
    assert unlike_members(Swapped, Real) == ["grow: takes by in another place"]
    assert unlike_members(Open, Real) == []


def test_a_record_with_slots_shows_its_fields() -> None:
    @attrs.frozen
    class Record:
        length: int
        pages: int

    assert missing_members(Record, protocols.Handle) == []


def test_lookalikes_are_found_by_their_own_methods() -> None:
    source = (
        "class FakePool:\n    def alloc(self, n): ...\n    def release(self, pages): ...\n"
        "class Sink:\n    def event(self, event): ...\n"
        "class Other:\n    def run(self, a): ...\n    def check(self): ...\n"
        "class Half:\n    def alloc(self, n): ...\n"
    )
    shapes = {"Pool": frozenset({"alloc", "release", "check"}), "EventSink": frozenset({"event"})}
    assert lookalikes(source, shapes) == {"FakePool": "Pool", "Sink": "EventSink"}


def test_heirs_of_a_real_class_are_left_out() -> None:
    source = (
        "class Leaky(PagePool):\n    def alloc(self, n): ...\n    def release(self, pages): ...\n"
        "class Worse(Leaky):\n    def alloc(self, n): ...\n    def release(self, pages): ...\n"
        "class Fake(Base):\n    def alloc(self, n): ...\n    def release(self, pages): ...\n"
    )
    shapes = {"Pool": frozenset({"alloc", "release", "check"})}
    assert lookalikes(source, shapes, frozenset({"PagePool"})) == {"Fake": "Pool"}


def test_a_double_in_a_test_file_is_loaded_from_there() -> None:
    assert load("tests/project/test_doubles.py:Real").__name__ == "Real"
    assert missing_members(load("tests/project/test_doubles.py:Drifted"), Real) == ["empty", "shrink", "size"]
    with pytest.raises(AttributeError, match="Absent"):
        load("tests/project/test_doubles.py:Absent")
