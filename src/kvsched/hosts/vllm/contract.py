"""What the adapter relies on of vLLM, member by member: data for `kvsched.hosts.drift`, checked at start-up and by a test.

Written down from vLLM 0.32.0. A later vLLM for which this still holds is not refused; docs/hosts.md says which were run.
"""

from __future__ import annotations

from kvsched.hosts.drift import Contract, Expected, names

SCHED = "vllm.v1.core.sched"
INTERFACE = f"{SCHED}.interface.SchedulerInterface"

_SIGNATURES = {
    INTERFACE: "(vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, mm_registry=Ellipsis, "
               "include_finished_set=False, log_stats=False)",
    f"{INTERFACE}.schedule": "(self, throttle_prefills=False)",
    f"{INTERFACE}.update_from_output": "(self, scheduler_output, model_runner_output)",
    f"{INTERFACE}.add_request": "(self, request)",
    f"{INTERFACE}.finish_requests": "(self, request_ids, finished_status)",
    f"{INTERFACE}.reset_prefix_cache": "(self, reset_running_requests=False, reset_connector=False)",
    f"{INTERFACE}.set_pause_state": "(self, pause_state)",
    f"{SCHED}.output.NewRequestData.from_request": "(cls, request, block_ids, prefill_token_ids=None, uses_mrope=False)",
    f"{SCHED}.utils.check_stop": "(request, max_model_len)",
    "vllm.v1.metrics.stats.PrefixCacheStats.record": "(self, num_tokens, num_hits, preempted, hits_by_source=None)",
    "vllm.v1.metrics.stats.PrefillStats.set": "(self, num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens)",
    "vllm.v1.metrics.stats.PrefillStats.finalize": "(self, num_cached_tokens)",
    "vllm.v1.outputs.LogprobsLists.slice_request": "(self, req_idx, num_positions)",
    "vllm.v1.outputs.SamplingMaskLists.slice_request": "(self, req_idx, num_positions)",
    "vllm.distributed.kv_events.EventPublisherFactory.create": "(cls, config, data_parallel_rank=0)",
    "vllm.v1.core.kv_cache_utils.hash_block_tokens": "(hash_function, parent_block_hash, curr_block_token_ids, extra_keys=None)",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash": "(hash_bytes)",
    "vllm.v1.core.kv_cache_utils.to_event_extra_keys": "(extra_keys)",
    "vllm.utils.hashing.get_hash_fn_by_name": "(hash_fn_name)",
    "vllm.v1.metrics.perf.ModelMetrics": "(vllm_config)",
    "vllm.v1.metrics.perf.ModelMetrics.get_step_perf_stats_per_gpu": "(self, scheduler_output)",
}

_FIELDS = {
    f"{SCHED}.output.SchedulerOutput":
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens "
        "scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes preempted_req_ids",
    f"{SCHED}.output.CachedRequestData":
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens",
    f"{SCHED}.output.NewRequestData":
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens lora_request "
        "prefill_token_ids",
    "vllm.v1.engine.EngineCoreOutput":
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason stop_reason events trace_headers "
        "prefill_stats num_nans_in_logits new_sampling_mask prompt_token_id_logprobs",
    "vllm.v1.engine.EngineCoreOutputs": "outputs scheduler_stats finished_requests",
    "vllm.v1.metrics.stats.SchedulerStats":
        "num_running_reqs num_waiting_reqs kv_cache_usage prefix_cache_stats spec_decoding_stats kv_connector_stats "
        "ec_connector_stats cudagraph_stats perf_stats",
    "vllm.v1.metrics.stats.PrefixCacheStats": "reset requests queries hits",
    "vllm.v1.outputs.ModelRunnerOutput":
        "req_ids req_id_to_index sampled_token_ids logprobs prompt_logprobs_dict prompt_token_id_logprobs_dict "
        "num_nans_in_logits cudagraph_stats sampling_masks",
    "vllm.distributed.kv_events.BlockStored":
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx",
    "vllm.distributed.kv_events.BlockRemoved": "block_hashes medium group_idx",
    "vllm.distributed.kv_events.KVEventBatch": "ts events",
}

_MEMBERS = {
    "vllm.v1.request.Request":
        "request_id client_index priority sampling_params pooling_params lora_request cache_salt prompt_token_ids prompt_embeds "
        "prompt_is_token_ids mm_features num_prompt_tokens max_tokens num_computed_tokens num_preemptions status stop_reason "
        "prefill_stats trace_headers resumable skip_reading_prefix_cache use_structured_output append_output_token_ids "
        "is_finished get_finished_reason record_event take_events take_prefill_stats output_token_ids num_tokens num_output_tokens",
    "vllm.sampling_params.SamplingParams":
        "eos_token_id stop_token_ids stop min_tokens repetition_detection num_logprobs",
    "vllm.lora.request.LoRARequest": "lora_name lora_int_id lora_path adapter_id name",
    "vllm.config.VllmConfig":
        "model_config cache_config parallel_config scheduler_config lora_config speculative_config kv_transfer_config "
        "ec_transfer_config kv_events_config aux_output_config observability_config additional_config max_concurrent_batches "
        "use_v2_model_runner is_mm_encoder_only",
    "vllm.config.ModelConfig":
        "max_model_len runner_type is_encoder_decoder is_diffusion supports_multimodal_inputs enable_prompt_embeds",
    "vllm.config.SchedulerConfig":
        "max_num_seqs max_num_active_seqs max_num_batched_tokens max_num_scheduled_tokens policy enable_chunked_prefill "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive watermark scheduler_reserve_full_isl",
    "vllm.config.CacheConfig": "enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config.ParallelConfig":
        "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size data_parallel_index",
    "vllm.config.ObservabilityConfig": "kv_cache_metrics enable_mfu_metrics",
    "vllm.config.LoRAConfig": "max_loras",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "num_blocks kv_cache_groups needs_kv_cache_zeroing",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "kv_cache_spec",
    "vllm.v1.kv_cache_interface.FullAttentionSpec": "block_size",
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": "block_size",
    "vllm.distributed.kv_events": "MEDIUM_GPU AllBlocksCleared",
    "vllm.distributed.kv_events.EventPublisher": "publish shutdown get_publisher_config",
}

_VALUES = {
    f"{SCHED}.interface.PauseState": "UNPAUSED PAUSED_NEW PAUSED_ALL",
    "vllm.v1.engine.EngineCoreEventType": "QUEUED SCHEDULED PREEMPTED",
    "vllm.v1.engine.FinishReason": "STOP LENGTH ABORT ERROR REPETITION",
    "vllm.v1.request.RequestStatus":
        "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ RUNNING PREEMPTED "
        "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_IGNORED FINISHED_ERROR FINISHED_REPETITION",
}

ABSTRACT = names(
    "__init__ schedule update_from_output add_request finish_requests get_num_unfinished_requests has_finished_requests "
    "pause_state set_pause_state reset_prefix_cache reset_encoder_cache get_request_counts make_stats shutdown "
    "get_grammar_bitmask update_draft_token_ids update_draft_token_ids_in_output"
)
"""The abstract members of vLLM's interface."""
ENGINE_READS = ABSTRACT - {"__init__", "has_finished_requests"} | names(
    "connector ec_connector get_kv_connector get_ec_connector get_kv_cache_usage get_kv_event_publisher_config has_requests "
    "has_unfinished_requests"
)
"""Everything that vLLM's engine reads of its scheduler, of which the interface states only a part."""


def _contract() -> Contract:
    table: dict[str, Expected] = {name: Expected(signature=text) for name, text in _SIGNATURES.items()}
    table[INTERFACE] = Expected(signature=_SIGNATURES[INTERFACE], abstract=ABSTRACT)
    table |= {name: Expected(fields=names(text)) for name, text in _FIELDS.items()}
    table |= {name: Expected(members=names(text)) for name, text in _MEMBERS.items()}
    table |= {name: Expected(values=names(text)) for name, text in _VALUES.items()}
    table["vllm.v1.engine.core"] = Expected(reads=("scheduler", ENGINE_READS))
    return table


CONTRACT: Contract = _contract()
"""What must hold of the installed vLLM."""
