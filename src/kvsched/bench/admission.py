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


def run(waiting: int = 1000, tokens: int = 12_000, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """One dict per order and head policy: first_us, second_us, later_us, medians of `repeats` runs, schedule() alone."""
    prompts = [np.random.default_rng(index).integers(0, 30_000, tokens) for index in range(waiting)]
    for order in ORDERS:
        for head in HEADS:
            runs = [_measure(prompts, order, head) for _ in range(repeats)]
            first, second, later = (round(statistics.median(run[at] for run in runs) * 1e6, 1) for at in range(3))
            yield {"order": order, "head": head, "waiting": waiting, "tokens": tokens, "first_us": first, "second_us": second,
                   "later_us": later}


def _measure(prompts: list[np.ndarray[Any, Any]], order: str, head: str) -> tuple[float, float, float]:
    tokens = len(prompts[0])
    pages = 2 * -(-tokens // PAGE)
    config = SchedulerConfig(page_size=PAGE, max_running=256, max_step_tokens=1 << 20, order=order, head=head)
    scheduler = Scheduler(config, PagePool(pages, PAGE), RadixCache(PAGE))
    scheduler.submit(Request("resident", prompt=prompts[0][: tokens // 2] + 1, max_new_tokens=tokens, ignore_eos=True))
    result = StepResult(np.array([7]))
    scheduler.commit(scheduler.schedule(), result)
    for index, prompt in enumerate(prompts):
        scheduler.submit(Request(f"w{index}", prompt=prompt, max_new_tokens=16, priority=index % 4))
    spent = []
    for _ in range(20):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        spent.append(time.perf_counter() - begin)
        scheduler.commit(plan, result)
        if plan.admitted:
            message = f"{plan.admitted} were admitted in step {plan.step}"
            raise RuntimeError(message)
    return spent[0], spent[1], statistics.median(spent[2:])
