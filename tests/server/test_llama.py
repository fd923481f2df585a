"""The model against transformers' own, for every architecture, kind of rotary embedding, and way of cutting a prompt."""

from __future__ import annotations

import random
from typing import Any

import attrs
import peers
import pytest
import torch

from reference_server.model import Llama, ModelConfig, ModelError, Rope, tiny
from reference_server.model.llama import frequencies, rms_norm
from reference_server.model.weights import targets

LLAMA3 = Rope(theta=500.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "llama with every bias": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "llama, one kv head": {"kv_heads": 1},
    "llama, as many kv heads": {"kv_heads": 4},
    "llama3 rope": {"rope": LLAMA3},
    "linear rope": {"rope": Rope(kind="linear", factor=4.0)},
    "mistral": {"architecture": "MistralForCausalLM", "head_dim": 8},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "attention_bias": True, "tie_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
    "qwen3 with biases": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "attention_bias": True, "output_bias": True},
}

CUTS: list[dict[str, Any]] = [
    {"chunk_tokens": None, "page_size": 4}, {"chunk_tokens": 7, "page_size": 16}, {"chunk_tokens": 1, "page_size": 1},
    {"chunk_tokens": 16, "page_size": 4, "max_step_tokens": 23},
]


def prompts(seed: int = 0, lengths: tuple[int, ...] = (37, 1, 70)) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(length)] for length in lengths]


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert [one.shape for one in found] == [one.shape for one in wanted]
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(variant: str) -> None:
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model = tiny(dtype=dtype, seed=3, **VARIANTS[variant])
        peer = peers.as_transformers(model)
        wanted = [peers.peer_logits(peer, prompt) for prompt in prompts()]
        for cut in CUTS:
            assert apart(peers.scheduled_logits(model, prompts(), **cut), wanted) < most, (dtype, cut)


def test_half_precision_stays_near_the_same_model_in_double() -> None:
    double = tiny(seed=3)
    wanted = peers.scheduled_logits(double, prompts())
    spread = float(torch.cat(wanted).std())
    for dtype, most in ((torch.bfloat16, 0.2), (torch.float16, 0.03)):  # 8 and 11 bits of mantissa, a few times over
        found = [one.double() for one in peers.scheduled_logits(tiny(seed=3, dtype=dtype), prompts())]
        assert float((torch.cat(found) - torch.cat(wanted)).std()) < most * spread


def test_norms_and_angles_are_float32_as_in_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = torch.randn(5, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        peer = LlamaRMSNorm(64, 1e-6).to(dtype)
        peer.weight.data.copy_(weight)
        assert torch.equal(rms_norm(x.to(dtype), weight.to(dtype), 1e-6), peer(x.to(dtype)).detach())


def test_llama3_frequencies_at_the_figures_of_llama_3_1() -> None:
    """Base 500000, factor 8, 1, 4, 8192: the fast ones stay, the slow ones are an eighth, wherever transformers puts the border."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = Rope(theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    config = attrs.evolve(tiny().config, rope=rope, head_dim=128)
    wanted, scale = ROPE_INIT_FUNCTIONS["llama3"](peers.hf_config(config), None)
    found = frequencies(rope, 128)
    assert scale == 1.0
    assert float((found / wanted - 1).abs().max()) < 1e-5
    plain = frequencies(Rope(theta=500_000.0), 128)
    assert torch.equal(found[:20], plain[:20])
    assert torch.allclose(found[-10:], plain[-10:] / 8)


def test_divisors_do_what_the_llama3_factors_do() -> None:
    plain, slowed = frequencies(Rope(theta=500.0), 16), frequencies(LLAMA3, 16)
    divided = Rope(theta=500.0, kind="divided", divisors=tuple((plain / slowed).tolist()))
    assert not torch.equal(plain, slowed)
    found = peers.scheduled_logits(tiny(rope=divided), prompts())
    assert apart(found, peers.scheduled_logits(tiny(rope=LLAMA3), prompts())) < 1e-4


def test_logits_come_for_the_last_tokens_alone() -> None:
    """Row by row the same as when all are asked for, and none for a step in which nobody samples."""
    model = tiny(seed=5)
    whole = peers.scheduled_logits(model, prompts())
    tokens, _ = peers.decoded(model, prompts()[0], 3)
    assert tokens[0] == int(whole[0][-1].argmax())
    assert peers.no_logits(model).shape == (0, 258)


def test_greedy_text_is_that_of_transformers_and_varies() -> None:
    """Token for token; no two tokens so near that rounding could choose; no text that turns in a circle."""
    model = tiny()
    peer = peers.as_transformers(model)
    gaps: list[float] = []
    for prompt in prompts(seed=9, lengths=(1, 2, 5, 17, 40, 64)):
        tokens, near = peers.decoded(model, prompt, 48)
        assert tokens == peers.greedy(peer, prompt, 48)
        assert len(set(tokens)) > 24
        gaps += near
    assert min(gaps) > 1e-6  # generate() compares in float32


def test_greedy_of_transformers_ends_at_the_end_token() -> None:
    model = tiny()
    peer = peers.as_transformers(model)
    prompt = prompts(seed=9)[0]
    whole = peers.greedy(peer, prompt, 12)
    assert peers.greedy(peer, prompt, 12, eos=frozenset({whole[4]})) == whole[: whole.index(whole[4]) + 1]


def test_tiny_is_the_same_for_the_same_seed() -> None:
    one, same, other = (targets(tiny(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    single = targets(tiny(seed=1, dtype=torch.float32))
    assert all(torch.equal(one[name].float(), single[name]) for name in one)
    with pytest.raises(ModelError, match="heads must be a multiple of kv_heads = 3"):
        tiny(kv_heads=3)


def test_fused_weights_are_slices_and_every_weight_has_one_name() -> None:
    model = tiny(seed=1, attention_bias=True, output_bias=True, mlp_bias=True)
    named = targets(model)
    assert sum(view.numel() for view in named.values()) * 8 == model.bytes
    named["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    block = model.blocks[1]
    assert float(block.qkv[64:96].min()) == 7.0  # type: ignore[index]  # ModuleList hands out Modules
    assert float(block.qkv[63].max()) < 7.0  # type: ignore[index]  # ModuleList hands out Modules
    tied = tiny(tie_embeddings=True)
    assert "lm_head.weight" not in targets(tied)
    assert tied.head is tied.embedding


def test_types_that_cannot_be_computed_are_refused() -> None:
    config: ModelConfig = tiny().config
    with pytest.raises(ModelError, match=r"dtype must be one of torch\.float64, .*, not torch\.int8"):
        Llama(config, dtype=torch.int8)
