"""vLLM's request as kvsched's, and what the adapter keeps beside it.

What lives here: the translation, what of a request is refused by name, how it ends in vLLM's words. What does not: anything
that changes with every step; vLLM's own object is not kept up to date token by token, because nothing reads it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from kvsched.request import Finish, Namespace, Request


class Entry:
    """One live request of vLLM's.

    base: output tokens it had at its last admission. known: whether the workers have a row of it. careful: whether each of its
    outputs needs more than its token (log-probabilities, trace headers, detection of repetition).
    """

    __slots__ = ("base", "careful", "client", "eos", "known", "prompt", "request", "watched")

    def __init__(self, request: Any) -> None:
        sampling = request.sampling_params
        self.request = request
        self.client: int = request.client_index
        self.prompt: int = request.num_prompt_tokens
        self.eos: int | None = sampling.eos_token_id
        self.base = 0
        self.known = False
        self.watched = sampling.repetition_detection is not None
        self.careful = self.watched or sampling.num_logprobs is not None or request.trace_headers is not None


def refused_feature(request: Any) -> str | None:
    """What a request asks for that the adapter does not do, in vLLM's words; None when there is nothing."""
    if request.pooling_params is not None or request.sampling_params is None:
        return "pooling requests"
    if request.use_structured_output:
        return "structured output (a grammar, JSON schema, regular expression or choice)"
    if request.resumable:
        return "streaming input"
    if request.mm_features:
        return "multimodal inputs"
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
        return "prompt embeddings"
    return None


def to_kvsched(request: Any, max_model_len: int) -> Request:
    """What kvsched is told of a request that `refused_feature` has nothing against.

    vLLM's sampler, not its scheduler, holds back stop tokens before `min_tokens`, so kvsched ends at one whenever it comes. The
    length is known beforehand where nothing but the limit can end it.
    """
    sampling = request.sampling_params
    prompt = request.num_prompt_tokens
    stops = {*(sampling.stop_token_ids or ()), *(() if sampling.eos_token_id is None else (sampling.eos_token_id,))}
    known = not stops and not sampling.stop and sampling.repetition_detection is None
    return Request(
        request.request_id,
        request.prompt_token_ids,
        max_new_tokens=min(request.max_tokens, max_model_len - prompt) if prompt < max_model_len else request.max_tokens,
        stop_token_ids=frozenset(stops),
        ignore_eos=known,
        priority=request.priority,
        adapter=None if request.lora_request is None else str(request.lora_request.lora_int_id),
        namespace=namespace(request),
        cache_read=not request.skip_reading_prefix_cache,
    )


def namespace(request: Any) -> Namespace:
    """What must be equal for two requests to share pages: vLLM's extra keys of a block's hash, and the adapter's number."""
    lora = request.lora_request
    if lora is None:
        return Namespace(salt=request.cache_salt or None)
    return Namespace(adapter=str(lora.lora_int_id), version=repr((lora.lora_name, lora.lora_path)), salt=request.cache_salt or None)


def status_of(entry: Entry, finish: Finish, token: int, *, repeated: bool) -> tuple[Any, int | str | None]:
    """The status and stop reason, in the words of vLLM, of a request that ended in a commit, `token` being its last."""
    if finish is Finish.LENGTH:
        return RequestStatus.FINISHED_LENGTH_CAPPED, None
    if finish is not Finish.STOP:
        return RequestStatus.FINISHED_ERROR, None
    if repeated:
        return RequestStatus.FINISHED_REPETITION, "repetition_detected"
    return RequestStatus.FINISHED_STOPPED, None if token == entry.eos else token
