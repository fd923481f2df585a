"""No tracked text names a machine, a package index, or unfinished work."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT, tracked

FORBIDDEN = {
    "an absolute path of some machine": re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|workspace)/\w"),
    "the address of a package index": re.compile(
        r"https?://[^\s/]*(?:pypi|pythonhosted|npmjs|crates\.io|rubygems|proxy\.golang|anaconda|index\.docker)", re.IGNORECASE
    ),
    "a marker of unfinished work": re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
    "a leftover of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}


def findings(name: str, text: str) -> list[str]:
    """Every forbidden piece of text, as `file:line: what`."""
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]}"
        for what, pattern in FORBIDDEN.items() for match in pattern.finditer(text)
    ]


def test_no_tracked_text_names_a_machine_or_an_index() -> None:
    out, checkout = [], str(ROOT)
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        name, text = path.relative_to(ROOT).as_posix(), data.decode("utf-8")
        out += findings(name, text)
        if len(ROOT.parts) > 2 and checkout in text:
            out.append(f"{name}: names this checkout, {checkout}")
    assert not out, "\n" + "\n".join(out)


@pytest.mark.parametrize("text", [
    "see {slash}work/main/x", "a\nin {slash}home/me/y", "https:{slash}/pypi.org/simple", "http:{slash}/files.pythonhosted.org/p",
    "# TO{nothing}DO: later", "<<<<<<{nothing}< HEAD",
])
def test_a_planted_forbidden_text_is_found(text: str) -> None:
    assert len(findings("file", text.format(slash="/", nothing=""))) == 1
