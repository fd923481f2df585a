"""What a snapshot must say, given the books (laws A1, B3, B4, B6, B9, C1, F1, and the totals)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvsched.testing.account import Books, law
from kvsched.units import pages_for


def check_state(books: Books, state: Mapping[str, Any]) -> None:
    """Compare a snapshot with what it must be. O(everything)."""
    terms = {key: state[key] for key in ("free", "cached", "locked", "private", "quarantined")}
    law("A1 accounting equation", sum(terms.values()) == state["usable"] == books.usable and min(terms.values()) >= 0, terms, books.usable)
    law("step", state["step"] == books.step, state["step"], books.step)
    names = [a.id for a in books.order]
    law("B9 residents in order of admission", state["running"] == names, state["running"], names)
    waiting, listed = {a.id for a in books.accounts.values() if not a.resident}, state["waiting"]
    law("every other live request waits, once", set(listed) == waiting and len(listed) == len(waiting), listed, waiting)
    owed = sum(max(a.target - a.next, 0) for a in books.order)
    law("B6 ledger conservation", state["outstanding"] == owed, state["outstanding"], owed)
    _requests(books, state["requests"], state["max_gap"])
    _totals(books, state["totals"])
    _reserved(books, state)
    law("C1 the ratio stays in bounds", 0 <= state["ratio"] <= 1, state["ratio"])
    _stalled(books, state["stalled"])


def _stalled(books: Books, stalled: bool) -> None:
    low, high = (books.step - moved for moved in (books.moved[1], books.moved[0]))
    if not books.accounts:
        law("F1 idle is healthy", not stalled)
    elif high < books.config.stall_steps:
        law("F1 not stalled while things move", not stalled, books.step, books.moved)
    elif low > books.config.stall_steps:
        law("F1 stalled when nothing moved", stalled, books.step, books.moved)


def _requests(books: Books, listed: Mapping[str, Mapping[str, Any]], gaps: Mapping[str, int]) -> None:
    law("requests lists the live ones", set(listed) == set(books.accounts), set(listed) ^ set(books.accounts))
    for name, account in books.accounts.items():
        entry = listed[name]
        status = "paused" if account.paused else "running" if account.resident else "waiting"
        law("status", entry["status"] == status, name, entry["status"], status)
        law("C26 nothing emitted is lost or repeated", entry["generated"] == len(account.tokens), name, entry, len(account.tokens))
        law("retractions", entry["retractions"] == account.retractions or account.unsure, name, entry, account.retractions)
        law("waited_steps", entry["waited_steps"] >= 0, name, entry)
        law("max_gap", gaps[name] == account.gap, name, gaps[name], account.gap)
        if not account.resident:
            law("a waiting request holds nothing", entry["pages"] == 0, name, entry)
            continue
        law("cached", entry["cached"] == account.cached, name, entry, account.cached)
        low = pages_for(account.filled if not account.prefilling and account.high else account.cached, books.config.page_size)
        high = pages_for(max(account.next, account.total), books.config.page_size)
        law("B3 pages held", low <= entry["pages"] <= high, name, entry, low, high)


def _totals(books: Books, totals: Mapping[str, int]) -> None:
    expected = {
        "finished": books.finished, "aborted": books.aborted, "retractions": books.retractions, "emitted": books.emitted,
        "evicted_pages": books.evicted, "steps": books.commits, "cached_tokens": books.cached_tokens,
    }
    got = {key: totals[key] for key in expected}
    law("totals", got == expected, "got", got, "expected", expected)
    for key, (low, high) in (("prefill_tokens", books.prefilled), ("recomputed_tokens", books.recomputed)):
        law(f"totals.{key}", low <= totals[key] <= high, totals[key], low, high)


def _reserved(books: Books, state: Mapping[str, Any]) -> None:
    """What is promised is the sum of needs not yet held (B3), and in guaranteed mode it can be funded (B4)."""
    if any(a.request.ignore_eos for a in books.order) or books.holds:
        return
    guaranteed = books.config.admission == "guaranteed"
    promised = 0
    for account in books.order:
        base = max(account.target, account.filled)
        rest = account.total - base
        estimate = rest if guaranteed else min(math.ceil(state["ratio"] * rest), books.config.clip_new_tokens)
        held = state["requests"][account.id]["pages"]
        promised += max(pages_for(base + min(rest, estimate), books.config.page_size) - held, 0)
    if guaranteed or not books.frames:
        law("B3 reserved", state["reserved"] == promised, state["reserved"], promised)
    if guaranteed and not books.frames:  # a plan in flight may lock pages of a request that ended
        law("B4 what is promised can be funded", promised <= state["free"] + state["cached"], promised, state["free"], state["cached"])
