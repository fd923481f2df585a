"""Pipeline stages: what each can hold, which one binds, and which cut is best (law G5).

What lives here: arithmetic over layers and bytes. What does not: how many bytes a stage has left, which its caller knows
(`kvsched.sizing.plan` before a boot, `kvsched.sizing.boot` after one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.checks import at_least


def even_cut(layers: int, stages: int) -> tuple[int, ...]:
    """Layers by stage, as equal as can be; what is left over goes to the stages before the last, from the back.

    The first stage also has the embedding and the last the head, so they get theirs last.

    >>> even_cut(64, 3), even_cut(61, 4), even_cut(32, 1)
    ((21, 22, 21), (15, 15, 16, 15), (32,))
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"pp must be from 1 to {layers}, the number of layers, not {stages}")
    base, left = divmod(layers, stages)
    order = [*range(stages - 2, 0, -1), 0, stages - 1] if stages > 1 else [0]
    more = set(order[:left])
    return tuple(base + (stage in more) for stage in range(stages))


def check_cut(cut: Sequence[int], layers: int) -> tuple[int, ...]:
    """The cut, where it has every layer once and no empty stage; else `ConfigError`."""
    if any(one < 1 for one in cut) or sum(cut) != layers:
        raise ConfigError(f"a cut must be numbers of layers of at least 1 with a sum of {layers}, not {', '.join(map(str, cut))} (sum {sum(cut)})")
    return tuple(cut)


def ranges(cut: Sequence[int]) -> tuple[range, ...]:
    """The numbers of the layers of each stage.

    >>> ranges((28, 20, 16))[1]
    range(28, 48)
    """
    ends = list(accumulate(cut))
    return tuple(range(end - size, end) for end, size in zip(ends, cut, strict=True))


@attrs.frozen
class Stage:
    """What one stage has for pages on each of its ranks, and what a token costs there. Both in bytes.

    A stage without attention layers costs nothing and bounds nothing.
    """

    available: int
    token_bytes: int = attrs.field(validator=at_least(0))
    layers: range = range(0)

    def pages(self, page_size: int) -> int | None:
        """Pages that fit, None for any number; 0 where less than nothing is left."""
        return max(0, self.available) // (page_size * self.token_bytes) if self.token_bytes else None

    def tokens(self, page_size: int) -> int | None:
        """The same in tokens."""
        pages = self.pages(page_size)
        return None if pages is None else pages * page_size


@attrs.frozen
class Pool:
    """The pool of a pipeline: every rank allocates the agreed count, the minimum over the stages (law G5).

    pages: agreed. binding: number of the stage that has least, from 0; of several, the first. capacities: tokens that each stage
    could hold, None where it has no attention layer.
    """

    pages: int
    page_size: int
    binding: int
    capacities: tuple[int | None, ...]
    stages: tuple[Stage, ...]

    @property
    def tokens(self) -> int:
        """Agreed tokens."""
        return self.pages * self.page_size

    def allocated(self, stage: int) -> int:
        """Bytes that a rank of that stage allocates: for the agreed count, whatever more it could hold (case C58)."""
        return self.tokens * self.stages[stage].token_bytes


def pool(stages: Sequence[Stage], page_size: int) -> Pool:
    """The agreed pool over the stages. Raises `ConfigError` where no stage has an attention layer.

    >>> cell = 2048
    >>> pool([Stage(46_811 * 56 * cell, 56 * cell), Stage(46_811 * 56 * cell, 8 * cell)], 16).capacities
    (46800, 327664)
    """
    capacities = tuple(stage.tokens(page_size) for stage in stages)
    known = [(tokens, number) for number, tokens in enumerate(capacities) if tokens is not None]
    if not known:
        raise ConfigError("no stage has an attention layer")
    tokens, binding = min(known)
    return Pool(tokens // page_size, page_size, binding, capacities, tuple(stages))


@attrs.frozen
class Cap:
    """A bound that a stage puts on every cut that leaves it as it is. tokens: what it holds."""

    stage: int
    tokens: int


def caps(before: Pool, cut: Sequence[int]) -> tuple[Cap, ...]:
    """Bounds on the pool of another cut from stages that it keeps: the same layers on the same ranks hold what they held (law G5).

    So no cut that keeps the binding stage beats the pool there is, whatever a model of the other stages predicts. Tightest first.
    """
    kept = [
        Cap(number, tokens) for number, (layers, stage, tokens) in enumerate(zip(ranges(cut), before.stages, before.capacities, strict=False))
        if tokens is not None and layers == stage.layers and len(cut) == len(before.stages)
    ]
    return tuple(sorted(kept, key=lambda cap: (cap.tokens, cap.stage)))


def best_cut(layers: int, stages: int, stage_of: Callable[[int, range], Stage], page_size: int) -> tuple[int, ...]:
    """The cut with the largest pool; of several, one whose longest stage is shortest. Same input, same answer.

    stage_of: (number of the stage, its layers) to the stage; called O(stages x layers^2) times. O(stages x layers^2).
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"pp must be from 1 to {layers}, the number of layers, not {stages}")

    def held(number: int, start: int, end: int) -> float:
        pages = stage_of(number, range(start, end)).pages(page_size)
        return float("inf") if pages is None else pages

    most = _best_pages(layers, stages, held)
    shortest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # by layers placed: (longest stage, cut) among cuts that hold `most`
    for number in range(stages):
        new: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (longest, cut) in shortest.items():
            for end in range(start + 1, layers - (stages - 1 - number) + 1):
                if held(number, start, end) < most:
                    continue
                candidate = (max(longest, end - start), (*cut, end - start))
                if end not in new or candidate < new[end]:
                    new[end] = candidate
        shortest = new
    return shortest[layers][1]


def _best_pages(layers: int, stages: int, held: Callable[[int, int, int], float]) -> float:
    best: dict[int, float] = {0: float("inf")}
    for number in range(stages):
        new: dict[int, float] = {}
        for start, pages in best.items():
            for end in range(start + 1, layers - (stages - 1 - number) + 1):
                new[end] = max(new.get(end, 0.0), min(pages, held(number, start, end)))
        best = new
    return best[layers]
