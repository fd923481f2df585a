"""`kvsched bench admission`: what a pass costs over many requests that wait and do not fit.

One resident holds most of the pool; every prompt that waits needs more than is left, so nothing is admitted. The first
pass matches each prompt with the cache where an order or head policy looks at it; the second finds nothing changed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsched.config import HEADS, SchedulerConfig
from kvsched.memory import PagePool, RadixCache
from kvsched.plan import StepResult
from kvsched.request import Request
from kvsched.scheduler import Scheduler

ORDERS = ("fcfs", "priority", "lpm")
PAGE = 16


def run(waiting: int = 1000, tokens: int = 12_000, passes: int = 20) -> Iterator[dict[str, Any]]:
    """One dict per order and head policy: first_us, second_us and later_us (median), schedule() alone."""
    prompts = [np.random.default_rng(index).integers(0, 30_000, tokens) for index in range(waiting)]
    for order in ORDERS:
        for head in HEADS:
            yield _measure(prompts, order, head, passes)


def _measure(prompts: list[np.ndarray[Any, Any]], order: str, head: str, passes: int) -> dict[str, Any]:
    tokens = len(prompts[0])
    pages = 2 * -(-tokens // PAGE)
    config = SchedulerConfig(page_size=PAGE, max_running=256, max_step_tokens=1 << 20, order=order, head=head)
    scheduler = Scheduler(config, PagePool(pages, PAGE), RadixCache(PAGE))
    scheduler.submit(Request("resident", prompt=prompts[0][: tokens // 2] + 1, max_new_tokens=tokens, ignore_eos=True))
    for index, prompt in enumerate(prompts):
        scheduler.submit(Request(f"w{index}", prompt=prompt, max_new_tokens=16, priority=index % 4))
    spent = []
    for _ in range(passes):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        spent.append(time.perf_counter() - begin)
        scheduler.commit(plan, StepResult(np.full(len(plan), 7, dtype=np.int32)))
        if len(plan.admitted) > (plan.step == 1):
            message = f"a request was admitted in step {plan.step}"
            raise RuntimeError(message)
    return {"order": order, "head": head, "waiting": len(prompts), "tokens": tokens, "first_us": round(spent[0] * 1e6, 1),
            "second_us": round(spent[1] * 1e6, 1), "later_us": round(statistics.median(spent[2:]) * 1e6, 1)}
