"""The default model: it answers, and constant retraction changes nothing in its text (law I2). Long runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peers import as_transformers, greedy
from test_token_exactness import serve

from kvsched import Request, SchedulerConfig
from reference_server.model import Loaded, default_model_path, load

pytestmark = pytest.mark.soak

QUESTIONS = (
    "What is the capital of France?", "Name three colours of the rainbow.", "Why is the sky blue?", "What is two plus two?",
    "Who wrote Romeo and Juliet?", "What do bees make?", "Write one sentence about the sea.", "How many legs does a spider have?",
    "What is the largest planet?", "Give me a recipe for tea.", "What is a prime number?", "Translate 'good morning' into French.",
    "What is the opposite of hot?", "Name an animal that can fly.", "What is photosynthesis?", "Tell me a fact about the moon.",
)
NEW = 40
GAP = 1e-3
"""Least distance of the two best logits of every token compared: far above what float32 loses between two orders of adding."""


@functools.cache
def model() -> Loaded:
    return load(default_model_path(), dtype=torch.float32)


@functools.cache
def expected() -> tuple[tuple[Request, tuple[int, ...]], ...]:
    """Each question, up to the last token whose choice was clear, and what transformers says to it."""
    peer = as_transformers(model().model)
    out = []
    for i, question in enumerate(QUESTIONS):
        prompt = model().tokenizer.chat([{"role": "user", "content": question}])
        want = greedy(peer, prompt, NEW, eos=model().eos)
        with torch.inference_mode():
            logits: Any = peer(torch.tensor([prompt + want[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2, -1).values
        close = torch.nonzero(best[:, 0] - best[:, 1] <= GAP)[:, 0].tolist()
        clear = min([len(want), *close])
        assert clear >= 1
        out.append((Request(f"r{i}", prompt, max_new_tokens=clear, stop_token_ids=model().eos), tuple(want[:clear])))
    return tuple(out)


def test_the_choices_are_clear() -> None:
    assert sum(len(want) > 5 for _, want in expected()) >= 12
    assert sum(len(want) for _, want in expected()) >= 300


@pytest.mark.parametrize(("page", "chunk", "caching", "depth"), [(1, 24, True, 2), (16, 128, False, 1), (64, 40, True, 2)])
def test_tokens_are_those_of_transformers_in_single_precision(page: int, chunk: int, caching: bool, depth: int) -> None:
    config = SchedulerConfig(page_size=page, max_running=8, chunk_tokens=chunk, max_step_tokens=128, max_in_flight=depth, clip_new_tokens=1)
    text, scheduler = serve(model().model, [request for request, _ in expected()], config, 256 // page, caching)
    wrong = [(r.id, text[r.id], list(want)) for r, want in expected() if text[r.id] != list(want)]
    assert not wrong, f"{len(wrong)} of {len(QUESTIONS)} differ: {wrong[:2]}"
    assert scheduler.totals["retractions"] >= 4


def test_the_capital_of_france_is_paris() -> None:
    _, want = expected()[0]
    assert "Paris" in model().tokenizer.decode(list(want))
