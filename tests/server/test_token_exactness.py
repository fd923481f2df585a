"""Scheduling never changes text (law I2): greedy tokens under constant retraction are transformers' own, one by one."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from peers import as_transformers, greedy

from kvsched import PagePool, RadixCache, Request, Scheduler, SchedulerConfig
from kvsched.plan import Plan
from reference_server.executor import Model, ModelExecutor
from reference_server.model.tiny import tiny
from reference_server.sampling import GREEDY

COUNT = 64
END = 40
"""A token that ends every third request, so that some end long before their limit."""


def requests(vocabulary: int, longest: int, most_new: int) -> list[Request]:
    """64 mixed requests: prompts of 1 to `longest` tokens, half of them with one of two stems, 1 to `most_new` new tokens."""
    rng = np.random.default_rng(20)
    stems = [rng.integers(0, vocabulary, longest // 2) for _ in range(2)]
    out = []
    for i in range(COUNT):
        own = rng.integers(0, vocabulary, rng.integers(1, longest // 2 + 1))
        prompt = np.concatenate((stems[i % 2], own)) if i % 4 < 2 else own
        out.append(Request(f"r{i}", prompt, max_new_tokens=int(rng.integers(1, most_new + 1)), stop_token_ids={END} if i % 3 == 0 else set()))
    return out


@functools.cache
def expected() -> tuple[tuple[int, ...], ...]:
    """What transformers' generate gives for each request alone, greedily."""
    peer = as_transformers(tiny())
    return tuple(tuple(greedy(peer, r.tokens.tolist(), r.max_new_tokens or 0, eos=r.stop_token_ids))
                 for r in requests(258, 140, 72))


def serve(model: Model, todo: list[Request], config: SchedulerConfig, pages: int, caching: bool) -> tuple[dict[str, list[int]], Scheduler]:
    """Run all requests to their ends, checking the accounts after each step."""
    size = config.page_size
    scheduler = Scheduler(config, PagePool(pages, size), RadixCache(size) if caching else None)
    executor = ModelExecutor(model, pages=pages, page_size=size)
    text: dict[str, list[int]] = {}
    for request in todo:
        assert scheduler.submit(request)
        executor.add(request.id, GREEDY)
        text[request.id] = []
    flying: deque[Plan] = deque()
    while scheduler.has_work():
        plan = scheduler.schedule()
        flying.append(plan)
        if plan and len(flying) < config.max_in_flight:
            continue
        while flying and (not plan or len(flying) == config.max_in_flight):
            first = flying.popleft()
            outcome = scheduler.commit(first, executor.run(first))
            for key, token in zip(first.ids, outcome.tokens.tolist(), strict=True):
                if token >= 0:
                    text[key].append(token)
        scheduler.check()
    return text, scheduler


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("chunk", [5, 24, 256])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_tokens_are_those_of_transformers(page: int, chunk: int, caching: bool, depth: int) -> None:
    todo = requests(258, 140, 72)
    config = SchedulerConfig(page_size=page, max_running=8, chunk_tokens=chunk, max_step_tokens=64, max_in_flight=depth,
                             context_limit=256, clip_new_tokens=1)
    text, scheduler = serve(tiny(), todo, config, 256 // page, caching)
    wrong = [(r.id, text[r.id], list(want)) for r, want in zip(todo, expected(), strict=True) if text[r.id] != list(want)]
    assert not wrong, f"{len(wrong)} of {COUNT} differ: {wrong[:2]}"
    assert scheduler.totals["retractions"] >= 8
    assert (scheduler.totals["cached_tokens"] > 0) == caching


def test_the_expected_tokens_are_worth_comparing() -> None:
    """They vary, some end early, and no choice was close: a difference is a fault and no rounding."""
    todo = requests(258, 140, 72)
    ended = [want for r, want in zip(todo, expected(), strict=True) if r.stop_token_ids and len(want) < (r.max_new_tokens or 0)]
    assert len(ended) >= 3
    assert len({token for want in expected() for token in want}) > 60
    peer = as_transformers(tiny())
    gaps = []
    with torch.inference_mode():
        for request, want in zip(todo, expected(), strict=True):
            logits: Any = peer(torch.tensor([request.tokens.tolist() + list(want[:-1])])).logits[0, len(request.tokens) - 1 :]
            best = logits.topk(2, -1).values
            gaps.append(float((best[:, 0] - best[:, 1]).min()))
    assert min(gaps) > 1e-6
