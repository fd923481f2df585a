"""The state that a scenario sees: the scheduler's snapshot, with the refusals and the requests that ended.

The scheduler forgets a request that ended; a scenario does not. What does not live here: which keys may be expected, and
how they are compared (`expect`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvsched.memory import NullCache, PagePool, RadixCache
from kvsched.plan import Ended
from kvsched.request import Finish
from kvsched.scenario.document import Document
from kvsched.scheduler import Scheduler
from kvsched.verdict import Refused


@attrs.frozen
class Record:
    """The last words on a request that ended: its part of `requests`, and its longest gap between two tokens."""

    state: Mapping[str, Any]
    max_gap: int


_OVER = {"pages": 0, "wait_reason": None, "short_by": None}
"""A request that ended holds nothing and waits for nothing."""


def build(document: Document) -> Scheduler:
    """The scheduler that a file asks for, on a pool and a cache of its own. Raises `ConfigError` where they do not go together."""
    pool = PagePool(document.pages, document.config.page_size, reserved_pages=document.reserved_pages)
    page_size = document.config.page_size
    cache = RadixCache(page_size, eviction=document.eviction) if document.prefix_cache else NullCache(page_size)
    return Scheduler(document.config, pool, cache)


def refused(answer: Refused) -> dict[str, Any]:
    """One entry of `refused`."""
    return {
        "reason": answer.reason.value,
        "needed": answer.needed,
        "available": answer.available,
        "retryable": answer.retryable,
    }


def ended(end: Ended) -> Record:
    """The record of a request that a commit ended."""
    return Record(
        {
            "status": "aborted" if end.finish is Finish.ABORT else "finished",
            "computed": end.computed,
            "cached": end.cached,
            "generated": end.generated,
            "retractions": end.retractions,
            "waited_steps": end.waited_steps,
            "finish": end.finish.name.lower(),
            **_OVER,
        },
        end.max_gap,
    )


def aborted(before: Mapping[str, Any], max_gap: int) -> Record:
    """The record of a request that an abort ended, from its state just before."""
    return Record({**before, "status": "aborted", "finish": "abort", **_OVER}, max_gap)


Reason = tuple[str | None, int | None]


def reasons(scheduler: Scheduler) -> dict[str, Reason]:
    """Why each live request gets nothing, asked right after a pass: what comes after it changes no reason of that pass."""
    return {name: (request["wait_reason"], request["short_by"]) for name, request in scheduler.snapshot()["requests"].items()}


def assemble(
    scheduler: Scheduler, over: Mapping[str, Record], refusals: Mapping[str, Any], flushed: Mapping[str, Any] | None,
    reasons_then: Mapping[str, Reason],
) -> dict[str, Any]:
    """The whole state, as a new dict of plain values; `reasons_then`: those of the last pass. O(requests)."""
    state = dict(scheduler.snapshot())
    for name, request in state["requests"].items():
        request["wait_reason"], request["short_by"] = reasons_then.get(name, (None, None))
    state["requests"] = {**{name: dict(record.state) for name, record in over.items()}, **state["requests"]}
    state["max_gap"] = {**{name: record.max_gap for name, record in over.items()}, **state["max_gap"]}
    state["refused"] = {name: dict(refusal) for name, refusal in refusals.items()}
    state["flushed"] = None if flushed is None else dict(flushed)
    return state
