"""What the engine lets others see without asking it: one frozen record, replaced after every step."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvsched.liveness import Health


@attrs.frozen
class Vitals:
    """The engine as of its last turn. All times in seconds, all counts since the start.

    health: the scheduler's signals. occupancy: pages by bucket. totals: the scheduler's counts (tokens emitted, retractions, ...).
    prompt_tokens: of accepted requests.
    steps: plans with rows that were committed. model_s: spent in the forward pass. scheduler_s: inside kvsched, of all calls.
    decode_steps, decode_model_s, decode_scheduler_s, decode_wall_s: the same for steps without prefill; wall is from commit to commit.
    ended: requests by finish word. refused: requests by reason. failures: steps in which the model failed for some row.
    """

    health: Health
    occupancy: Mapping[str, int]
    totals: Mapping[str, int]
    prompt_tokens: int
    steps: int
    model_s: float
    scheduler_s: float
    decode_steps: int
    decode_model_s: float
    decode_scheduler_s: float
    decode_wall_s: float
    ended: Mapping[str, int]
    refused: Mapping[str, int]
    failures: int
