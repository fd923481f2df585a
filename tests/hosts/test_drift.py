"""The comparison of a host with what an adapter relies on: what holds, what differs, and that it can fail."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsched.hosts.drift import Expected, differences, fields, find, members, names, parameters

HOST = """\
import dataclasses, enum, abc
class Interface(abc.ABC):
    @abc.abstractmethod
    def schedule(self, throttle: bool = False, *, limit=None, marker=object()): ...
    @property
    @abc.abstractmethod
    def state(self): ...
    def concrete(self): ...
class Engine:
    def __init__(self):
        self.scheduler = None
        self.depth = 2
    def step(self):
        if self.scheduler.connector is None:
            self.scheduler.schedule()
        return self.other.thing
@dataclasses.dataclass
class Output:
    ids: list
    count: int
    extra: dict = dataclasses.field(default_factory=dict)
    hidden: int = dataclasses.field(init=False)
    def __post_init__(self):
        self.made = 1
class Status(enum.IntEnum):
    NEW = 1
    DONE = 2
def function(a, b=1, *rest, c=(), **more): ...
class Maker:
    @classmethod
    def make(cls, config, rank=0): ...
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "a_host_for_drift"
    (tmp_path / f"{name}.py").write_text(HOST)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def contract(host: str) -> dict[str, Expected]:
    return {
        f"{host}.Interface": Expected(abstract=names("schedule state"), members=names("concrete")),
        f"{host}.Interface.schedule": Expected(signature="(self, throttle=False, *, limit=None, marker=Ellipsis)"),
        f"{host}.Output": Expected(fields=names("ids count extra"), members=names("hidden made")),
        f"{host}.Status": Expected(values=names("NEW DONE")),
        f"{host}.function": Expected(signature="(a, b=1, *rest, c=Ellipsis, **more)"),
        f"{host}.Maker.make": Expected(signature="(cls, config, rank=0)"),
        f"{host}.Engine": Expected(members=names("depth step")),
        host: Expected(reads=("scheduler", names("connector schedule"))),
    }


def test_a_host_as_expected_has_no_difference(host: str) -> None:
    assert differences(contract(host)) == []


def test_every_difference_is_named_at_once(host: str) -> None:
    expected = {
        **contract(host),
        f"{host}.Interface": Expected(abstract=names("schedule shutdown"), members=names("absent")),
        f"{host}.Interface.schedule": Expected(signature="(self)"),
        f"{host}.Output": Expected(fields=names("ids gone"), members=names("made never")),
        f"{host}.Status": Expected(values=names("NEW OLD")),
        f"{host}.gone": Expected(signature="()"),
        f"{host}.Maker.gone": Expected(signature="()"),
        "no_such_host.thing": Expected(),
        host: Expected(reads=("scheduler", names("schedule other"))),
    }
    assert differences(expected) == [
        f"{host}.Interface: has no absent",
        f"{host}.Interface: abstract method shutdown is gone",
        f"{host}.Interface: abstract method state is new",
        f"{host}.Interface.schedule: takes (self, throttle=False, *, limit=None, marker=Ellipsis) and not (self)",
        f"{host}.Output: field gone is gone",
        f"{host}.Output: field count is new and required",
        f"{host}.Output: has no never",
        f"{host}.Status: value OLD is gone",
        f"{host}.Status: value DONE is new",
        f"{host}: attribute read of self.scheduler other is gone",
        f"{host}: attribute read of self.scheduler connector is new",
        f"{host}.gone: is gone",
        f"{host}.Maker.gone: is gone",
        "no_such_host.thing: is gone",
    ]


def test_a_thing_of_another_kind_is_a_difference(host: str) -> None:
    assert differences({
        f"{host}.Status": Expected(fields=names("a"), abstract=names("b")),
        f"{host}.function": Expected(values=names("A"), reads=("scheduler", names("c"))),
        f"{host}.Status.NEW": Expected(signature="()"),
    }) == [
        f"{host}.Status: is no record with fields",
        f"{host}.Status: abstract method b is gone",
        f"{host}.function: value A is gone",
        f"{host}.function: attribute read of self.scheduler c is gone",
        f"{host}.Status.NEW: takes nothing: it cannot be called and not ()",
    ]


def test_names_are_found_in_modules_and_classes() -> None:
    assert find("kvsched.hosts.drift.Expected") is Expected
    assert find("kvsched.hosts.drift") is sys.modules["kvsched.hosts.drift"]
    assert "NEW" in members(enum.Enum("Status", "NEW"))
    assert fields(int) is None
    assert parameters(Expected.__init__).startswith("(self, signature=None")
    with pytest.raises(ImportError):
        find("no_such_module_at_all")


def test_a_broken_host_is_no_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_broken_host.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        find("a_broken_host.thing")
