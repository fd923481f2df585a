"""What each layer of a model costs on one rank, summed over any range of layers at once.

What lives here: bytes by layer. What does not: budgets. The sums are prefix sums, so that a search over cuts pays O(1) a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.dtypes import Dtype
from kvsched.sizing.geometry import Model


@attrs.frozen(kw_only=True)
class Widths:
    """Element types of the caches, and what quantised kernels keep besides. state, conv: None where no layer is recurrent."""

    kv: Dtype
    state: Dtype | None = None
    conv: Dtype | None = None
    scale_bytes: int = 0


@attrs.frozen
class Cost:
    """Bytes of a range of layers on one rank.

    token: of one token in layers that keep all tokens. windows: of one token in layers with a window, by window. slot: of one slot
    of recurrent state. speculative: what drafts need besides for one request. cross: of one token of cross-attention.
    attention, recurrent: how many of each.
    """

    token: int = 0
    windows: Mapping[int, int] = {}
    slot: int = 0
    speculative: int = 0
    cross: int = 0
    attention: int = 0
    recurrent: int = 0

    @property
    def window_token(self) -> int:
        """Bytes of one token in all layers with a window."""
        return sum(self.windows.values())


class LayerCosts:
    """Costs of each layer of a model, split over `tp` ranks. Raises `ConfigError` for a split that cannot be.

    recycled: whether layers with a window stand in pools of their own, beside layers that keep everything. draft_tokens: tokens verified
    in one step, after each of which a recurrent state is kept.
    """

    def __init__(self, model: Model, widths: Widths, tp: int = 1, *, recycled: bool = False, draft_tokens: int = 0) -> None:
        model.check_tp(tp)
        if model.recurrents and (widths.state is None or widths.conv is None):
            raise ConfigError("state dtype must be given: the model has recurrent layers")
        self.layers = len(model.layers)
        self.windows = tuple(sorted({one.window for one in model.attentions if one.window is not None})) if recycled else ()
        if self.windows and all(one.window is not None for one in model.attentions):
            self.windows = ()  # no layer keeps everything: one pool, and every token in it
        columns: list[list[int]] = [[] for _ in range(6 + len(self.windows))]
        for layer in model.layers:
            cells = [(one.window, one.cell(widths.kv, tp) + widths.scale_bytes) for one in layer.attention]
            slot = speculative = 0
            if layer.recurrent is not None and widths.state is not None and widths.conv is not None:
                sites = layer.recurrent.sites(1, widths.state, widths.conv, tp, speculative_slots=1, draft_tokens=draft_tokens)
                slot, speculative = sites.state, sites.speculative
            cross = layer.cross.cell(widths.kv, tp) + widths.scale_bytes if layer.cross is not None else 0
            row = [
                sum(cell for window, cell in cells if window not in self.windows), slot, speculative, cross, len(cells), int(layer.recurrent is not None),
                *(sum(cell for own, cell in cells if own == window) for window in self.windows),
            ]
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        self._sums = [[0, *accumulate(column)] for column in columns]

    def of(self, layers: range) -> Cost:
        """What these layers cost together. O(1)."""
        token, slot, speculative, cross, attention, recurrent, *windows = (sums[layers.stop] - sums[layers.start] for sums in self._sums)
        return Cost(token, dict(zip(self.windows, windows, strict=True)), slot, speculative, cross, attention, recurrent)

    def all(self) -> Cost:
        """What all layers cost together."""
        return self.of(range(self.layers))

