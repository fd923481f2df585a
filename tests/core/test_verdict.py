"""Verdicts, refusals and reasons as values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsched import Accepted, RefusalReason, Refused, WaitReason
from kvsched.verdict import HEAD_REASONS, Verdict, decide

PAGES = st.integers(0, 200)


@given(need=PAGES, fundable=st.integers(-50, 200), ceiling=PAGES)
def test_decide(need: int, fundable: int, ceiling: int) -> None:
    verdict = decide(need, fundable, ceiling)
    assert (verdict is Verdict.REFUSE) == (need > ceiling)
    assert (verdict is Verdict.ADMIT) == (need <= ceiling and need <= fundable)


def test_answers_are_true_or_false() -> None:
    assert Accepted("R", ("R",), 5)
    assert not Refused("R", RefusalReason.NEVER_FITS, 2, 1, retryable=False)


def test_reasons_stand_in_the_order_in_which_they_stop_a_request() -> None:
    assert [reason.value for reason in WaitReason] == [
        "paused", "host", "head_of_line", "rank_agreement", "running_limit", "partial_prefill_limit", "adapter_limit", "shared_prefill",
        "state_slots", "window_pages", "pinned_pages", "pages", "commitment", "attended_limit", "step_tokens",
    ]


def test_head_policies_rule_shortages_of_memory_slots_and_places() -> None:
    stepped_over = {"paused", "host", "head_of_line", "partial_prefill_limit", "adapter_limit", "shared_prefill", "attended_limit", "step_tokens"}
    assert {reason.value for reason in WaitReason if reason not in HEAD_REASONS} == stepped_over
