"""The signals of progress and what they say. Reads only; a watcher outside the scheduler needs nothing else."""

from __future__ import annotations

import enum

import attrs

from kvsched.core import Core


class Condition(enum.Enum):
    """What an orchestrator should believe."""

    IDLE = "idle"  # there is no work; healthy for any time
    LIVE = "live"  # work moves
    STALLED = "stalled"  # work exists and nothing moved for `stall_steps` steps
    RETRY_LOOP = "retry_loop"  # plans are made over and over, and none of them is committed


@attrs.frozen
class Health:
    """Signals, each of which only rises, and the word for them.

    attempts: plans made. chunks: prefill chunks committed. decode_steps: committed steps with a decode in them.
    completions: requests that ended otherwise than by abort. still_steps: steps since the last progress, 0 when idle.
    running, waiting: requests with and without pages. free_pages, evictable_pages: of the pool and of the cache.
    ready: whether the queue would take another request of one token. A full queue while tokens flow is live, not ready.
    """

    condition: Condition
    ready: bool
    attempts: int
    chunks: int
    decode_steps: int
    completions: int
    still_steps: int
    running: int
    waiting: int
    free_pages: int
    evictable_pages: int


def stalled(core: Core) -> bool:
    """Work exists and for `stall_steps` steps nothing was completed, emitted or newly computed."""
    return bool(core.lives) and core.step - core.progress_step >= core.config.stall_steps


def health(core: Core) -> Health:
    """The signals and the word. O(1)."""
    config = core.config
    if not core.lives:
        condition = Condition.IDLE
    elif stalled(core):
        condition = Condition.STALLED
    elif core.attempts - core.attempts_committed >= config.stall_steps:
        condition = Condition.RETRY_LOOP
    else:
        condition = Condition.LIVE
    bounds = (
        (config.max_queued_requests, len(core.queue.fresh)),
        (config.max_queued_tokens, core.queue.tokens),
        (config.max_inflight_prompt_tokens, core.inflight_tokens),
    )
    return Health(
        condition=condition,
        ready=condition is not Condition.STALLED and all(bound is None or used < bound for bound, used in bounds),
        attempts=core.attempts,
        chunks=core.chunks,
        decode_steps=core.decode_steps,
        completions=core.completions,
        still_steps=core.step - core.progress_step if core.lives else 0,
        running=len(core.running),
        waiting=len(core.queue),
        free_pages=core.pool.free,
        evictable_pages=core.cache.evictable if core.cache is not None else 0,
    )
