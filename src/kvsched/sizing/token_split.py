"""Pools split by tokens instead of layers: every rank keeps all layers of some of the tokens (law G6).

What lives here: what a token costs in such a pool, and the bound that each rank's free bytes put on its share. What does not:
how tokens are dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import gib
from kvsched.units import aligned


def world_cost(token_bytes: int, tokens: int) -> int:
    """Bytes of so many tokens over all ranks together: the same in every layout that splits by tokens.

    token_bytes: of one token over all attention layers.

    >>> world_cost(16 * 2048, 1_000_000) / (1 << 20)
    31250.0
    """
    return token_bytes * tokens


@attrs.frozen
class Share:
    """One rank's part of a token-split pool. bound: most tokens that its free bytes hold. tokens: those given to it."""

    rank: int
    free: int
    bound: int
    tokens: int

    @property
    def feasible(self) -> bool:
        """Whether it holds what it is given."""
        return self.tokens <= self.bound


@attrs.frozen
class TokenSplit:
    """A vector of tokens per rank with the bound of each rank.

    An infeasible vector is reported, never clipped: the layout must leave more room, or the vector is another one. complaints: what
    is wrong with it, in sentences.
    """

    shares: tuple[Share, ...]
    token_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of all ranks together."""
        return sum(share.tokens for share in self.shares)

    @property
    def feasible(self) -> bool:
        """Whether every rank holds what it is given."""
        return all(share.feasible for share in self.shares)

    @property
    def complaints(self) -> tuple[str, ...]:
        """Ranks that cannot hold their share; and the largest share on the rank with least free bytes."""
        out = [
            f"rank {one.rank} is given {one.tokens:,} tokens and its {gib(one.free)} GiB hold {one.bound:,}: the layout must leave it "
            f"{gib((one.tokens - one.bound) * self.token_bytes)} GiB more"
            for one in self.shares if not one.feasible
        ]
        largest = max(self.shares, key=lambda one: one.tokens)
        if len(self.shares) > 1 and largest.free < min(one.free for one in self.shares if one is not largest):
            out.append(
                f"rank {largest.rank} has the least free bytes, {gib(largest.free)} GiB, and the largest share, "
                f"{largest.tokens / self.tokens:.1%} of the tokens")
        return tuple(out)


def token_split(token_bytes: int, free: Sequence[int], page_size: int = 1, vector: Sequence[int] | None = None) -> TokenSplit:
    """The split over ranks with so many free bytes each. vector: tokens per rank to hold against the bounds; None: all that fit.

    Raises `ConfigError` for a vector of another length or with a negative entry.
    """
    if vector is not None and (len(vector) != len(free) or any(one < 0 for one in vector)):
        raise ConfigError(f"vector must be {len(free)} numbers of tokens of at least 0, one for each rank, not {list(vector)}")
    bounds = [aligned(max(0, one) // token_bytes, page_size) for one in free]
    given = bounds if vector is None else vector
    return TokenSplit(tuple(Share(*one) for one in zip(range(len(free)), free, bounds, given, strict=True)), token_bytes)
