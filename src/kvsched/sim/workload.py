"""Invented workloads: arrivals, lengths and shared prefixes from stated distributions, from one seed.

What lives here: the description of a workload and the function that draws it. What does not: files
(`kvsched.sim.trace`), whose content and arrival records this room shares.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from kvsched.errors import ConfigError
from kvsched.sim.trace import Arrival
from kvsched.units import Ints, Tokens

ARRIVALS = ("poisson", "gamma")
_TREE_BASE = 1 << 30
"""Tokens of shared levels start here, so that they differ from every token of a prompt's own part."""


def _at_least(low: int) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{attribute.name} must be an integer of at least {low}, not {value!r}")

    return check


def _between(low: float, high: float) -> Any:
    """A number within bounds that keep every draw a finite number."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(f"{attribute.name} must be a number from {low:g} to {high:g}, not {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Workload:
    """What to draw. A bad value raises `ConfigError` naming the key.

    requests: how many. rate: arrivals per second on average. arrivals: "poisson" (exponential gaps) or "gamma", whose
        gaps have the coefficient of variation `burstiness` (1 is poisson; more is burstier).
    prompt_mean, prompt_sigma: a prompt's own tokens, lognormal with this mean; sigma is of the logarithm. At least 1.
    output_mean, output_sigma: tokens to generate, the same way. At least 1.
    tree_depth, tree_fanout, tree_tokens: each prompt begins with one path through a tree of shared prefixes: `tree_depth`
        levels of `tree_tokens` tokens, each level one of `tree_fanout` children, all equally likely. Depth 0: none.
    oversize_share, oversize_tokens: that share of the requests has a prompt of so many tokens, all its own, to show refusals.
    tenants, priorities: how many of each, equally likely ("t0", "t1", ...; 0, 1, ...).
    """

    requests: int = attrs.field(default=400, validator=_at_least(1))
    rate: float = attrs.field(default=4.0, validator=_between(1e-9, 1e9))
    arrivals: str = "gamma"
    burstiness: float = attrs.field(default=2.0, validator=_between(1e-3, 1e3))
    prompt_mean: float = attrs.field(default=1500.0, validator=_between(1, _TREE_BASE))
    prompt_sigma: float = attrs.field(default=0.8, validator=_between(0, 100))
    output_mean: float = attrs.field(default=200.0, validator=_between(1, _TREE_BASE))
    output_sigma: float = attrs.field(default=0.8, validator=_between(0, 100))
    tree_depth: int = attrs.field(default=2, validator=_at_least(0))
    tree_fanout: int = attrs.field(default=4, validator=_at_least(1))
    tree_tokens: int = attrs.field(default=256, validator=_at_least(1))
    oversize_share: float = attrs.field(default=0.0, validator=_between(0, 1))
    oversize_tokens: int = attrs.field(default=0, validator=_at_least(0))
    tenants: int = attrs.field(default=1, validator=_at_least(1))
    priorities: int = attrs.field(default=1, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals must be one of {', '.join(ARRIVALS)}, not {self.arrivals!r}")
        if self.oversize_share > 0 and self.oversize_tokens < 1:
            raise ConfigError(f"oversize_tokens must be at least 1 with an oversize_share, not {self.oversize_tokens}")
        nodes = sum(self.tree_fanout**level for level in range(1, self.tree_depth + 1)) if self.tree_depth <= 30 else math.inf
        if nodes * self.tree_tokens > _TREE_BASE:
            raise ConfigError(f"the tree may hold {_TREE_BASE} tokens in all, not {nodes} nodes of {self.tree_tokens}")


@attrs.frozen(eq=False)
class Path:
    """Content of a shared path through the tree, then the prompt's own tokens; see `Workload`.

    nodes: the numbers of the nodes on the path. Node v holds the tokens 2**30 + v * size and up. The own part begins with
    the request's number, so no two requests share more than the path.

    >>> (Path(np.array([1]), 2, 9, 5).tokens() % 2**30).tolist()
    [2, 3, 9, 0, 1]
    """

    nodes: Ints
    size: int
    serial: int
    length: int

    def tokens(self) -> Tokens:
        shared = len(self.nodes) * self.size
        tokens = np.arange(-1 - shared, self.length - 1 - shared, dtype=np.int32)
        levels = tokens[:shared].reshape(len(self.nodes), self.size)
        levels[:] = self.nodes[:, None] * self.size + np.arange(_TREE_BASE, _TREE_BASE + self.size)
        tokens[shared] = self.serial
        return tokens


def generate(workload: Workload, seed: int = 0) -> list[Arrival]:
    """Draw a workload; the same workload and seed give the same arrivals. The first comes at time 0. O(requests)."""
    draw = np.random.default_rng(seed)
    n = workload.requests
    gaps = _gaps(draw, workload)
    times = np.cumsum(gaps) - gaps[0]
    own = _lognormal(draw, workload.prompt_mean, workload.prompt_sigma, n)
    output = _lognormal(draw, workload.output_mean, workload.output_sigma, n)
    paths = _paths(draw, workload)
    oversize = draw.random(n) < workload.oversize_share
    tenant = draw.integers(workload.tenants, size=n).tolist()
    priority = draw.integers(workload.priorities, size=n).tolist()
    shared = workload.tree_depth * workload.tree_tokens
    none = np.zeros(0, dtype=np.int64)
    arrivals = []
    for i in range(n):
        if oversize[i]:
            content = Path(none, workload.tree_tokens, i, workload.oversize_tokens)
        else:
            content = Path(paths[i], workload.tree_tokens, i, shared + int(own[i]))
        arrivals.append(Arrival(f"r{i}", float(times[i]), content, int(output[i]), f"t{tenant[i]}", priority[i]))
    return arrivals


def _gaps(draw: np.random.Generator, workload: Workload) -> np.ndarray[Any, np.dtype[np.float64]]:
    mean = 1 / workload.rate
    if workload.arrivals == "poisson":
        return draw.exponential(mean, workload.requests)
    shape = workload.burstiness**-2
    return draw.gamma(shape, mean / shape, workload.requests)


def _lognormal(draw: np.random.Generator, mean: float, sigma: float, n: int) -> Ints:
    """Whole numbers of at least 1 whose mean is `mean` before rounding: the location is log(mean) - sigma**2 / 2."""
    values = draw.lognormal(math.log(mean) - sigma**2 / 2, sigma, n)
    return np.clip(np.rint(values), 1, _TREE_BASE).astype(np.int64)


def _paths(draw: np.random.Generator, workload: Workload) -> Ints:
    """Node numbers [requests, depth], counted level by level: level k has fanout**k nodes."""
    depth, fanout = workload.tree_depth, workload.tree_fanout
    child = draw.integers(fanout, size=(workload.requests, depth))
    nodes = np.zeros((workload.requests, depth), dtype=np.int64)
    place = np.zeros(workload.requests, dtype=np.int64)
    first = 0
    for level in range(depth):
        place = place * fanout + child[:, level]
        nodes[:, level] = first + place
        first += fanout ** (level + 1)
    return nodes
