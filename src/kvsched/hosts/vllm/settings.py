"""What vLLM was started with, as kvsched's configuration; and what of it the adapter does not do, refused by name.

What lives here: both directions of "how it is set up", read once at start-up. What does not: anything per request or step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvsched.config import SchedulerConfig
from kvsched.errors import ConfigError

PREFIX = "KVSCHED_VLLM_"
"""Settings in the environment: this and the key in capitals."""
SECTION = "kvsched"
"""Settings in vLLM's additional config: a mapping under this key."""

WHOLE = frozenset({"chunk_tokens", "clip_new_tokens", "aging_tokens", "max_skips", "max_bypass", "max_partial_prefills", "decode_every",
                   "prefill_grant", "stall_steps"})
FLAGS = frozenset({"preempt_priority", "hold_shared_prefill"})
NUMBERS = frozenset({"conservativeness"})
WORDS = frozenset({"admission", "ratio_start", "order", "head"})
SCHEDULER_KEYS = WHOLE | FLAGS | NUMBERS | WORDS
"""Keys of `SchedulerConfig` that may be set here."""
OWN_KEYS = frozenset({"eviction", "refusals"})
"""Keys of the adapter: the eviction policy of the prefix cache, and how a refused request ends."""

ELSEWHERE = {
    "page_size": "set vLLM's --block-size",
    "max_running": "set vLLM's --max-num-seqs",
    "max_step_tokens": "set vLLM's --max-num-batched-tokens",
    "long_prefill_tokens": "set vLLM's --long-prefill-token-threshold",
    "context_limit": "set vLLM's --max-model-len",
    "max_adapters": "set vLLM's --max-loras",
    "max_in_flight": "set vLLM's --async-scheduling or --no-async-scheduling",
    "lookahead_tokens": "speculative decoding is not supported",
    "exchange_pages": "vLLM's workers only append to a request's pages",
    "fair_weights": "vLLM's requests carry no tenant",
    "pin_limit_pages": "vLLM's requests carry no pin",
    "max_queued_requests": "set vLLM's --max-num-queued-reqs",
    "max_queued_tokens": "set vLLM's --max-num-queued-tokens",
    "max_inflight_prompt_tokens": "set vLLM's --max-num-queued-tokens",
}
"""Keys of `SchedulerConfig` that cannot be set here, and why."""

ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""KV-cache layouts in which a page holds the same token positions of every layer, and no page is ever dropped early."""
REFUSALS = ("length", "error")
WHOLE_PROMPTS = 0
"""max_partial_prefills that computes every prefill in one step, as vLLM does without chunked prefill."""


def _mode(_: Any, __: Any, value: Any) -> None:
    if value not in REFUSALS:
        raise ConfigError(f"refusals must be one of {', '.join(REFUSALS)}, not {value!r}")


@attrs.frozen
class Settings:
    """How the adapter is set up.

    scheduler: of kvsched itself. eviction: policy of the prefix cache. refusals: the finish reason of a request that can never
    fit: "length", as vLLM says of prompts beyond its own caps, or "error", which its server turns into a 500.
    """

    scheduler: SchedulerConfig
    eviction: str = "lru"
    refusals: str = attrs.field(default="length", validator=_mode)


def settings(vllm_config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None, environ: Mapping[str, str]) -> Settings:
    """Read everything. Raises `ConfigError` naming what is not supported, all of it at once, or the key that is wrong."""
    asked = list(unsupported(vllm_config, kv_cache_config, block_size, hash_block_size))
    if asked:
        raise ConfigError(f"kvsched does not do this inside vLLM: {'; '.join(asked)}")
    given = read(vllm_config.additional_config, environ)
    own = {key: given.pop(key) for key in OWN_KEYS if key in given}
    scheduling = vllm_config.scheduler_config
    order = given.pop("order", None)
    if scheduling.policy == "priority" and order not in (None, "priority"):
        raise ConfigError(f"order is {order!r}, and vLLM was started with --scheduling-policy priority; state one of them")
    if order == "fair":
        raise ConfigError("order cannot be 'fair': vLLM's requests carry no tenant")
    if not scheduling.enable_chunked_prefill and given.setdefault("max_partial_prefills", WHOLE_PROMPTS) != WHOLE_PROMPTS:
        raise ConfigError(f"max_partial_prefills is {given['max_partial_prefills']}, and vLLM was started with --no-enable-chunked-prefill")
    lora = vllm_config.lora_config
    most = scheduling.max_num_active_seqs
    step = scheduling.max_num_scheduled_tokens
    return Settings(SchedulerConfig(
        page_size=block_size,
        max_running=scheduling.max_num_seqs if most is None else min(most, scheduling.max_num_seqs),
        max_step_tokens=scheduling.max_num_batched_tokens if step is None else min(step, scheduling.max_num_batched_tokens),
        long_prefill_tokens=scheduling.long_prefill_token_threshold or None,
        context_limit=vllm_config.model_config.max_model_len,
        max_adapters=None if lora is None else lora.max_loras,
        max_in_flight=vllm_config.max_concurrent_batches,
        order=order or scheduling.policy,
        exchange_pages=False,
        **given,
    ), **own)


def read(additional: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """The adapter's settings by key, from vLLM's additional config and from the environment. Raises `ConfigError`."""
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"additional_config[{SECTION!r}] must be a mapping, not {section!r}")
    found = {_known(key): value for key, value in section.items()}
    for name, text in environ.items():
        if name.startswith(PREFIX):
            key = _known(name.removeprefix(PREFIX).lower())
            value = _parsed(key, text)
            if found.get(key, value) != value:
                raise ConfigError(f"{key} is {found[key]!r} in additional_config and {value!r} in {name}; state one of them")
            found[key] = value
    return found


def _known(key: str) -> str:
    if key in ELSEWHERE:
        raise ConfigError(f"{key} cannot be set for kvsched inside vLLM: {ELSEWHERE[key]}")
    if key not in SCHEDULER_KEYS | OWN_KEYS:
        raise ConfigError(f"{key} is no setting of kvsched inside vLLM; allowed are {', '.join(sorted(SCHEDULER_KEYS | OWN_KEYS))}")
    return key


def _parsed(key: str, text: str) -> Any:
    """The value of a key as it stands in the environment."""
    word = text.strip().lower()
    if key in FLAGS:
        if word not in ("0", "1", "false", "true"):
            raise ConfigError(f"{key} must be 0, 1, false or true, not {text!r}")
        return word in ("1", "true")
    if key in WHOLE | NUMBERS:
        if word == "none":
            return None
        try:
            return int(word) if key in WHOLE else float(word)
        except ValueError:
            raise ConfigError(f"{key} must be {'an integer' if key in WHOLE else 'a number'}, not {text!r}") from None
    return word


def unsupported(vllm_config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None) -> Iterator[str]:
    """Everything this engine was asked to do that the adapter does not do, in vLLM's words."""
    model, parallel, scheduling = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    if model.runner_type != "generate":
        yield f"the {model.runner_type} runner (pooling, embedding and scoring models)"
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if model.is_diffusion:
        yield "diffusion language models"
    if model.supports_multimodal_inputs:
        yield "multimodal inputs (--limit-mm-per-prompt with 0 for each runs such a model on text)"
    if vllm_config.is_mm_encoder_only:
        yield "instances that only encode (--mm-encoder-only)"
    if model.enable_prompt_embeds:
        yield "prompt embeddings (--enable-prompt-embeds)"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding (--speculative-config)"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors (--kv-transfer-config)"
    if vllm_config.ec_transfer_config is not None:
        yield "encoder-cache connectors (--ec-transfer-config)"
    if vllm_config.aux_output_config.enabled:
        yield "auxiliary outputs (--aux-output-config)"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism (--pipeline-parallel-size)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)"
    if not scheduling.enable_chunked_prefill and scheduling.long_prefill_token_threshold:
        yield "a threshold for long prefills without chunks (--long-prefill-token-threshold with --no-enable-chunked-prefill)"
    if scheduling.long_prefill_token_threshold_adaptive:
        yield "adaptive thresholds (--long-prefill-token-threshold-adaptive)"
    if scheduling.watermark:
        yield "a watermark (--watermark); the setting admission=guaranteed keeps preemption away altogether"
    if not scheduling.scheduler_reserve_full_isl:
        yield "admission by the first chunk alone (--no-scheduler-reserve-full-isl)"
    if vllm_config.observability_config.kv_cache_metrics:
        yield "block residency metrics (--kv-cache-metrics)"
    yield from _layout(kv_cache_config, block_size, hash_block_size)


def _layout(kv_cache_config: Any, block_size: int, hash_block_size: int | None) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in ATTENTION:
        yield f"KV caches of the kind {' + '.join(kinds) or 'none'} (one group of {' or '.join(sorted(ATTENTION))} only)"
        return
    size = groups[0].kv_cache_spec.block_size
    if size != block_size or hash_block_size not in (None, block_size):
        yield f"different block sizes (cache {size}, scheduler {block_size}, hashes {hash_block_size})"
    if kv_cache_config.needs_kv_cache_zeroing:
        yield "caches whose new blocks must be zeroed (mixed precision)"
