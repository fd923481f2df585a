"""What is remembered of a match is what the cache would say now, however it grew and shrank. Random runs with few tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig, StepResult
from kvsched.units import reusable


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("config", [{"page_size": 1}, {"page_size": 2}, {"page_size": 2, "order": "lpm", "chunk_tokens": 3},
                                    {"page_size": 1, "max_in_flight": 2}],
                         ids=lambda config: "-".join(map(str, config.values())))
def test_a_match_is_remembered_right(config: dict[str, Any], seed: int) -> None:
    """Exact where it is asked to be, else an upper bound. Prompts share beginnings, and some outlive their pages."""
    rng = random.Random(seed)
    size = config["page_size"]
    cache = RadixCache(size)
    sched = Scheduler(SchedulerConfig(**{"max_running": 3, "conservativeness": 0, "max_step_tokens": 12, **config}), PagePool(24 // size, size), cache)
    core = sched._core
    for at in range(60):
        if rng.random() < 0.5 and len(core.queue) < 6:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            sched.submit(Request(f"R{at}", prompt, rng.randint(0, 8), cache_read=rng.random() < 0.9, adapter=rng.choice([None, None, "a"])))
        if rng.random() < 0.1:
            sched.pause("retract")
            sched.resume()
        if core.running and rng.random() < 0.1:
            sched.abort(rng.choice(list(core.running)))
        plan = sched.schedule()
        if rng.random() < 0.15:
            sched.rollback(plan)
        while len(sched.in_flight) == sched.config.max_in_flight or (sched.in_flight and rng.random() < 0.3):
            plan = sched.in_flight[0]
            sched.commit(plan, StepResult(tokens=np.array([rng.randrange(2) for _ in range(len(plan))], dtype=np.int64)))
        for live in core.queue:
            now = cache.match(live.space, live.sequence()[: reusable(live.target, size)]) if live.request.cache_read else 0
            if rng.random() < 0.7:
                assert core.match(live) >= now
            if rng.random() < 0.5:
                assert core.match(live, exact=True) == now
                assert live.least == -(-live.target // size) - now // size
