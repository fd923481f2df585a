"""How the next token is chosen from logits: greedy, or drawn with temperature and top_p.

A draw depends on the seed, on which sample of a request it is, and on the position of the token. It depends on nothing else: who
else runs, how a prompt was cut into chunks, or whether a request was retracted on the way does not change what is said.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvsched.errors import InvalidRequest

MOST_SEED = 2**63 - 1
"""Largest seed: what fits a signed integer of 64 bits."""
HEAD = 1024
"""Tokens that are looked at first for top_p: sorting these alone is much cheaper than sorting a vocabulary."""


def _number(low: float, high: float, *, above: bool = False) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and not (above and value == low)
        if not good:
            raise InvalidRequest(f"{attribute.name} must be a number {'above' if above else 'from'} {low} {'and at most' if above else 'to'} {high}, not {value!r}")

    return check


def _seed(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SEED:
        raise InvalidRequest(f"seed must be an integer from 0 to {MOST_SEED}, not {value!r}")


@attrs.frozen
class Sampling:
    """How the tokens of one request are chosen. A bad value raises `kvsched.errors.InvalidRequest`.

    temperature: 0 takes the likeliest token. top_p: draw among the likeliest tokens that hold this much probability
    together. seed: same seed, same text.
    """

    temperature: float = attrs.field(default=1.0, validator=_number(0, 100))
    top_p: float = attrs.field(default=1.0, validator=_number(0, 1, above=True))
    seed: int = attrs.field(default=0, validator=_seed)


GREEDY = Sampling(temperature=0.0)


class Sampler:
    """The parameters of each row of the block table, and the choice for the rows of a step."""

    def __init__(self) -> None:
        self._temperature = np.zeros(16)
        self._top_p = np.ones(16)
        self._seed = np.zeros(16, np.uint64)
        self._child = np.zeros(16, np.uint64)

    def bind(self, row: int, sampling: Sampling, child: int) -> None:
        """From now on, `row` belongs to sample `child` of a request with these parameters."""
        if row >= len(self._seed):
            for name in ("_temperature", "_top_p", "_seed", "_child"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros(row + 1, array.dtype))))
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._seed[row] = sampling.seed
        self._child[row] = child

    def choose(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Tokens int64 [m] for logits [m, vocabulary]. rows: of the table. positions: which the tokens will have."""
        tokens = logits.argmax(-1)
        warm = np.flatnonzero(self._temperature[rows])
        if len(warm):
            mine = rows[warm]
            drawn = np.array([self._uniform(row, position) for row, position in zip(mine.tolist(), positions[warm].tolist(), strict=True)])
            at = torch.from_numpy(warm).to(logits.device)
            tokens[at] = draw(logits[at], self._temperature[mine], self._top_p[mine], drawn)
        return tokens

    def _uniform(self, row: int, position: int) -> float:
        key = np.array([self._seed[row], self._child[row]], np.uint64)
        return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def draw(logits: torch.Tensor, temperature: npt.NDArray[np.float64], top_p: npt.NDArray[np.float64],
         uniform: npt.NDArray[np.float64]) -> torch.Tensor:
    """One token of each row by inverse transform: int64 [m].

    logits: [m, vocabulary]. temperature, top_p, uniform: [m], uniform from 0 to 1. Where top_p is 1 the tokens stand in the
    order of their ids, otherwise likeliest first (ties by id), cut after the first that brings the sum to top_p.
    """
    device = logits.device
    scaled = logits.to(torch.float64, copy=True).div_(torch.from_numpy(temperature).to(device)[:, None])
    shares = torch.softmax(scaled, -1)
    where = torch.from_numpy(uniform).to(device)
    if (top_p >= 1).all():
        return _pick(shares, where)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
    whole = torch.from_numpy(np.flatnonzero(top_p >= 1)).to(device)
    if len(whole):
        tokens[whole] = _pick(shares[whole], where[whole])
    cut = torch.from_numpy(np.flatnonzero(top_p < 1)).to(device)
    if len(cut):
        tokens[cut] = _nucleus(shares[cut], torch.from_numpy(top_p).to(device)[cut], where[cut])
    return tokens


def _pick(shares: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum exceeds `where` of the whole, never one of share 0."""
    sums = shares.cumsum(-1)
    total = sums[:, -1:]
    index = torch.searchsorted(sums, where[:, None] * total, right=True)
    if bool((index == shares.shape[1]).any()):  # rounding: then it is the last token that has a share
        index = torch.minimum(index, shares.shape[1] - 1 - (shares > 0).flip(-1).int().argmax(-1, keepdim=True))
    return index[:, 0]


def _nucleus(shares: torch.Tensor, top_p: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    width = shares.shape[1]
    order, ids = shares.topk(min(HEAD, width), -1)
    if width > HEAD and bool((order.sum(-1) < top_p).any()):
        order, ids = shares.sort(stable=True, dim=-1, descending=True)
    before = order.cumsum(-1) - order
    kept = order * (before < top_p[:, None])
    kept[:, 0] = order[:, 0]
    return ids.gather(1, _pick(kept, where)[:, None])[:, 0]


def seeded(value: int | None, fallback: int) -> int:
    """A seed as clients state it (any integer of 64 bits, negative ones included) or the fallback, as `Sampling` wants it."""
    return fallback if value is None else value % (MOST_SEED + 1)


def perplexed(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Which rows of logits [m, vocabulary] hold something that is not finite: whatever was computed there is worthless."""
    if len(logits) == 0:
        return np.zeros(0, np.bool_)
    sums = logits.sum(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # finite where all are: one pass, and no tensor of flags
    return (~torch.isfinite(sums)).cpu().numpy()


