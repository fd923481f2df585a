"""The same model in transformers, its greedy text, and our model driven by a real scheduler. No test stands here.

transformers is imported when asked for: it takes seconds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch

from kvsched import NullCache, PagePool, Request, Scheduler, SchedulerConfig, StepResult
from kvsched_kernels import BatchBuilder, PagedStore, ReferenceAttention
from reference_server.model import Llama, ModelConfig
from reference_server.model.weights import targets


def hf_config(config: ModelConfig, **changes: Any) -> Any:
    """The transformers config of one of ours."""
    import transformers

    rope = config.rope
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "llama3"):
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters.update(low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor,
                          original_max_position_embeddings=rope.original_context)
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.context_length,
        "rope_parameters": parameters, "tie_word_embeddings": config.tie_embeddings, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0, "architectures": [config.architecture],
    }
    if config.architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        fields["attention_bias"] = config.output_bias
    if config.architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = config.mlp_bias
    if config.architecture == "MistralForCausalLM":
        fields["sliding_window"] = None
    return getattr(transformers, config.architecture.replace("ForCausalLM", "Config"))(**{**fields, **changes})


def as_transformers(model: Llama) -> Any:
    """The same weights in transformers' own class, in the same type, with torch's attention."""
    import transformers

    config = hf_config(model.config)
    config._attn_implementation = "sdpa"
    peer = getattr(transformers, model.config.architecture)(config).to(model.dtype).eval()
    peer.requires_grad_(requires_grad=False)
    answer = peer.load_state_dict({name: view.clone() for name, view in targets(model).items()}, strict=not model.config.tie_embeddings)
    assert set(answer.missing_keys) <= {"lm_head.weight"}
    assert not answer.unexpected_keys
    peer.tie_weights()
    return peer


def from_gguf(model: Llama, path: Path) -> Any:
    """What transformers' own code makes of a GGUF file: its config held against ours, its weights in its own class.

    `from_pretrained` asks for a package that it does not need here, so the two halves of it are called.
    """
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = hf_config(model.config)
    config._attn_implementation = "sdpa"
    peer = getattr(transformers, model.config.architecture)(config)
    with mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):  # it is built anew for each of 400 modules
        found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=peer)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    ours = config.to_dict()
    for key, value in found["config"].items():
        if key in ours and not key.endswith("token_id") and key not in ("model_type", "architectures", "_model_name_or_path"):
            assert value == ours[key], key
    peer.load_state_dict(found["tensors"], strict=not model.config.tie_embeddings)
    peer.tie_weights()
    peer.requires_grad_(requires_grad=False)
    return peer.eval()


def greedy(peer: Any, prompt: list[int], n: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What transformers generates after one prompt: n tokens, or fewer where one of `eos` comes, which is the last then."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        found = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, min_new_tokens=None if eos else n,
                              max_new_tokens=n, eos_token_id=sorted(eos) or None, pad_token_id=0, use_cache=True)
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


def peer_logits(peer: Any, prompt: list[int]) -> torch.Tensor:
    """Transformers' logits at every position of one prompt, [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = peer(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def scheduled_logits(model: Llama, prompts: list[list[int]], *, chunk_tokens: int | None = None, page_size: int = 4,
                     max_step_tokens: int = 8192) -> list[torch.Tensor]:
    """Our logits at every position of several prompts that a real scheduler cuts into chunks, [tokens, vocab] each."""
    pages = sum(len(prompt) // page_size + 2 for prompt in prompts)
    c = model.config
    scheduler = Scheduler(SchedulerConfig(page_size=page_size, chunk_tokens=chunk_tokens, max_step_tokens=max_step_tokens),
                          pool=PagePool(pages, page_size), cache=NullCache(page_size))
    for i, prompt in enumerate(prompts):
        assert scheduler.submit(Request(str(i), prompt=prompt, max_new_tokens=1))
    store = PagedStore(layers=c.layers, pages=pages, page_size=page_size, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=model.dtype)
    attention, builder = ReferenceAttention(store, heads=c.heads), BatchBuilder(page_size=page_size)
    found = [torch.empty(0, c.vocab_size, dtype=model.dtype) for _ in prompts]
    while scheduler.has_work():
        plan = scheduler.schedule()
        batch = builder.build(plan)
        attention.begin(batch)
        with torch.inference_mode():
            logits = model(batch.token_ids, batch.positions, attention, torch.arange(batch.tokens))
        for key, part in zip(plan.ids, logits.split(plan.counts.tolist()), strict=True):
            found[int(key)] = torch.cat((found[int(key)], part))
        scheduler.commit(plan, StepResult(tokens=np.zeros(len(plan), np.int64)))
    return found


def no_logits(model: Llama) -> torch.Tensor:
    """What the model answers for a chunk of three tokens that is not the last of its prompt."""
    c = model.config
    scheduler = Scheduler(SchedulerConfig(page_size=4, chunk_tokens=3), pool=PagePool(4, 4), cache=NullCache(4))
    assert scheduler.submit(Request("r", prompt=[1, 2, 3, 4], max_new_tokens=1))
    store = PagedStore(layers=c.layers, pages=4, page_size=4, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=model.dtype)
    attention, batch = ReferenceAttention(store, heads=c.heads), BatchBuilder(page_size=4).build(scheduler.schedule())
    attention.begin(batch)
    with torch.inference_mode():
        logits: torch.Tensor = model(batch.token_ids, batch.positions, attention, batch.last)
    return logits


def decoded(model: Llama, prompt: list[int], n: int, *, page_size: int = 4) -> tuple[list[int], list[float]]:
    """Our own greedy text after one prompt, and the distance of the best two logits at each token."""
    c = model.config
    pages = (len(prompt) + n) // page_size + 1
    scheduler = Scheduler(SchedulerConfig(page_size=page_size), pool=PagePool(pages, page_size), cache=NullCache(page_size))
    assert scheduler.submit(Request("r", prompt=prompt, max_new_tokens=n))
    store = PagedStore(layers=c.layers, pages=pages, page_size=page_size, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=model.dtype)
    attention, builder = ReferenceAttention(store, heads=c.heads), BatchBuilder(page_size=page_size)
    tokens, gaps = [], []
    while scheduler.has_work():
        plan = scheduler.schedule()
        batch = builder.build(plan)
        attention.begin(batch)
        with torch.inference_mode():
            best = model(batch.token_ids, batch.positions, attention, batch.last).topk(2)
        builder.note(batch, best.indices[:, 0])
        tokens += best.indices[:, 0].tolist()
        gaps += (best.values[:, 0] - best.values[:, 1]).tolist()
        scheduler.commit(plan, StepResult(tokens=best.indices[:, 0].numpy()))
    return tokens, gaps
