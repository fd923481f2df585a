"""One formula: what sizing says before a boot is what a scheduler on that pool then does, over a thousand random deployments."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kvsched import NullCache, PagePool, Request, Scheduler, SchedulerConfig, StepResult
from kvsched.sizing.account import Item, Provenance
from kvsched.sizing.capacity import fits, longest_output
from kvsched.sizing.costs import Widths
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.dtypes import dtype
from kvsched.sizing.geometry import Attention, Channels, Layer, Model, Recurrent
from kvsched.sizing.report import Report
from kvsched.sizing.sized import size
from kvsched.units import pages_for, total_slots
from kvsched.verdict import Verdict, decide

DEPLOYMENTS = 1000
SMALL = 600
"""Slots of pools on which requests are also run, not only submitted."""


def random_model(rng: random.Random) -> Model:
    """A few layers of random kinds, at least one of them full attention."""
    tp_heads = rng.choice([4, 8])
    attention = Attention(rng.choice([1, 2, tp_heads]), rng.choice([8, 16]), rng.choice([0, 8, 16]))
    recurrent = Recurrent(tp_heads, 32, (Channels(tp_heads, 4), Channels(1, 8, replicated=True)), taps=3)
    windowed = Attention(attention.heads, attention.key, attention.value, window=rng.randrange(8, 64))
    kinds = [Layer((attention,)), Layer((windowed,)), Layer((), recurrent), Layer((attention,), recurrent), Layer()]
    layers = [Layer((attention,)), *(rng.choice(kinds) for _ in range(rng.randrange(7)))]
    rng.shuffle(layers)
    return Model(model_type="random", layers=tuple(layers), query_heads=tp_heads, context=rng.choice([None, rng.randrange(2, 4000)]))


def random_report(rng: random.Random) -> Report:
    """A deployment of such a model that holds something. Budgets that hold nothing are drawn again, larger."""
    model = random_model(rng)
    stateful = bool(model.recurrents)
    pp = rng.randint(1, min(3, len(model.layers)))
    choices: dict[str, Any] = {
        "widths": Widths(kv=dtype(rng.choice(["fp8", "bf16"])), state=dtype("bf16"), conv=dtype("float32"), scale_bytes=rng.choice([0, 0, 3])),
        "tp": rng.choice([1, 2, 4]), "pp": pp, "page_size": rng.choice([1, 3, 4, 16]), "reserved_pages": rng.randrange(3),
        "context_limit": rng.choice([None, None, rng.randrange(2, 3000)]),
        "max_running": rng.choice([None, rng.randint(1, 6)]), "slots_per_request": rng.choice([1, 1, 3]), "transient_slots": rng.randrange(3),
        "draft_tokens": rng.choice([0, 0, 4]) if stateful else 0, "recycle_interval": rng.choice([None, 7]), "step_tokens": 64,
    }
    if rng.random() < 0.3:
        choices["cp"] = choices["page_size"] if choices["page_size"] > 1 else 1
    for budget in (rng.randrange(50_000, 600_000), 4_000_000, 40_000_000):
        choices["budgets"] = tuple(budget + rng.randrange(50_000) for _ in range(pp))
        choices["items"] = tuple((Item("weights", rng.randrange(20_000), Provenance.MEASURED),) for _ in range(pp))
        try:
            return size(model, Deployment(**choices))
        except ValueError as error:  # too small a budget, or a stage without the agreed pages
            if "no layer keeps every token" in str(error):
                return random_report(rng)
    raise AssertionError(choices)


def scheduler(report: Report, **config: Any) -> Scheduler:
    """A scheduler on the pool that was sized."""
    at = report.deployment
    return Scheduler(
        SchedulerConfig(page_size=at.page_size, context_limit=report.context, admission="guaranteed", **config),
        PagePool(report.pages, at.page_size, at.reserved_pages), NullCache(at.page_size))


def prompt(length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.ones(length, dtype=np.int32)


def test_the_longest_request_is_the_schedulers_own() -> None:
    rng = random.Random(7)
    for _ in range(DEPLOYMENTS):
        report = random_report(rng)
        sched = scheduler(report)
        assert report.max_servable_tokens == sched.max_servable_tokens
        assert report.tokens == sched.ceiling * report.deployment.page_size
        for _ in range(3):
            length = rng.randint(1, min(report.max_servable_tokens + 2, 5000))
            most = longest_output(length, report.usable_pages, report.deployment.page_size, report.context)
            for new in {1, most or 1, (most or 0) + 1}:
                answer = sched.submit(Request("r", prompt(length), max_new_tokens=new))
                assert bool(answer) == fits(length, new, report.usable_pages, report.deployment.page_size, report.context) == (new <= (most or 0))
                if answer:
                    assert sched.abort("r")


def test_admission_takes_as_many_as_sizing_says_and_no_more() -> None:
    """Requests of one length in guaranteed mode: exactly as many start as the report's concurrency, and all of them end."""
    rng, tried = random.Random(11), 0
    while tried < 60:
        report = random_report(rng)
        if report.tokens > SMALL or report.max_servable_tokens < 2:
            continue
        tried += 1
        slots = rng.randint(1, report.max_servable_tokens)
        expected = report.requests_at(slots)
        if expected.binding not in {"pages", "max_running"} or expected.requests > 40:
            continue
        running = report.max_running if any(one.name == "max_running" for one in report.resources) else 1000
        sched = scheduler(report, max_running=running, max_step_tokens=10_000)
        new = rng.randint(1, slots)
        for number in range(expected.requests + 1):
            assert sched.submit(Request(str(number), prompt(slots - new + 1), max_new_tokens=new, ignore_eos=False))
        plan = sched.schedule()
        assert len(sched.snapshot()["running"]) == expected.requests
        sched.commit(plan, StepResult(np.full(len(plan), 3)))
        while sched.has_work():
            plan = sched.schedule()
            sched.commit(plan, StepResult(np.full(len(plan), 3)))
        sched.check()


def test_every_report_adds_up() -> None:
    """The items of every stage make its budget; the agreed pool fits every stage, and one more page does not fit the binding one."""
    rng = random.Random(13)
    for _ in range(DEPLOYMENTS):
        report = random_report(rng)
        at = report.deployment
        for stage in report.stages:
            assert stage.account.rest == 0
            kv = next(item.bytes for item in stage.account.items if item.name == "kv")
            assert kv == report.pages * stage.own.token_bytes * (at.page_size // at.cp)
            assert all(item.bytes >= 0 for item in stage.account.items)
        unused = next(item.bytes for item in report.binding.account.items if item.name == "unused")
        assert unused < report.page_bytes
        assert report.page_bytes == report.token_bytes * at.page_size // at.cp
        assert report.requests_at(report.max_servable_tokens).requests >= 1


def test_sizing_and_submit_ask_one_function() -> None:
    need = pages_for(total_slots(100, 29), 16)
    assert decide(need, need, 8) is Verdict.ADMIT
    assert fits(100, 29, 8, 16)
    assert not fits(100, 30, 8, 16)
