"""kvsched and vLLM's own schedulers over simulated workers: one text for each request, at one and at two plans in flight.

vLLM's CPU platform runs without async scheduling, so this is where ours meets its AsyncScheduler: both are driven in the order
of vLLM's engine loop, and the workers verify every slot before they read it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make test-hosts")

from rig import Session, Workers, configure, drive, hasher, make_request, ours, theirs, workload
from vllm.v1.core.sched.interface import PauseState


def arrivals_of(config: Any, seed: int, count: int, **shape: int) -> list[tuple[int, Any]]:
    draw = random.Random(seed)
    named = hasher(config)
    return [
        (at * 2 // draw.randint(1, 4), make_request(f"r{at}", prompt, block_hasher=named, arrival=float(at), **sampling))
        for at, (prompt, sampling) in enumerate(workload(seed, count, **shape))
    ]


def run(kind: Any, config: Any, seed: int, count: int, *, depth: int, aborts: dict[int, list[str]] | None = None, second: bool = False,
        **shape: Any) -> tuple[Session, Any]:
    scheduler = kind(config)
    workers = Workers(config.cache_config.block_size, second=second)
    arrivals = sorted(arrivals_of(config, seed, count, **shape), key=lambda pair: pair[0])

    def look(turn: int, it: Any) -> None:
        assert it.running == set(it.core._core.running)
        assert it.get_request_counts() == (len(it.running), len(it.core._core.lives) - len(it.running))
        if turn % 7 == 0:
            it.core.check()

    return drive(scheduler, arrivals, workers, depth=depth, aborts=aborts, each=look if kind is ours else None), scheduler


def same(mine: Session, other: Session, aborted: frozenset[str] = frozenset()) -> None:
    for key, text in other.texts.items():
        if key in aborted:  # when the abort came depends on who ran when
            least = min(len(text.tokens), len(mine.texts[key].tokens))
            assert mine.texts[key].tokens[:least] == text.tokens[:least]
        else:
            assert mine.texts[key] == text, key


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("blocks", "caching"), [(2000, True), (2000, False), (40, True), (40, False), (24, True)])
def test_the_same_text_for_each_request(model: Path, depth: int, blocks: int, caching: bool) -> None:
    config = configure(model, blocks=blocks, caching=caching, seqs=16, budget=64, asynchronous=depth == 2)
    shape: dict[str, Any] = {"longest": 250, "most_new": 64, "head": 100}
    mine, scheduler = run(ours, config, 1, 120, depth=depth, **shape)
    other, _ = run(theirs, config, 1, 120, depth=depth, **shape)
    same(mine, other)
    assert {text.finish for text in mine.texts.values()} == {"stop", "length"}
    assert scheduler.core.totals["cached_tokens"] > 0 or not caching
    assert (blocks == 2000) == (scheduler.core.totals["retractions"] == 0)
    assert mine.preempted == scheduler.core.totals["retractions"], "the workers hear of each"
    scheduler.core.check()
    assert scheduler.core.occupancy["private"] == scheduler.core.occupancy["quarantined"] == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_moment(model: Path, depth: int, seed: int) -> None:
    config = configure(model, blocks=30, seqs=16, budget=64, asynchronous=depth == 2)
    shape: dict[str, Any] = {"longest": 200, "most_new": 40, "head": 100}
    draw = random.Random(seed)
    leaving = draw.sample(range(100), 35)
    aborts: dict[int, list[str]] = {}
    for at in leaving:
        aborts.setdefault(draw.randint(0, 300), []).append(f"r{at}")
    mine, scheduler = run(ours, config, seed, 100, depth=depth, aborts=aborts, **shape)
    other, _ = run(theirs, config, seed, 100, depth=depth, aborts=aborts, **shape)
    same(mine, other, frozenset(f"r{at}" for at in leaving))
    scheduler.core.check()
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.clients
    assert not scheduler.due


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_pauses_resets_and_throttled_steps_leave_the_text_as_it_is(model: Path, depth: int, seed: int) -> None:
    config = configure(model, blocks=40, seqs=16, budget=64, asynchronous=depth == 2)
    shape: dict[str, Any] = {"longest": 150, "most_new": 40, "head": 100}
    last = (600, make_request("last", [5, 6, 7], max_tokens=2))  # keeps the loop alive while everybody is paused
    arrivals = [*sorted(arrivals_of(config, seed, 60, **shape), key=lambda pair: pair[0]), last]
    draw = random.Random(seed)
    done: list[Any] = []

    def meddle(turn: int, scheduler: Any) -> None:
        if turn % 9 == 0:
            scheduler.core.check()
        if turn >= 550:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        elif draw.random() < 0.1:
            state = draw.choice(list(PauseState))
            scheduler.set_pause_state(state)
            done.append(state)
        elif draw.random() < 0.06:
            running = draw.random() < 0.7
            answer = scheduler.reset_prefix_cache(reset_running_requests=running)
            assert answer or not running
            done.append((running, answer))

    scheduler = ours(config)
    plan = scheduler.schedule
    scheduler.schedule = lambda throttle_prefills: plan(throttle_prefills or draw.random() < 0.2)
    mine = drive(scheduler, arrivals, Workers(16), depth=depth, each=meddle)
    plain = drive(theirs(config), [*sorted(arrivals_of(config, seed, 60, **shape), key=lambda pair: pair[0]),
                                   (600, make_request("last", [5, 6, 7], config, max_tokens=2))], Workers(16), depth=depth)
    same(mine, plain)
    assert len(set(map(str, done))) >= 5, "every kind of meddling happened"
    scheduler.core.check()
    assert not scheduler.requests


@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_model_runner_gets_resumed_requests_as_new_ones(model: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, blocks=24, seqs=16, budget=64, asynchronous=depth == 2)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # once the configuration is made, which would want a device for it
    assert config.use_v2_model_runner
    shape: dict[str, Any] = {"longest": 200, "most_new": 64, "head": 100}
    mine, scheduler = run(ours, config, 2, 80, depth=depth, second=True, **shape)
    other, _ = run(theirs, config, 2, 80, depth=depth, second=True, **shape)
    same(mine, other)
    assert scheduler.core.totals["retractions"] > 0
