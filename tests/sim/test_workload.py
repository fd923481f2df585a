"""Generated workloads: the stated distributions, the shared tree, and one seed for one result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsched.errors import ConfigError
from kvsched.sim.workload import Workload, generate


def signature(workload: Workload, seed: int) -> list[Any]:
    return [(a.id, a.time_s, a.prompt().tobytes(), a.max_new, a.tenant, a.priority) for a in generate(workload, seed)]


def common(a: Any, b: Any) -> int:
    """Tokens of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def test_one_seed_gives_one_workload_and_another_seed_another() -> None:
    workload = Workload(requests=40, tenants=3, priorities=2, oversize_share=0.2, oversize_tokens=5000)
    assert signature(workload, 5) == signature(workload, 5)
    assert signature(workload, 5) != signature(workload, 6)


def test_lengths_and_gaps_have_the_stated_means() -> None:
    workload = Workload(requests=20_000, rate=4.0, prompt_mean=300, prompt_sigma=0.5, output_mean=80, output_sigma=1.0, tree_depth=0)
    arrivals = generate(workload, 1)
    assert arrivals[0].time_s == 0.0
    assert arrivals[-1].time_s == pytest.approx(20_000 / 4.0, rel=0.05)
    assert np.mean([a.prompt_length for a in arrivals]) == pytest.approx(300, rel=0.05)
    assert np.mean([a.max_new for a in arrivals]) == pytest.approx(80, rel=0.05)
    assert np.std(np.log([a.prompt_length for a in arrivals])) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_stated_variation(burstiness: float) -> None:
    arrivals = generate(Workload(requests=20_000, rate=2.0, arrivals="gamma", burstiness=burstiness), 2)
    gaps = np.diff([a.time_s for a in arrivals])
    assert gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1)


def test_prompts_share_whole_levels_of_the_tree_and_nothing_else() -> None:
    prompts = [a.prompt() for a in generate(Workload(requests=60, tree_depth=3, tree_fanout=2, tree_tokens=10), 3)]
    assert all(prompt.dtype == np.int32 and prompt.min() >= 0 for prompt in prompts)
    shared = {common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]}
    assert shared == {0, 10, 20, 30}
    assert len({prompt[:30].tobytes() for prompt in prompts}) == 8


def test_a_tree_of_depth_0_shares_nothing() -> None:
    prompts = [a.prompt() for a in generate(Workload(requests=30, tree_depth=0), 3)]
    assert {common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]} == {0}


def test_a_share_of_the_requests_is_too_big() -> None:
    arrivals = generate(Workload(requests=2000, oversize_share=0.1, oversize_tokens=9999, prompt_mean=10, prompt_sigma=0.1), 4)
    big = [a for a in arrivals if a.prompt_length == 9999]
    assert 150 < len(big) < 250
    assert len(big[0].prompt()) == 9999
    assert common(big[0].prompt(), big[1].prompt()) == 0


def test_tenants_and_priorities_are_drawn_from_as_many_as_stated() -> None:
    arrivals = generate(Workload(requests=200, tenants=3, priorities=2), 5)
    assert {a.tenant for a in arrivals} == {"t0", "t1", "t2"}
    assert {a.priority for a in arrivals} == {0, 1}


@pytest.mark.parametrize(("key", "value"), [
    ("requests", 0), ("requests", True), ("requests", 1.5), ("rate", 0), ("rate", 1e-320), ("rate", float("inf")), ("arrivals", "uniform"),
    ("burstiness", 0), ("burstiness", 1e-300), ("prompt_mean", 0.5), ("prompt_mean", 1e300), ("prompt_sigma", -1), ("output_mean", "x"), ("output_sigma", float("nan")),
    ("tree_depth", -1), ("tree_fanout", 0), ("tree_tokens", 0), ("oversize_share", 1.5), ("oversize_tokens", -1),
    ("tenants", 0), ("priorities", 0),
])
def test_a_bad_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        Workload(**{key: value})


def test_a_share_without_a_size_and_a_tree_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="oversize_tokens must be at least 1"):
        Workload(oversize_share=0.1)
    with pytest.raises(ConfigError, match="the tree may hold"):
        Workload(tree_depth=12, tree_fanout=10)
    with pytest.raises(ConfigError, match="the tree may hold"):
        Workload(tree_depth=10**9)
