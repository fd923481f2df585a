"""A host that overlaps: it schedules step n + 1 while step n is still being computed.

The "model" is a thread that sleeps a little and returns made-up tokens; what is real is the shape of the loop. Two plans
are in flight, results are committed oldest first, and a client goes away in the middle. Run it:

    python examples/overlapped_host.py
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvsched import PagePool, Plan, RadixCache, Request, Scheduler, SchedulerConfig, StepResult

EOS = 2


def forward(plan: Plan) -> StepResult:
    """Pretend to compute the plan's rows: here a GPU would be busy. One token per row, in the plan's row order."""
    time.sleep(0.001)
    tokens = 3 + (np.asarray(plan.rows) * 7 + plan.step * 13) % 1000
    return StepResult(tokens=tokens)


def finish(scheduler: Scheduler, plan: Plan, result: Future[StepResult], text: dict[str, list[int]]) -> None:
    """Wait for a step, commit it, and hand out what it gave."""
    outcome = scheduler.commit(plan, result.result())
    for name, token in zip(plan.ids, outcome.tokens.tolist(), strict=True):
        if token >= 0:  # -1: this row delivers nothing (a chunk that is not the last, a request that left)
            text[name].append(token)
    for end in outcome.ended:
        print(f"{end.id}: {end.finish.name.lower()} after {end.generated} tokens, {end.cached} of its prompt from the cache")
    if len(text["eve"]) == 5 and scheduler.abort("eve"):
        print("eve: went away; her pages come back when the steps in flight have ended")


def main() -> None:
    """Serve three prompts that share a system prompt, and drop one of them half way."""
    page = 16
    scheduler = Scheduler(
        SchedulerConfig(page_size=page, max_running=8, chunk_tokens=64, max_in_flight=2, hold_shared_prefill=True),
        pool=PagePool(256, page),
        cache=RadixCache(page),
    )
    system = list(range(1000, 1096))
    text: dict[str, list[int]] = {}
    for name in ("ada", "bob", "eve"):
        answer = scheduler.submit(Request(name, prompt=[*system, *name.encode()], max_new_tokens=24, stop_token_ids={EOS}))
        if not answer:
            print(f"{name}: refused, {answer.reason.value}: needs {answer.needed}, has {answer.available}")
        text[name] = []

    flying: deque[tuple[Plan, Future[StepResult]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as device:
        while scheduler.has_work():
            plan = scheduler.schedule()
            flying.append((plan, device.submit(forward, plan) if plan else _nothing()))
            if plan and len(flying) < scheduler.config.max_in_flight:
                continue  # there is room for one more step beside this one
            # an empty plan says that nothing more can start before what is in flight has ended: then wait for all of it
            while flying and (not plan or len(flying) == scheduler.config.max_in_flight):
                finish(scheduler, *flying.popleft(), text)
    scheduler.check()
    state = scheduler.snapshot()
    print(f"pages: {state['free']} free + {state['cached']} cached = {state['usable']}")


def _nothing() -> Future[StepResult]:
    done: Future[StepResult] = Future()
    done.set_result(StepResult(tokens=[]))
    return done


if __name__ == "__main__":
    main()
