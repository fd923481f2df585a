"""A hypothesis state machine over the calls of a scheduler's host, for ours or for one built from your own parts.

What lives here: which calls come and with what; hypothesis chooses and shrinks. What does not: the calls themselves and
what is checked after each (`kvsched.testing.host`). The same from a plain seed, many times faster: `driver`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvsched.config import HEADS, ORDERS
from kvsched.testing.driver import LIVE, Setup, random_limits, random_setup, random_submit, with_shared
from kvsched.testing.host import CheckedHost, Parts
from kvsched.testing.misuse import KINDS

SMALL = st.randoms(use_true_random=False)
"""A random generator whose draws hypothesis makes, records and shrinks."""


class SchedulerMachine(RuleBasedStateMachine):
    """Every call of the API in any order, on tiny pools; after each, the executor, the plain model and `check()`.

    Make your own with `scheduler_machine(parts)`.
    """

    parts = Parts()

    def __init__(self) -> None:
        super().__init__()
        self.host: CheckedHost | None = None
        self.texts: list[list[int]] = []

    @property
    def _host(self) -> CheckedHost:
        assert self.host is not None
        return self.host

    def do(self, call: str, /, **arguments: Any) -> None:
        """One call of the host; a failing run prints its calls as a list for `kvsched.testing.driver.play`."""
        note(f"    {(call, arguments)!r},")
        getattr(self._host, call)(**arguments)

    def make(self, setup: Setup) -> None:
        """The host of this run."""
        note(f"play({setup!r}, [")
        self.host = CheckedHost(**setup, parts=self.parts)

    @property
    def _live(self) -> list[str]:
        return list(self._host.model.accounts)

    @initialize(rng=SMALL)
    def build(self, rng: Random) -> None:
        """A tiny scheduler with any combination of knobs."""
        self.make(random_setup(rng))

    @precondition(lambda self: len(self._live) < LIVE)
    @rule(rng=SMALL)
    def submit(self, rng: Random) -> None:
        """A request; shared prefixes and live ids are common."""
        _, fields = random_submit(rng, self._host, self.texts)
        self.do("submit", **fields)

    @precondition(lambda self: len(self._host.in_flight) < self._host.model.config.max_in_flight)
    @rule(admit=st.sampled_from([None] * 9 + [0, 1]), free_pages=st.sampled_from([None] * 9 + [0, 3]),
          prefill_tokens=st.sampled_from([None] * 9 + [0, 2]))
    def schedule(self, admit: int | None, free_pages: int | None, prefill_tokens: int | None) -> None:
        """A plan."""
        self.do("schedule", admit=admit, free_pages=free_pages, prefill_tokens=prefill_tokens)

    @precondition(lambda self: self._host.in_flight)
    @rule()
    def step(self) -> None:
        """The usual: commit the oldest plan and make the next."""
        self.do("commit")
        self.do("schedule")

    @precondition(lambda self: self._host.in_flight)
    @rule(failed=st.sampled_from([0] * 6 + [1, 2, 3]), finished=st.sampled_from([0] * 6 + [1, 2, 5]))
    def commit(self, failed: int, finished: int) -> None:
        """The oldest plan's result, some rows failed or finished by the host."""
        self.do("commit", failed=failed, finished=finished)

    @precondition(lambda self: self._host.in_flight)
    @rule()
    def run_ahead(self) -> None:
        """The oldest plan that has not run is run now and committed later."""
        self.do("run")

    @precondition(lambda self: self._host.in_flight)
    @rule()
    def rollback(self) -> None:
        """The newest plan did not happen."""
        self.do("rollback")

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A live, ended or unknown id, or a parent of children."""
        names = sorted({*self._live, *(a.parent for a in self._host.model.accounts.values()), "r0", "nobody"})
        self.do("abort", name=data.draw(st.sampled_from(names)))

    @rule()
    def abort_all(self) -> None:
        """Everything that lives."""
        self.do("abort_all")

    @rule(mode=st.sampled_from(["hold", "retract"]))
    def pause(self, mode: str) -> None:
        """Pause, perhaps again."""
        self.do("pause", mode=mode)

    @rule()
    def resume(self) -> None:
        """Resume, perhaps without a pause."""
        self.do("resume")

    @rule()
    def flush(self) -> None:
        """Empty the cache, or be told why not."""
        self.do("flush")

    @precondition(lambda self: any(not a.ready for a in self._host.model.accounts.values()))
    @rule(data=st.data())
    def mark_ready(self, data: st.DataObject) -> None:
        """A request that the host held back may go."""
        self.do("ready", name=data.draw(st.sampled_from([a.id for a in self._host.model.accounts.values() if not a.ready])))

    @rule(data=st.data(), pages=st.integers(1, 4), steps=st.sampled_from([None, None, 1, 3]))
    def hold_pages(self, data: st.DataObject, pages: int, steps: int | None) -> None:
        """Pages set aside, free ones or a request's own."""
        self.do("hold", name=data.draw(st.sampled_from(["h1", "h2", *self._live])), pages=pages, steps=steps)

    @precondition(lambda self: self._host.holds)
    @rule(data=st.data())
    def release_pages(self, data: st.DataObject) -> None:
        """Held pages come back."""
        self.do("release", name=data.draw(st.sampled_from(sorted(self._host.holds))))

    @rule(rng=SMALL)
    def set_limits(self, rng: Random) -> None:
        """Another limit, head policy or order."""
        self.do("limits", **random_limits(rng, self._host))

    @precondition(lambda self: self._host.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A pin is given up."""
        self.do("unpin", name=data.draw(st.sampled_from([*self._host.stops, "nobody"])))

    @rule(kind=st.sampled_from(KINDS))
    def misuse(self, kind: str) -> None:
        """What a host may not do is a typed error and changes nothing."""
        self.do("misuse", kind=kind)

    def teardown(self) -> None:
        """Everything ends and every page comes back."""
        if self.host is not None:
            self.host.drain()


def scheduler_machine(parts: Parts | None = None, **settings: Any) -> type[SchedulerMachine]:
    """A state machine class over your own pool, cache or scheduler; run it with `hypothesis.stateful` as any other.

    settings: keys of `SchedulerConfig` that every run shares (the others are drawn).
    """
    fixed = dict(settings)
    order = fixed.get("order", ORDERS[0])
    head = fixed.get("head", HEADS[0])
    name = f"SchedulerMachine_{order}_{head}" if fixed else "SchedulerMachine"

    class Machine(SchedulerMachine):
        @initialize(rng=SMALL)
        def build(self, rng: Random) -> None:
            setup = with_shared(random_setup(rng), fixed)
            self.make(setup)

    Machine.parts = Parts() if parts is None else parts
    Machine.__name__ = Machine.__qualname__ = name
    return Machine
