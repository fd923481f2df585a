"""What the documents cite exists, and the checker that says so can fail (law I5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from citations import Broken, Checker, is_citation

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_citation_resolves(document: Path) -> None:
    broken = Checker(ROOT).broken(document)
    assert not broken, "\n" + "\n".join(map(str, broken))


@pytest.mark.parametrize("name", ["architecture.md", "glossary.md"])
def test_the_documents_that_describe_code_do_cite_it(name: str) -> None:
    """A checker that finds nothing to check proves nothing."""
    assert len(Checker(ROOT).cited(ROOT / "docs" / name)) >= 10


MODULE = """\
from __future__ import annotations
import enum
from kvsched.low import Deep as Renamed, constant
LIMIT: int = 3
a, b = 1, 2
if LIMIT:
    def guarded(): ...
class Base:
    def inherited(self): ...
class Thing(Base):
    field: int
    __slots__ = ("x",)
    class Inner:
        value = 1
    def method(self):
        self.made = 1
        local = 2
def function(): ...
"""


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    package = tmp_path / "src" / "kvsched"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("from kvsched.mod import Thing\nfrom kvsched.mod import Gone\n")
    (package / "mod.py").write_text(MODULE)
    (package / "low.py").write_text("constant = 1\nclass Deep:\n    def dive(self): ...\n")
    (package / "sub" / "__init__.py").write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("")
    return Checker(tmp_path)


@pytest.mark.parametrize("span", [
    "src/kvsched/mod.py", "src/kvsched/mod.py:Thing", "src/kvsched/mod.py:Thing.method", "src/kvsched/mod.py::function",
    "src/kvsched/mod.py:Thing.method()", "src/kvsched/mod.py:LIMIT", "src/kvsched/mod.py:b", "src/kvsched/mod.py:guarded",
    "src/kvsched/mod.py:Thing.field", "src/kvsched/mod.py:Thing.made", "src/kvsched/mod.py:Thing.Inner.value",
    "src/kvsched/mod.py:Thing.inherited", "src/kvsched/mod.py:Renamed.dive", "src/kvsched/", "docs/other.md", "kvsched.mod",
    "kvsched.sub", "kvsched.mod.Thing", "kvsched.Thing.method", "kvsched.mod.Renamed.dive()", "kvsched.mod.constant",
])
def test_a_good_citation_resolves(checker: Checker, span: str) -> None:
    assert is_citation(span)
    assert checker.why_not(span) is None


@pytest.mark.parametrize(("span", "why"), [
    ("src/kvsched/gone.py", "no such file"),
    ("mod.py", "no such file"),
    ("src/kvsched/gone/", "no such folder"),
    ("src/kvsched/mod.py:Absent", "src/kvsched/mod.py has no Absent"),
    ("src/kvsched/mod.py:12", "src/kvsched/mod.py has no 12"),
    ("src/kvsched/mod.py:Thing.absent", "Thing in src/kvsched/mod.py has no absent"),
    ("src/kvsched/mod.py:Thing.local", "Thing in src/kvsched/mod.py has no local"),
    ("src/kvsched/mod.py:Thing.Inner.absent", "Inner in src/kvsched/mod.py has no absent"),
    ("src/kvsched/mod.py:function.deeper", "function in src/kvsched/mod.py is no class"),
    ("src/kvsched/mod.py:Renamed.absent", "Deep in src/kvsched/low.py has no absent"),
    ("docs/other.md:Section", "only a Python file has symbols"),
    ("kvsched.gone", "src/kvsched/__init__.py has no gone"),
    ("kvsched.Gone", "src/kvsched/mod.py has no Gone"),
    ("kvsched.mod.absent()", "src/kvsched/mod.py has no absent"),
    ("kvsched.sub.absent", "src/kvsched/sub/__init__.py has no absent"),
    ("kvsched_kernels.store", "no module kvsched_kernels"),
])
def test_a_planted_bad_citation_is_caught(checker: Checker, span: str, why: str) -> None:
    assert is_citation(span)
    assert why in (checker.why_not(span) or "")


@pytest.mark.parametrize("span", ["make test", "kvsched replay --json", "schedule()", "page_size", "n > 1", "id/0", "GET /x", "a.b"])
def test_what_is_no_citation_is_left_alone(checker: Checker, span: str) -> None:
    assert not is_citation(span)
    assert checker.why_not(span) is None


def test_a_bad_citation_is_named_with_file_and_line(checker: Checker) -> None:
    document = checker.root / "docs" / "page.md"
    document.write_text(
        "# Page\n\nGood: `kvsched.mod.Thing`. Bad: `src/kvsched/mod.py:Nope`.\n\n```python\nimport `kvsched.gone`\n```\n"
        "See [other](other.md), [out](https://example.org/x), [part](#page), [bad](missing.md#x).\n"
    )
    broken = checker.broken(document)
    assert broken == [
        Broken("docs/page.md", 3, "src/kvsched/mod.py:Nope", "src/kvsched/mod.py has no Nope"),
        Broken("docs/page.md", 8, "missing.md", "the link leads nowhere"),
    ]
    assert str(broken[0]) == "docs/page.md:3: `src/kvsched/mod.py:Nope`: src/kvsched/mod.py has no Nope"
    assert checker.cited(document) == ["kvsched.mod.Thing", "src/kvsched/mod.py:Nope"]
