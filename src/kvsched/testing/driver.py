"""Random runs of a scheduler, from a seed, with a small replay of whatever fails.

What lives here: how a random setup and a random next call are chosen, and how a failing run is made smaller. What does
not: the calls and their checks (`kvsched.testing.host`). The same calls as a hypothesis state machine: `machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import attrs

from kvsched.config import ADMISSIONS, HEADS, ORDERS, RATIO_STARTS
from kvsched.testing.host import CheckedHost, Parts
from kvsched.testing.misuse import KINDS

Call = tuple[str, dict[str, Any]]
"""A method of `CheckedHost` and its arguments, all plain data."""
Setup = dict[str, Any]
"""Arguments of `CheckedHost`."""

LIVE = 9
"""Live requests from which on no more are submitted: enough for every queue to matter, few enough to shrink."""


class RunFailed(AssertionError):
    """A random run broke a law; the text has the seed, what broke, and a small replay."""


@attrs.frozen
class Tally:
    """What a series of runs covered."""

    runs: int
    steps: int
    plans: int
    rows: int
    finished: int
    retractions: int


def random_setup(rng: Random) -> Setup:
    """A tiny scheduler: 2 to 24 pages of 1 to 4 tokens, and any combination of the knobs."""
    pick = rng.choice
    lookahead = pick([0, 0, 0, 1, 2])
    pages = rng.randint(2, 24)
    settings = {
        "page_size": rng.randint(1, 4),
        "max_running": pick([1, 2, 3, 4, 8, 8]),
        "max_step_tokens": 1 + lookahead + pick([0, 1, 2, 3, 5, 8, 20, 100]),
        "chunk_tokens": pick([None, None, 1, 2, 3, 5]),
        "long_prefill_tokens": pick([None, None, None, 1, 2, 4]),
        "max_partial_prefills": pick([None, None, 1, 2]),
        "decode_every": pick([1, 1, 1, 2, 3]),
        "prefill_grant": pick([None, None, 1, 2, 4]),
        "context_limit": pick([None, None, None, 8, 30]),
        "admission": pick(ADMISSIONS),
        "conservativeness": pick([0.0, 0.3, 1.0, 1.0, 2.0]),
        "ratio_start": pick(RATIO_STARTS),
        "clip_new_tokens": pick([1, 3, 4096]),
        "order": pick([*ORDERS, "fcfs", "fcfs"]),
        "aging_tokens": pick([0, 2]),
        "max_skips": pick([0, 1, 4]),
        "fair_weights": pick([{}, {"t1": 3.0}]),
        "head": pick([*HEADS, "strict"]),
        "max_bypass": pick([0, 1, 3]),
        "preempt_priority": rng.random() < 0.2,
        "hold_shared_prefill": rng.random() < 0.25,
        "pin_limit_pages": pick([None, None, 0, 1, max(1, pages // 4)]),
        "max_queued_requests": pick([None, None, 2, 5]),
        "max_queued_tokens": pick([None, None, None, 20]),
        "max_inflight_prompt_tokens": pick([None, None, None, 30]),
        "max_adapters": pick([None, None, 1, 2]),
        "max_in_flight": pick([1, 2]),
        "lookahead_tokens": lookahead,
        "stall_steps": pick([5, 20, 100]),
        "exchange_pages": rng.random() < 0.7,
    }
    if rng.random() < 0.1:  # every prefill whole, in one step, which must then hold the context
        tokens = 1 + lookahead + pick([8, 20, 40])
        settings |= {"max_partial_prefills": 0, "chunk_tokens": None, "long_prefill_tokens": None, "max_step_tokens": tokens,
                     "context_limit": pick([tokens, tokens // 2])}
    return {"settings": settings, "pages": pages, "prefix_cache": rng.random() < 0.75,
            "eviction": pick(["lru", "lfu", "slru", "fifo", "priority"]), "seed": rng.randrange(1000)}


def with_shared(setup: Setup, settings: Mapping[str, Any]) -> Setup:
    """The setup with some keys given. Whole prefills, which bind several keys to each other, only where none is."""
    if settings:
        setup["settings"] |= {"max_partial_prefills": setup["settings"]["max_partial_prefills"] or None, **settings}
    return setup


def random_prompt(rng: Random, host: CheckedHost, texts: Sequence[list[int]]) -> list[int]:
    """A prompt that often begins as an earlier one did, or goes on where another request's text stands now."""
    room = host.pool.usable * host.page_size
    known = [*texts[-6:], *[a.text for a in host.model.accounts.values()]]
    head: list[int] = []
    if known and rng.random() < 0.6:
        source = rng.choice(known)
        head = source[: rng.choice([len(source), rng.randint(0, len(source))])]
    if len(head) > 2 * room:
        head = head[:room]
    tail = rng.choice([0, 1, 2, 3, 5, rng.randint(0, max(1, room // 2)), rng.randint(0, room + 1)])
    return (head + [rng.randrange(4) for _ in range(tail)]) or [rng.randrange(4)]


def random_submit(rng: Random, host: CheckedHost, texts: list[list[int]]) -> Call:
    """Any request that the API allows, with sizes that make the pool tight."""
    prompt = random_prompt(rng, host, texts)
    texts.append(prompt)
    fields: dict[str, Any] = {
        "name": f"r{rng.randrange(14)}",
        "prompt": prompt,
        "max_new": rng.choice([None, 0, 1, 1, 2, 3, 5, 8, 13, rng.randint(0, 40)]),
    }
    options: list[tuple[float, str, Callable[[], Any]]] = [
        (0.3, "priority", lambda: rng.choice([-1, 1, 2])),
        (0.3, "tenant", lambda: rng.choice(["t1", "t2"])),
        (0.25, "adapter", lambda: rng.choice(["x", "y", "z"])),
        (0.1, "version", lambda: "v2"),
        (0.1, "salt", lambda: "s"),
        (0.15, "ignore_eos", lambda: True),
        (0.12, "n", lambda: rng.randint(2, 3)),
        (0.3, "stop_token_ids", lambda: (rng.randrange(4),)),
        (0.15, "min_new_tokens", lambda: rng.randint(1, 4)),
        (0.1, "ready", lambda: False),
        (0.12, "block_tokens", lambda: rng.randint(1, 5)),
        (0.1, "cache_read", lambda: False),
        (0.1, "cache_write", lambda: False),
    ]
    for chance, key, value in options:
        if rng.random() < chance:
            fields[key] = value()
    if host.model.config.pin_limit_pages is not None and rng.random() < 0.25:
        fields["pin"] = rng.randint(1, 4)
    if fields.get("stop_token_ids") and rng.random() < 0.4:
        fields["stop_at"] = rng.randint(1, 6)
    return "submit", fields


def random_call(rng: Random, host: CheckedHost, texts: list[list[int]], odd: float = 1.0, most: int = LIVE) -> Call:
    """The next call of a host that does everything a host may do, and a little of what it may not.

    odd: how often it does what is out of the ordinary; 0 is a host that only submits, schedules and commits. most: live requests.
    """
    live = list(host.model.accounts)
    room = len(host.in_flight) < host.model.config.max_in_flight
    weights = {
        "submit": 24 if len(live) < most else 0,
        "schedule": 34 if room else 0,
        "commit": (30 if not room else 14) if host.in_flight else 0,
        "run": 5 if host.in_flight else 0,
        "ready": 6 if any(not a.ready for a in host.model.accounts.values()) else 0,
        "resume": 20 if host.model.paused else 0.3 * odd,
        "release": 5 if host.holds else 0.2 * odd,
        "rollback": 5 * odd if host.in_flight else 0,
        "abort": 4 * odd,
        "abort_all": 0.3 * odd,
        "pause": 1.2 * odd,
        "flush": odd,
        "hold": 2 * odd,
        "limits": odd,
        "unpin": 2 * odd if host.pins else 0,
        "misuse": 2 * odd,
    }
    name = rng.choices(list(weights), list(weights.values()))[0]
    some = rng.choice(live) if live and rng.random() < 0.8 else f"r{rng.randrange(14)}"
    if name == "submit":
        return random_submit(rng, host, texts)
    bits, other = (rng.getrandbits(8) & rng.getrandbits(8) if rng.random() < 0.12 * odd else 0 for _ in range(2))
    arguments: dict[str, Callable[[], dict[str, Any]]] = {
        "schedule": lambda: {} if rng.random() > 0.2 * odd else rng.choice([{"admit": rng.randint(0, 2)}, {"aborts": (some,)},
                                       {"free_pages": rng.randint(0, host.pool.usable)}, {"prefill_tokens": rng.choice([0, 1, 4])}]),
        "commit": lambda: {"failed": bits, "finished": other},
        "abort": lambda: {"name": rng.choice([some, some.split("/", maxsplit=1)[0]])},
        "pause": lambda: {"mode": rng.choice(["retract", "hold"])},
        "ready": lambda: {"name": rng.choice([a.id for a in host.model.accounts.values() if not a.ready])},
        "hold": lambda: {"name": rng.choice(["h1", "h2", some]), "pages": rng.randint(1, 4), "steps": rng.choice([None, 1, 3])},
        "release": lambda: {"name": rng.choice([*host.holds, "h3"])},
        "limits": lambda: random_limits(rng, host),
        "unpin": lambda: {"name": some},
        "misuse": lambda: {"kind": rng.choice(KINDS)},
    }
    return name, arguments[name]() if name in arguments else {}


def random_limits(rng: Random, host: CheckedHost) -> dict[str, Any]:
    """One settable limit and a legal value."""
    options: list[tuple[str, list[Any]]] = [
        ("max_running", [1, 2, 4, 8]),
        ("max_step_tokens", [1 + host.model.config.lookahead_tokens, 6, 50]),
        ("chunk_tokens", [None, 1, 3]),
        ("max_queued_requests", [None, 1, 4]),
        ("max_queued_tokens", [None, 15]),
        ("head", list(HEADS)),
        ("order", list(ORDERS)),
    ]
    key, values = rng.choice(options)
    return {key: rng.choice(values)}


def play(setup: Setup, calls: Sequence[Call], parts: Parts | None = None) -> CheckedHost:
    """Repeat a recorded run, then drain it. Raises what the run raises."""
    host = CheckedHost(**setup, parts=parts)
    for name, arguments in calls:
        getattr(host, name)(**arguments)
    host.drain()
    return host


def smaller(setup: Setup, calls: Sequence[Call], parts: Parts | None = None, tries: int = 400) -> tuple[list[Call], BaseException]:
    """A shorter run that fails in the same way (same kind of error, same law), found by taking calls out."""

    def failure(candidate: Sequence[Call]) -> BaseException | None:
        try:
            play(setup, candidate, parts)
        except Exception as error:  # noqa: BLE001 - any failure is what is looked for
            return error
        return None

    kept = list(calls)
    first = failure(kept)
    assert first is not None
    size = max(len(kept) // 2, 1)
    while tries > 0:
        at = 0
        shrunk = False
        while at < len(kept) and tries > 0:
            candidate = kept[:at] + kept[at + size :]
            tries -= 1
            error = failure(candidate)
            if error is not None and _same(error, first):
                kept, first, shrunk = candidate, error, True
            else:
                at += size
        if size == 1 and not shrunk:
            break
        size = max(size // 2, 1)
    return kept, first


def _same(one: BaseException, two: BaseException) -> bool:
    return type(one) is type(two) and str(one).split(":")[0] == str(two).split(":")[0]


def drive(seed: int, steps: int, *, calls_per_run: int = 60, parts: Parts | None = None,
          settings: Mapping[str, Any] | None = None) -> Tally:
    """Play random runs from one seed until `steps` calls were made and checked; every run is drained at its end.

    settings: keys of `SchedulerConfig` that every run shares; the others are drawn.

    Raises `RunFailed` with the seed of the failing run and a small replay of it.
    """
    runs = done = plans = rows = finished = retractions = 0
    while done < steps:
        host = one_run(seed + runs, calls_per_run, parts, settings)
        runs += 1
        done += host.calls
        plans += host.model.step
        finished += host.model.finished
        retractions += host.model.retractions
        rows += host.rows
    return Tally(runs, done, plans, rows, finished, retractions)


def one_run(seed: int, calls_per_run: int, parts: Parts | None = None, settings: Mapping[str, Any] | None = None) -> CheckedHost:
    """One random run and its drain. Raises `RunFailed` when a law breaks."""
    rng = Random(seed)  # noqa: S311 - a test, not a secret
    setup = with_shared(random_setup(rng), settings or {})
    odd, most = rng.choice([0.0, 0.2, 1.0]), rng.choice([5, LIVE, LIVE, 25])
    calls: list[Call] = []
    texts: list[list[int]] = []
    host = CheckedHost(**setup, parts=parts)
    try:
        for _ in range(calls_per_run):
            name, arguments = random_call(rng, host, texts, odd, most)
            calls.append((name, arguments))
            getattr(host, name)(**arguments)
        host.drain()
    except Exception as error:
        few, last = smaller(setup, calls, parts)
        replay = "\n".join(f"    {call!r}," for call in few)
        raise RunFailed(
            f"seed {seed}: {type(error).__name__}: {error}\nsmallest: {type(last).__name__}: {last}\n"
            f"replay: play({setup!r}, [\n{replay}\n])"
        ) from error
    return host
