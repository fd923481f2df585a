"""What the adapter may import: plans go in, no decision comes out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "src" / "kvsched_kernels"
FILES = sorted(HOME.glob("*.py"))
ALLOWED = {"attrs", "numpy", "torch", "kvsched.plan", "kvsched.units", "kvsched.errors"}
MORE = {"flashinfer.py": {"flashinfer"}, "meter.py": {"kvsched.sizing.account", "kvsched.sizing.amounts"}}
"""What single files may import besides: the package that one wraps, and the line items that the other measures."""


def imported(path: Path) -> set[str]:
    """Modules of third parties and of kvsched that a file names, lazy imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    out = {name if name.startswith("kvsched.") else name.partition(".")[0] for name in found}
    return out - set(sys.stdlib_module_names) - {"__future__", "kvsched_kernels"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_imports_plans_and_tensors_alone(path: Path) -> None:
    assert imported(path) <= ALLOWED | MORE.get(path.name, set())


def test_no_file_is_forgotten() -> None:
    assert {"batch.py", "flashinfer.py", "merge.py", "meter.py", "offload.py", "graphs.py", "reference.py", "store.py"} <= {p.name for p in FILES}
    assert not [path for path in HOME.rglob("*.py") if path.parent != HOME]


def test_importing_it_does_not_need_flashinfer() -> None:
    code = "import sys; sys.modules['flashinfer'] = None; import kvsched_kernels, kvsched_kernels.flashinfer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
