"""The scheduler against the executor and the plain model, in random runs; and proof that they catch planted faults.

Short here; `make soak` makes at least 200,000 steps and prints how many.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvsched import NullCache, PagePool, RadixCache, Scheduler, SchedulerConfig
from kvsched.plan import Outcome, Plan, StepResult
from kvsched.protocols import EventSink, Pool, TreeCache
from kvsched.request import Namespace, Request
from kvsched.testing import CheckedHost, Parts, RunFailed, drive
from kvsched.testing.machine import scheduler_machine
from kvsched.units import Pages, Tokens
from kvsched.verdict import Accepted, RefusalReason, Refused


def profile(examples: int, steps: int) -> settings:
    """Reproducible: the same examples in every run, and nothing kept between runs."""
    return settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), deadline=None,
                    database=None, derandomize=True)


def test_machine() -> None:
    run_state_machine_as_test(scheduler_machine(), settings=profile(60, 30))


def test_driver() -> None:
    tally = drive(1, 12_000)
    assert tally.finished > 600
    assert tally.retractions > 20


def test_driver_in_long_runs() -> None:
    drive(10_001, 2_000, calls_per_run=400)


@pytest.mark.soak
def test_soak_driver(capsys: pytest.CaptureFixture[str]) -> None:
    tallies = [drive(100_000, 160_000), drive(900_000, 60_000, calls_per_run=600)]
    with capsys.disabled():
        print(f"\nsoak, seeded driver: {sum(t.steps for t in tallies)} steps, {tallies}")  # noqa: T201 - what the run is for
    assert sum(t.steps for t in tallies) >= 200_000


@pytest.mark.soak
def test_soak_machine(capsys: pytest.CaptureFixture[str]) -> None:
    steps = 0

    class Counted(scheduler_machine()):  # type: ignore[misc]  # a class made by a function
        def teardown(self) -> None:
            nonlocal steps
            super().teardown()
            steps += self.host.calls if self.host else 0

    run_state_machine_as_test(Counted, settings=profile(1_000, 60))
    with capsys.disabled():
        print(f"\nsoak, hypothesis machine: {steps} steps")  # noqa: T201 - what the run is for


# -- what the model must allow -----------------------------------------------------------------------------------------


def test_a_plan_that_evicted_leaves_shorter_matches_when_it_is_rolled_back() -> None:
    """Page 1, four pages: D lacks one token of four, C two. B's next page takes the last page that D had, and then C is the earlier one."""
    host = CheckedHost({"page_size": 1, "max_running": 1, "order": "sjf"}, 4)
    host.submit("A", [0, 1, 2], 1)
    host.schedule()
    host.commit()
    host.submit("B", [3], 4, cache_write=False)
    host.schedule()
    host.commit()
    host.submit("C", [3, 3], 1)
    host.submit("D", [0, 1, 2, 3], 1)
    assert host.state["waiting"] == ["D", "C"]
    host.schedule()
    assert host.in_flight[0].plan.evicted == 1
    host.rollback()
    assert host.state["waiting"] == ["C", "D"]
    host.drain()


def test_who_comes_first_by_priority_has_overtaken_nobody() -> None:
    """One adapter, one token a step: B goes before A by its priority. C passes A later, in the first pass that steps over A."""
    host = CheckedHost({"page_size": 2, "max_step_tokens": 1, "decode_every": 3, "order": "priority", "head": "skip", "max_adapters": 1,
                        "admission": "guaranteed"}, 3, prefix_cache=False)
    host.submit("A", [0, 3], 5, adapter="y")
    host.submit("B", [2, 0, 1], 3, priority=-1, adapter="x")
    host.submit("C", [1], 2, adapter="x", ignore_eos=True)
    host.drain()


def test_a_sibling_may_be_passed_while_the_prefix_is_in_flight() -> None:
    """A/0 is computed by a plan in flight and waited for by A/1; B takes the second place in the pass of the grant."""
    host = CheckedHost({"page_size": 1, "max_running": 2, "max_step_tokens": 3, "prefill_grant": 1, "max_in_flight": 2,
                        "decode_every": 2, "admission": "guaranteed"}, 8)
    host.submit("A", [2, 3], 3, n=3)
    host.schedule()
    host.submit("B", [2, 1], 1, cache_read=False)
    host.schedule()
    assert host.in_flight[1].plan.admitted == ("B",)
    host.drain()


# -- planted faults: each must be found --------------------------------------------------------------------------------


def found(parts: Parts, steps: int = 6_000, shared: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(RunFailed) as caught:
        drive(1, steps, parts=parts, settings=shared)
    return str(caught.value)


class TwiceOwned(PagePool):
    """Now and then hands out a page that is handed out already."""

    def alloc(self, n: int) -> Pages:
        pages = super().alloc(n)
        mine = getattr(self, "mine", pages)
        self.mine = pages
        if n and len(mine) and self.free % 3 == 1:
            pages = pages.copy()
            pages[0] = mine[0]
        return pages


class Forgetful(PagePool):
    """Loses one page for good when many are released."""

    def release(self, pages: Pages) -> None:
        super().release(pages[1:] if len(pages) > 2 else pages)


class Blurred(RadixCache):
    """Takes token 3 for token 2, so it finds prefixes that are not there."""

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        return super().match(namespace, np.minimum(tokens, 2).astype(np.int32))

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> Any:
        return super().lock(namespace, np.minimum(tokens, 2).astype(np.int32), priority)

    def extend(self, handle: Any, tokens: Tokens, pages: Pages, adopt: bool = True) -> Any:
        return super().extend(handle, np.minimum(tokens, 2).astype(np.int32), pages, adopt)


class OneSpace(RadixCache):
    """Forgets which namespace a prefix belongs to."""

    def match(self, namespace: Hashable, tokens: Tokens) -> int:
        return super().match(None, tokens)

    def lock(self, namespace: Hashable, tokens: Tokens, priority: int = 0) -> Any:
        return super().lock(None, tokens, priority)


class Boaster(RadixCache):
    """Promises one page more than it can evict."""

    @property
    def evictable(self) -> int:
        return super().evictable + 1


@pytest.mark.parametrize("pool", [TwiceOwned, Forgetful])
def test_a_faulty_pool_is_found(pool: type[PagePool]) -> None:
    found(Parts(pool=pool))


@pytest.mark.parametrize(("cache", "text"), [(Blurred, ""), (OneSpace, ""), (Boaster, "")])
def test_a_faulty_cache_is_found(cache: type[RadixCache], text: str) -> None:
    assert text in found(Parts(cache=lambda size, eviction: cache(size, eviction=eviction)))


class Leaky(Scheduler):
    """Takes one page that nobody accounts for."""

    def commit(self, plan: Plan, result: StepResult) -> Outcome:
        outcome = super().commit(plan, result)
        pool = self.planted_pool
        if outcome.ended and pool.free:
            pool.alloc(1)
        return outcome

    planted_pool: Pool


class Stutterer(Scheduler):
    """Delivers the token of the row before once more."""

    def commit(self, plan: Plan, result: StepResult) -> Outcome:
        outcome = super().commit(plan, result)
        if plan.decodes > 1:
            tokens = np.array(outcome.tokens)
            tokens[1] = tokens[0]
            return attrs.evolve(outcome, tokens=tokens)
        return outcome


class Picky(Scheduler):
    """Refuses what would just fit."""

    def submit(self, request: Request) -> Accepted | Refused:
        if len(request.tokens) == self.max_servable_tokens and request.max_new_tokens == 1:
            return Refused(request.id, RefusalReason.NEVER_FITS, 1, 1, retryable=False)
        return super().submit(request)


class Stubborn(Scheduler):
    """Ignores rollbacks of plans that admitted somebody: it commits nothing, and forgets them."""

    def rollback(self, plan: Plan) -> None:
        if plan.admitted and len(plan):
            self.commit(self.in_flight[0], StepResult(np.zeros((len(self.in_flight[0]), 1 + self.config.lookahead_tokens), np.int64)))
            return
        super().rollback(plan)


def planted(kind: type[Scheduler]) -> Parts:
    def make(config: SchedulerConfig, pool: Pool, cache: TreeCache, sink: EventSink) -> Scheduler:
        scheduler = kind(config, pool, cache, sink=sink)
        scheduler.planted_pool = pool  # type: ignore[attr-defined]
        return scheduler

    return Parts(scheduler=make)


@pytest.mark.parametrize("kind", [Leaky, Stutterer, Picky, Stubborn])
def test_a_faulty_scheduler_is_found(kind: type[Scheduler]) -> None:
    found(planted(kind), 20_000)


OTHER: dict[str, tuple[Callable[[Any], Any], str | tuple[str, ...]]] = {
    "max_running": (lambda value: value + 1, "max_running"),
    "max_step_tokens": (lambda value: value + 1, "max_step_tokens"),
    "chunk_tokens": (lambda value: value and value + 1, "chunk_tokens"),
    "long_prefill_tokens": (lambda _: None, "long_prefill_tokens"),
    "max_partial_prefills": (lambda _: None, "max_partial_prefills"),
    "max_adapters": (lambda _: None, "max_adapters"),
    "context_limit": (lambda _: None, ("B2/B11", "A2 limit")),
    "max_queued_requests": (lambda _: None, "B2/B11"),
    "max_queued_tokens": (lambda _: None, "B2/B11"),
    "max_inflight_prompt_tokens": (lambda _: None, "B2/B11"),
    "admission": (lambda _: "expected", ""),
    "order": (lambda value: "lof" if value == "fcfs" else value, "strict fcfs"),
    "head": (lambda _: "skip", "strict fcfs"),
    "prefill_grant": (lambda _: None, "C4 prefill grant"),
    "decode_every": (lambda value: value + 6, "C4 decode gap"),
    "stall_steps": (lambda _: 10**6, "F1 stalled"),
    "exchange_pages": (lambda _: True, "a row is only appended to"),
}
"""Keys that a scheduler might not obey, the value it works with instead, and the law (or laws) that must notice."""


LIKELY: dict[str, dict[str, Any]] = {
    "prefill_grant": {"admission": "guaranteed", "max_step_tokens": 2, "max_running": 8, "prefill_grant": 2, "lookahead_tokens": 0,
                      "preempt_priority": False, "chunk_tokens": None},
    "head": {"admission": "guaranteed", "preempt_priority": False},
    "decode_every": {"admission": "guaranteed", "preempt_priority": False},
    "stall_steps": {"stall_steps": 3},
    "exchange_pages": {"exchange_pages": False, "chunk_tokens": 2, "max_in_flight": 1, "hold_shared_prefill": False},
}
"""What makes the knob matter in most runs, where random settings seldom do."""


@pytest.mark.parametrize("key", OTHER)
def test_a_knob_that_is_not_obeyed_is_found(key: str) -> None:
    change, text = OTHER[key]

    class Deaf(Scheduler):
        """Works with another configuration than it shows."""

    def make(config: SchedulerConfig, pool: Pool, cache: TreeCache, sink: EventSink) -> Scheduler:
        return Deaf(attrs.evolve(config, **{key: change(getattr(config, key))}), pool, cache, sink=sink)

    broken = found(Parts(scheduler=make), 40_000, LIKELY.get(key)).split(": ")[2]  # after the seed and the kind of error
    assert broken.startswith(text), broken


def test_the_smallest_replay_is_small_and_fails_alike() -> None:
    text = found(Parts(pool=TwiceOwned))
    assert "seed 1" in text or "seed " in text
    assert text.count("\n    (") <= 12, text


def test_a_machine_over_other_parts() -> None:
    class Mine(PagePool):
        """A host's own pool."""

    made = []

    def pool(pages: int, page_size: int) -> Pool:
        made.append(pages)
        return Mine(pages, page_size)

    machine = scheduler_machine(Parts(pool=pool, cache=lambda size, _: NullCache(size)), order="sjf", head="skip")
    run_state_machine_as_test(machine, settings=profile(3, 20))
    assert made


def test_the_hosts_own_methods_do_nothing_where_they_make_no_sense() -> None:
    host = CheckedHost({"page_size": 2}, 4)
    for call in (host.commit, host.rollback, host.run):
        call()
    host.ready("nobody")
    host.abort("nobody")
    host.release("nobody")
    host.submit("a", [1, 2, 3], 2)
    host.submit("a", [1, 2, 3], 2)
    host.drain()
    assert host.model.finished == 1
    assert host.cache.match(Namespace(), np.array([1, 2, 3], np.int32)) == 2
