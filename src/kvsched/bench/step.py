"""`kvsched bench step`: what a steady decode step costs, schedule and commit together.

Measures the real scheduler with a result made beforehand; the host's own work is not in the figures. The plan and the
answer of the commit are taken as they are: lengths, deltas, tokens and finish codes of every row are there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvsched.config import SchedulerConfig
from kvsched.memory import PagePool, RadixCache
from kvsched.plan import StepResult
from kvsched.request import Request
from kvsched.scheduler import Scheduler


def run(running: Sequence[int] = (32, 256, 1024, 4096), page_size: int = 16, prompt: int = 512, steps: int = 300,
        max_new: int = 4096, in_flight: int = 1) -> Iterator[dict[str, Any]]:
    """One dict per size: running, total_us, schedule_us, commit_us (medians over `steps`), pages crossed per step.

    Prompts of `prompt` tokens that share nothing; page crossings are spread over the steps as they fall.
    """
    for count in running:
        yield _measure(count, page_size, prompt, steps, max_new, in_flight)


def _measure(count: int, page_size: int, prompt: int, steps: int, max_new: int, in_flight: int) -> dict[str, Any]:
    pages = count * (-(-(prompt + max_new) // page_size) + 1)
    config = SchedulerConfig(page_size=page_size, max_running=count, max_step_tokens=1 << 20, max_in_flight=in_flight,
                             admission="guaranteed")
    scheduler = Scheduler(config, PagePool(pages, page_size), RadixCache(page_size))
    generator = np.random.default_rng(0)
    for index in range(count):
        # lengths differ by less than a page, so that crossings spread evenly over the steps
        length = prompt + index % page_size
        scheduler.submit(Request(f"r{index}", prompt=generator.integers(0, 30_000, length), max_new_tokens=max_new,
                                 stop_token_ids={2}))
    for _ in range(20):
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult(np.full(len(plan), 7, dtype=np.int32)))
    result = StepResult(np.full(count, 7, dtype=np.int32))
    plans, commits, crossed = [], [], 0
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        outcome = scheduler.commit(plan, result)
        end = time.perf_counter()
        plans.append(middle - begin)
        commits.append(end - middle)
        crossed += len(plan.deltas)
        if len(outcome.tokens) != count:
            message = f"{len(outcome.tokens)} tokens of {count}"
            raise RuntimeError(message)
    both = [one + other for one, other in zip(plans, commits, strict=True)]
    return {
        "running": count,
        "total_us": round(statistics.median(both) * 1e6, 1),
        "schedule_us": round(statistics.median(plans) * 1e6, 1),
        "commit_us": round(statistics.median(commits) * 1e6, 1),
        "crossed_per_step": round(crossed / steps, 2),
        "prompt": prompt,
        "page_size": page_size,
    }
