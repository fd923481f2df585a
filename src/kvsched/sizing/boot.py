"""Instruments: what one boot printed for each pipeline stage, whether its figures hang together, and what they recover (law G8).

What lives here: the record, the verification of its chain, the reserve read from it, and predictions for cuts that were not booted. What
does not: a model of the reserve. It differs 2.3-fold between the stages of one boot; it is read, and a prediction is told it.

A record is a JSON object, described in docs/sizing.md. Bytes are of one rank of the stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.account import Account, Item, Provenance
from kvsched.sizing.amounts import GIB, MIB, gib
from kvsched.sizing.checks import integer
from kvsched.sizing.stages import Pool, Stage, pool, ranges

FORMAT = "kvsched-boot/1"
"""What `format` of a record must be."""
INSIDE_THE_RESERVE = ("arming_floor",)
"""Names that are part of what a reserve already covers, and so must not be booked besides (law G8)."""
STATE_ITEMS = ("state", "speculative")
"""Items that hold recurrent state; they move with the recurrent layers."""
PRINTED = GIB // 100
"""Device readings print to 0.01 GiB, so that two of them can differ by that much and be the same."""
GATE_BOOTS = 4
"""Measured boots that must reproduce from their own instruments before a predicted pool decides anything (law G8)."""
_TOP = ("format", "name", "page_size", "cell_bytes", "tokens", "stages", "note")
_STAGE = (
    "layers", "attention_layers", "recurrent_layers", "budget_bytes", "items", "rest_bytes", "available_bytes", "capacity_tokens",
    "kv_bytes", "state_bytes", "measured_bytes",
)


class BrokenChain(ConfigError):
    """A record whose figures do not follow from each other. links: what does not hold, in sentences."""

    def __init__(self, name: str, links: Sequence[str]) -> None:
        super().__init__(f"boot {name!r} does not hang together: {'; '.join(links)}")
        self.links = tuple(links)


@attrs.frozen(kw_only=True)
class Instruments:
    """What one stage printed.

    budget: bytes that the server may use. items: what was booked. rest: budget less items, as printed. available: bytes that the
    stage offered for pages. Where printed: capacity, tokens that it said it could hold; kv, bytes of its pages as allocated; state, bytes
    of recurrent state as allocated (an item books what was budgeted); measured, by how much the device's memory grew for both.
    """

    layers: int
    attention_layers: int
    recurrent_layers: int
    account: Account
    rest: int
    available: int
    capacity: int | None = None
    kv: int | None = None
    state: int | None = None
    measured: int | None = None

    @property
    def reserve(self) -> int:
        """What the boot kept back: rest less what it offered for pages. Recovered, never modelled."""
        return self.rest - self.available

    @property
    def budgeted_state(self) -> int:
        """Bytes booked for recurrent state, drafts included."""
        return sum(item.bytes for item in self.account.items if item.name in STATE_ITEMS)

    @property
    def allocated_state(self) -> int:
        """Bytes of recurrent state as allocated where the boot printed them, else as booked."""
        return self.budgeted_state if self.state is None else self.state


@attrs.frozen(kw_only=True)
class Boot:
    """One boot. cell: bytes of one token in one attention layer on one rank. tokens: the pool that it printed."""

    name: str
    page_size: int
    cell: int
    tokens: int
    stages: tuple[Instruments, ...]

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def reserves(self) -> tuple[int, ...]:
        """What each stage kept back, in bytes."""
        return tuple(stage.reserve for stage in self.stages)

    def pool(self) -> Pool:
        """The pool that its own instruments lead to."""
        parts = ranges(self.cut)
        return pool(
            [Stage(one.available, self.cell * one.attention_layers, part) for one, part in zip(self.stages, parts, strict=True)],
            self.page_size)

    @property
    def reproduces(self) -> bool:
        """Whether its instruments lead to the pool that it printed."""
        return self.pool().tokens == self.tokens

    def predicted_bytes(self, stage: int) -> int:
        """What the device's memory should have grown by on that stage: pages for the agreed tokens, and state (law G4)."""
        one = self.stages[stage]
        return self.tokens * self.cell * one.attention_layers + one.allocated_state

    def residuals(self) -> tuple[int | None, ...]:
        """Measured less predicted bytes of each stage; None where nothing was measured."""
        return tuple(
            None if one.measured is None else one.measured - self.predicted_bytes(number) for number, one in enumerate(self.stages)
        )

    def verify(self) -> tuple[str, ...]:
        """Hold every figure against those it follows from. Returns remarks; raises `BrokenChain` naming all links that do not hold.

        Each stage: its items and its rest make the budget; what it offered is not more than its rest; the capacity it printed follows
        from what it offered; its pages have the agreed size. Together: the pool is the minimum, and what the devices grew
        by exceeds the prediction by the same everywhere.
        """
        broken = [link for number, stage in enumerate(self.stages) for link in self._broken_links(number, stage)]
        if not self.reproduces:
            own = self.pool()
            broken.append(f"the pool is {self.tokens:,} tokens as printed and {own.tokens:,} by stage {own.binding}, which binds")
        known = [one for one in self.residuals() if one is not None]
        if known and max(known) - min(known) > PRINTED:
            listed = ", ".join("-" if one is None else f"{one / MIB:.1f}" for one in self.residuals())
            broken.append(f"measured less predicted bytes differ between stages: {listed} MiB, where a constant is expected")
        if broken:
            raise BrokenChain(self.name, broken)
        return tuple(self._remarks())

    def _broken_links(self, number: int, stage: Instruments) -> list[str]:
        out = []
        try:
            stage.account.check_count(stage.rest)
        except ConfigError as error:
            out.append(str(error))
        if stage.reserve < 0:
            out.append(f"stage {number} offers {gib(stage.available)} GiB for pages and has a rest of {gib(stage.rest)}")
        own = Stage(stage.available, self.cell * stage.attention_layers).tokens(self.page_size)
        if stage.capacity is not None and stage.capacity != own:
            out.append(f"stage {number} could hold {stage.capacity:,} tokens as printed and {own or 0:,} by what it offered")
        due = self.tokens * self.cell * stage.attention_layers
        if stage.kv is not None and abs(stage.kv - due) > PRINTED:
            out.append(f"stage {number} allocated {gib(stage.kv)} GiB of pages, and the agreed count takes {gib(due)}")
        return out

    def _remarks(self) -> list[str]:
        reserves = [max(1, one) for one in self.reserves]
        out = [f"the reserve is {', '.join(f'{one // MIB:,}' for one in self.reserves)} MiB by stage, a {max(reserves) / min(reserves):.1f}-fold spread"]
        for number, stage in enumerate(self.stages):
            if stage.state is not None and stage.budgeted_state != stage.state and stage.state:
                out.append(
                    f"stage {number} booked {stage.budgeted_state / stage.state:.3f} of the state that it allocated; predictions charge what "
                    f"was allocated")
        return out

    @classmethod
    def from_dict(cls, raw: object) -> Boot:
        """Read a record. Raises `ConfigError` naming the key and what was allowed; an unknown key is an error."""
        top = _object(raw, "boot record", _TOP)
        if top.get("format") != FORMAT:
            raise ConfigError(f"boot record: format must be {FORMAT!r}, not {top.get('format')!r}")
        stages = top.get("stages")
        if not isinstance(stages, list) or not stages:
            raise ConfigError(f"boot record: stages must be a list of at least one object, not {stages!r}")
        name = top.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"boot record: name must be a string, not {name!r}")
        return cls(
            name=name, page_size=integer("boot record: page_size", top.get("page_size"), 1),
            cell=integer("boot record: cell_bytes", top.get("cell_bytes"), 1), tokens=integer("boot record: tokens", top.get("tokens"), 1),
            stages=tuple(_instruments(one, number) for number, one in enumerate(stages)),
        )


def _object(raw: object, what: str, allowed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{what} must be an object, not {type(raw).__name__}")
    unknown = sorted(set(raw) - set(allowed))
    if unknown:
        raise ConfigError(f"{what}: {', '.join(map(str, unknown))} is no key of it; allowed: {', '.join(allowed)}")
    return raw


def _instruments(raw: object, number: int) -> Instruments:
    what = f"boot record: stages[{number}]"
    one = _object(raw, what, _STAGE)

    def needed(key: str, low: int = 0) -> int:
        return integer(f"{what}.{key}", one.get(key), low)

    def printed(key: str) -> int | None:
        return None if one.get(key) is None else needed(key)

    items = one.get("items")
    if not isinstance(items, Mapping):
        raise ConfigError(f"{what}.items must be an object of names and bytes, not {items!r}")
    inside = [name for name in items if name in INSIDE_THE_RESERVE]
    if inside:
        raise ConfigError(f"{what}.items: {', '.join(inside)} already sits inside the reserve, and is not booked besides")
    booked = tuple(Item(name, integer(f"{what}.items.{name}", size), Provenance.MEASURED) for name, size in items.items())
    return Instruments(
        layers=needed("layers", 1), attention_layers=needed("attention_layers"), recurrent_layers=needed("recurrent_layers"),
        account=Account(needed("budget_bytes", 1), booked, f"stage {number}"), rest=needed("rest_bytes"), available=needed("available_bytes"),
        capacity=printed("capacity_tokens"), kv=printed("kv_bytes"), state=printed("state_bytes"), measured=printed("measured_bytes"),
    )


def may_gate(boots: Sequence[Boot]) -> bool:
    """Whether predictions may decide anything yet: enough measured boots, and all reproduce from their own instruments (law G8)."""
    return len(boots) >= GATE_BOOTS and all(boot.reproduces for boot in boots)
