"""The policy for skips and expected failures, held against every test file (law I3)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from skips import RERUN, breaches

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "src").rglob("testing/**/*.py"), *(ROOT / "examples").rglob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_test_file_hides_a_failure(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8")) == []


def test_nothing_is_run_again_until_it_passes() -> None:
    pins = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").lower().replace("-", "_")
    assert not [name for name in RERUN if re.search(rf"^{name}==", pins, re.MULTILINE)]
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert config["xfail_strict"] is True
    assert "error" in config["filterwarnings"]
    for text in (config["addopts"], (ROOT / "Makefile").read_text(encoding="utf-8"), (ROOT / ".ci" / "run").read_text(encoding="utf-8")):
        assert not re.search(r"--reruns|--retries|--last-failed|--lf\b|--deselect|--ignore|\|\| *true", text)


@pytest.mark.parametrize("line", [
    'pytest.skip("the traces are not here")',
    'pytest.skip(reason="the traces are not here")',
    'x = pytest.importorskip("torch", reason="the adapter needs torch")',
    '@pytest.mark.skipif(not HERE, reason="no GPU")\ndef test(): ...',
    '@pytest.mark.xfail(strict=True, reason="known")\ndef test(): ...',
    "head.skip()",
    'try:\n    x = f()\nexcept OSError:\n    pytest.skip("no such device")',
    "try:\n    assert f()\nexcept ValueError:\n    pass",
    'try:\n    f()\nexcept AssertionError as error:\n    assert "x" in str(error)',
    "with contextlib.suppress(KeyError):\n    f()",
    "pytestmark = pytest.mark.soak",
])
def test_an_honest_line_passes(line: str) -> None:
    assert breaches(line) == []


@pytest.mark.parametrize(("line", "expected"), [
    ("pytest.skip()", "1: pytest.skip without a reason"),
    ('pytest.skip("")', "1: pytest.skip without a reason"),
    ("skip()", "1: skip without a reason"),
    ("@pytest.mark.skip\ndef test(): ...", "1: pytest.mark.skip without a reason"),
    ("@pytest.mark.skip()\ndef test(): ...", "1: pytest.mark.skip without a reason"),
    ("@pytest.mark.skipif(True)\ndef test(): ...", "1: pytest.mark.skipif without a reason"),
    ('@pytest.mark.skipif(True, reason=" ")\ndef test(): ...', "1: pytest.mark.skipif without a reason"),
    ('pytest.importorskip("torch")', "1: pytest.importorskip without a reason"),
    ("@pytest.mark.xfail\ndef test(): ...", "1: pytest.mark.xfail without a reason"),
    ('@pytest.mark.xfail(reason="known")\ndef test(): ...', "1: xfail without strict=True"),
    ('@pytest.mark.xfail(strict=False, reason="known")\ndef test(): ...', "1: xfail without strict=True"),
    ('pytest.xfail("known")', "1: pytest.xfail() turns a failure into a pass"),
    ("@pytest.mark.flaky(reruns=3)\ndef test(): ...", "1: pytest.mark.flaky runs failed tests again"),
    ("import tenacity", "1: imports tenacity, which runs failed tests again"),
    ("from flaky import flaky", "1: imports flaky, which runs failed tests again"),
    ('@unittest.skip("x")\ndef test(): ...', "1: unittest.skip: the rules are held for pytest's own marks"),
    ('try:\n    assert f()\nexcept AssertionError:\n    pytest.skip("hm")', "1: a skip that a failing assertion would reach"),
    ('try:\n    f()\nexcept Exception:\n    pytest.skip("hm")', "1: a skip that a failing assertion would reach"),
    ('try:\n    f()\nexcept (KeyError, BaseException):\n    pytest.skip("hm")', "1: a skip that a failing assertion would reach"),
    ('try:\n    f()\nexcept:\n    if x:\n        pytest.skip("hm")', "1: a skip that a failing assertion would reach"),
    ("try:\n    assert f()\nexcept Exception:\n    pass", "1: a handler that swallows a failing assertion"),
    ("with contextlib.suppress(AssertionError):\n    assert f()", "1: a suppress that swallows a failing assertion"),
])
def test_a_planted_breach_is_caught(line: str, expected: str) -> None:
    assert breaches(line) == [expected]
