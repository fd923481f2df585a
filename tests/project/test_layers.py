"""The one-way flow: the table of docs/architecture.md against the imports of the code (DESIGN section 3)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rooms import Room, imports, rooms, violations

from kvsched.request import LIFECYCLE

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src"


def tree() -> tuple[dict[str, str], frozenset[str]]:
    """Every module of the library by name, and which of them are packages."""
    sources, packages = {}, set()
    for path in sorted((SOURCE / "kvsched").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, frozenset(packages)


def test_the_code_keeps_the_table() -> None:
    sources, packages = tree()
    found = violations(sources, rooms(DOCUMENT.read_text(encoding="utf-8")), packages)
    assert not found, "\n" + "\n".join(found)


def test_the_scheduler_imports_no_implementation() -> None:
    """What the table's levels are for: the decision reads the protocols, and the host chooses what stands behind them."""
    table = {room.name: room for room in rooms(DOCUMENT.read_text(encoding="utf-8"))}
    assert table["kvsched.memory"].level >= table["kvsched.scheduler"].level
    assert table["kvsched.protocols"].level < min(table["kvsched.order"].level, table["kvsched.admission"].level)


def test_only_the_edges_know_other_packages() -> None:
    table = rooms(DOCUMENT.read_text(encoding="utf-8"))
    for room in table:
        extra = room.third_parties - {"attrs", "attr", "numpy"}
        if room.name.startswith("kvsched.cli"):
            assert extra <= {"click", "rich"}
        elif room.name.startswith("kvsched.testing"):
            assert extra <= {"hypothesis", "pytest"}
        elif room.name.startswith("kvsched.hosts"):
            assert extra <= {"transformers", "vllm"}
        else:
            assert not extra, f"{room.name} may import {sorted(extra)}"


TABLE = (
    Room(0, "kvsched.units", pure=True, third_parties=frozenset({"numpy"})),
    Room(1, "kvsched.plan", pure=True, third_parties=frozenset({"numpy"})),
    Room(2, "kvsched.order", pure=True, third_parties=frozenset()),
    Room(2, "kvsched.memory", pure=True, third_parties=frozenset()),
    Room(3, "kvsched", pure=True, third_parties=frozenset()),
    Room(4, "kvsched.sim", pure=False, third_parties=frozenset({"rich"})),
)
CLEAN = {
    "kvsched": "from kvsched.plan import Plan\nfrom .order import fcfs\n",
    "kvsched.units": "import numpy as np\nimport enum\n",
    "kvsched.plan": "from __future__ import annotations\nfrom kvsched import units\n",
    "kvsched.order": "from kvsched.order.fcfs import Fcfs\n",
    "kvsched.order.fcfs": "from ..units import Pages\n",
    "kvsched.memory": "from kvsched.units import Pages\n",
    "kvsched.sim": "import time, rich\nfrom kvsched import Plan\n",
}
PACKAGES = frozenset({"kvsched", "kvsched.order"})


def test_a_clean_tree_has_no_violations() -> None:
    assert violations(CLEAN, TABLE, PACKAGES) == []


@pytest.mark.parametrize(("module", "text", "expected"), [
    ("kvsched.units", "from kvsched.plan import Plan", "level 0 imports kvsched.plan of level 1"),
    ("kvsched.units", "def f():\n    from kvsched.plan import Plan", "level 0 imports kvsched.plan of level 1"),
    ("kvsched.units", "if TYPE_CHECKING:\n    from kvsched import plan", "level 0 imports kvsched.plan of level 1"),
    ("kvsched.order", "from kvsched.memory import RadixCache", "level 2 imports kvsched.memory of level 2"),
    ("kvsched.order", "from ..memory import RadixCache", "level 2 imports kvsched.memory of level 2"),
    ("kvsched.order", "from .. import memory", "level 2 imports kvsched.memory of level 2"),
    ("kvsched.plan", "from kvsched import Request", "level 1 imports kvsched of level 3"),
    ("kvsched.plan", "import torch.nn", "imports torch.nn, which nothing in kvsched may"),
    ("kvsched.sim", "def f():\n    import torch", "imports torch, which nothing in kvsched may"),
    ("kvsched.sim", "import kvsched_kernels.store", "imports kvsched_kernels.store, which nothing"),
    ("kvsched.order", "import numpy as np", "imports numpy, and kvsched.order may import no third party"),
    ("kvsched.plan", "from click import command", "imports click, and kvsched.plan may import numpy"),
    ("kvsched.plan", "from time import monotonic", "imports time, and kvsched.plan is core"),
    ("kvsched.plan", "import os.path", "imports os, and kvsched.plan is core"),
    ("kvsched.plan", "import random", "imports random, and kvsched.plan is core"),
    ("kvsched.plan", "import logging", "imports logging, and kvsched.plan is core"),
    ("kvsched.plan", "import importlib", "imports importlib, and kvsched.plan is core"),
    ("kvsched.plan", "x = np.random.default_rng(0)", "uses numpy's random generators"),
    ("kvsched.plan", "print('here')", "calls print()"),
    ("kvsched.plan", "t = __import__('torch')", "calls __import__()"),
    ("kvsched.order.fcfs", "from kvsched.order import Fcfs", "import cycle among kvsched.order, kvsched.order.fcfs"),
    ("kvsched.stray", "", "kvsched.stray: stands in no room of the table"),
    ("kvsched.plan", "import kvsched.stray", "imports kvsched.stray, which is in no room"),
])
def test_a_planted_violation_is_caught(module: str, text: str, expected: str) -> None:
    found = violations({**CLEAN, module: text}, TABLE, PACKAGES)
    assert any(expected in line for line in found), found
    assert all(line.startswith((module, "import cycle")) for line in found), found


def test_a_row_without_a_room_is_caught() -> None:
    ghost = Room(5, "kvsched.ghost", pure=True, third_parties=frozenset())
    assert violations(CLEAN, (*TABLE, ghost), PACKAGES) == ["kvsched.ghost: stands in the table and holds no module"]


def test_the_table_is_read_as_written() -> None:
    text = "| Level | Room | Kind | Third parties | What |\n| --- | --- | --- | --- | --- |\n| 0 | `kvsched.units` | core | numpy, attrs | x |\n| 4 | `kvsched.sim` | edge | none | y |\n\n| 9 | `other` | core | none | - |\n"
    assert rooms(text) == (
        Room(0, "kvsched.units", pure=True, third_parties=frozenset({"numpy", "attrs"})),
        Room(4, "kvsched.sim", pure=False, third_parties=frozenset()),
    )
    with pytest.raises(ValueError, match="a row must read"):
        rooms("| Level | Room | Kind |\n| --- | --- | --- |\n| one | `kvsched.units` | core | numpy |\n")


def test_relative_imports_are_resolved_from_a_package_and_from_a_module() -> None:
    known = frozenset({"kvsched", "kvsched.order", "kvsched.order.fcfs", "kvsched.units"})
    inside = [found.target for found in imports("kvsched.order", ast.parse("from . import fcfs\nfrom .. import units"), known, package=True)]
    beside = [found.target for found in imports("kvsched.order.fcfs", ast.parse("from . import x\nfrom .. import units"), known)]
    assert inside == ["kvsched.order.fcfs", "kvsched.units"]
    assert beside == ["kvsched.order", "kvsched.units"]


def diagram(text: str) -> set[tuple[str, str, str]]:
    """The transitions (from, to, cause) that a document's state diagram draws."""
    return set(re.findall(r"^ +(\w+) --> (\w+): (\w+)$", text, re.MULTILINE))


def test_the_diagram_of_the_lifecycle_is_the_table() -> None:
    table = {(start.value, end.value, cause.value) for (start, cause), end in LIFECYCLE.items()}
    assert diagram(DOCUMENT.read_text(encoding="utf-8")) == table
    assert diagram("    waiting --> running: admit\n  x --> y: z\n") == {("waiting", "running", "admit"), ("x", "y", "z")}
