"""What came of a step, both ways: vLLM's ModelRunnerOutput as kvsched's result, kvsched's outcome as EngineCoreOutput.

What lives here: sampled tokens in the plan's row order, and one record for each token that is delivered. What does not: the
bookkeeping of requests that ended, and everything that goes to the workers.

A plain decode costs one dictionary look-up and one record. Requests whose next output carries more (the first one, with its
prefill statistics; events; log-probabilities) are named by the scheduler and filled in one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from kvsched.errors import InvalidResult
from kvsched.hosts.vllm.requests import Entry
from kvsched.plan import Outcome, Plan, StepResult

NOTHING = 0
"""Stands in a result for rows that sample nothing."""


def as_result(plan: Plan, ids: list[str], runner: Any, watched: Mapping[str, Entry], max_model_len: int) -> StepResult:
    """Sampled tokens in row order. watched: requests that may end by repeating themselves, which vLLM's own check decides.

    Raises `InvalidResult` when a row that samples has no token, or more than one.
    """
    index, sampled = runner.req_id_to_index, runner.sampled_token_ids
    decodes = plan.decodes
    try:
        tokens = [sampled[index[key]][0] for key in ids[:decodes]]
        tokens += [sampled[index[chunk.id]][0] if chunk.last else NOTHING for chunk in plan.prefill]
    except (IndexError, KeyError) as error:
        raise InvalidResult(f"the model runner gave no token for a row that samples one: {error!r}, rows {ids}") from error
    finished = _repeating(plan, ids, tokens, watched, max_model_len) if watched else None
    return StepResult(np.array(tokens, dtype=np.int64), finished=finished)


def _repeating(plan: Plan, ids: list[str], tokens: list[int], watched: Mapping[str, Entry], max_model_len: int) -> list[int]:
    """Positions of the requests that repeat themselves with this token."""
    silent = {plan.decodes + at for at, chunk in enumerate(plan.prefill) if not chunk.last}
    found = []
    for at, key in enumerate(ids):
        entry = watched.get(key)
        if entry is None or at in silent or entry.request.is_finished():
            continue
        entry.request.append_output_token_ids(tokens[at])
        before = entry.request.status
        if check_stop(entry.request, max_model_len) and entry.request.status == RequestStatus.FINISHED_REPETITION:
            found.append(at)
        entry.request.status = before  # kvsched ends it
    return found


def records(ids: list[str], outcome: Outcome) -> list[EngineCoreOutput | None]:
    """One record for each token delivered, by position in the plan; None where there is none."""
    tokens: npt.NDArray[Any] = outcome.tokens
    if (tokens < 0).any():
        return [EngineCoreOutput(key, [token]) if token >= 0 else None for key, token in zip(ids, tokens.tolist(), strict=True)]
    return [EngineCoreOutput(key, [token]) for key, token in zip(ids, tokens.tolist(), strict=True)]


def complete(record: EngineCoreOutput, entry: Entry, runner: Any, cached_tokens: int) -> None:
    """Fill in what only some outputs carry. cached_tokens: of the prompt, whose pages are in the prefix cache by now."""
    request, key = entry.request, record.request_id
    record.events = request.take_events()
    record.trace_headers = request.trace_headers
    stats = request.take_prefill_stats()  # there once
    if stats is not None:
        stats.finalize(cached_tokens)
        record.prefill_stats = stats
    record.new_prompt_logprobs_tensors = runner.prompt_logprobs_dict.get(key)
    record.prompt_token_id_logprobs = runner.prompt_token_id_logprobs_dict.get(key)
    if request.sampling_params.num_logprobs is not None and runner.logprobs is not None:
        record.new_logprobs = runner.logprobs.slice_request(runner.req_id_to_index[key], 1)


def share_rare(found: list[EngineCoreOutput | None], runner: Any) -> None:
    """What a runner reports for the whole batch, and only where it was asked to: corrupted logits, sampling masks."""
    for record in found:
        if record is None:
            continue
        if runner.num_nans_in_logits is not None:
            record.num_nans_in_logits = runner.num_nans_in_logits.get(record.request_id, 0)
        if runner.sampling_masks is not None:
            record.new_sampling_mask = runner.sampling_masks.slice_request(runner.req_id_to_index[record.request_id], 1)
