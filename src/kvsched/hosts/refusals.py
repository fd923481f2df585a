"""A refusal in one line, for hosts that have room for a sentence and not for a record."""

from __future__ import annotations

from kvsched.verdict import RefusalReason, Refused

UNITS = {
    RefusalReason.NEVER_FITS: "pages", RefusalReason.CONTEXT_LIMIT: "tokens", RefusalReason.QUEUE_REQUESTS: "requests",
    RefusalReason.QUEUE_TOKENS: "tokens", RefusalReason.INFLIGHT_TOKENS: "tokens",
}
"""What the two numbers of a refusal count."""


def sentence(refused: Refused) -> str:
    """The reason and both numbers.

    >>> sentence(Refused("r1", RefusalReason.NEVER_FITS, needed=23, available=19, retryable=False))
    'kvsched refused the request: never_fits, it needs 23 pages and there can be 19'
    """
    return (f"kvsched refused the request: {refused.reason.value}, it needs {refused.needed} {UNITS[refused.reason]} "
            f"and there can be {refused.available}")
