"""A decoder of the Llama family in plain torch, over whatever attention it is handed.

What lives here: RMS norm, rotary embedding, grouped-query projections, SwiGLU, output matrix. What does not: the keys and
values of earlier tokens (the attention has them), sampling, and files (`weights`, `gguf`).

The arithmetic is that of transformers, step for step where rounding shows: norms run in float32 in every type, float64
included, and angles are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it

from kvsched_kernels import Attention
from reference_server.model.config import ModelConfig, ModelError, Rope

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types a model can be computed in."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one layer: q, k, v to the values it gathers."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The last dimension divided by its root mean square, in float32, times the weight, in x's type."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of a head, float32 [head_dim / 2]."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "divided":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    turns = rope.original_context * plain / (2 * math.pi)  # over the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)  # 0: slow, divided by the factor; 1: fast, as it is
    return (1 - share) * plain / rope.factor + share * plain


class Block(torch.nn.Module):
    """One layer. The projections to q, k and v are one matrix, and so are the two of the MLP that share an input."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        c = self.config = config
        self.rotated = (c.heads + c.kv_heads) * c.head_dim
        wide = (c.heads + 2 * c.kv_heads) * c.head_dim

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.input_norm = weight(c.hidden_size)
        self.qkv = weight(wide, c.hidden_size)
        self.qkv_bias = weight(wide) if c.attention_bias else None
        self.q_norm = weight(c.head_dim) if c.qk_norm else None
        self.k_norm = weight(c.head_dim) if c.qk_norm else None
        self.output = weight(c.hidden_size, c.heads * c.head_dim)
        self.output_bias = weight(c.hidden_size) if c.output_bias else None
        self.mlp_norm = weight(c.hidden_size)
        self.gate_up = weight(2 * c.intermediate_size, c.hidden_size)
        self.gate_up_bias = weight(2 * c.intermediate_size) if c.mlp_bias else None
        self.down = weight(c.hidden_size, c.intermediate_size)
        self.down_bias = weight(c.hidden_size) if c.mlp_bias else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, run: Run, last: torch.Tensor | None) -> torch.Tensor:
        """One layer's output [T, hidden] of x [T, hidden]; cos and sin [T, 1, head_dim], sin with the sign of the half.

        last: the tokens whose output is wanted, where it is not all of them: what follows attention is computed for them alone.
        """
        c = self.config
        tokens = x.shape[0]
        qkv = F.linear(rms_norm(x, self.input_norm, c.rms_norm_eps), self.qkv, self.qkv_bias)
        both = qkv[:, : self.rotated].view(tokens, -1, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query = rms_norm(both[:, : c.heads], self.q_norm, c.rms_norm_eps)
            both = torch.cat((query, rms_norm(both[:, c.heads :], self.k_norm, c.rms_norm_eps)), 1)
        both = rotate(both, cos, sin)
        value = qkv[:, self.rotated :].view(tokens, c.kv_heads, c.head_dim)
        found = run(both[:, : c.heads], both[:, c.heads :], value).reshape(tokens, -1)
        if last is not None:
            x, found = x[last], found[last]
        x = x + F.linear(found, self.output, self.output_bias)
        gate_up = F.linear(rms_norm(x, self.mlp_norm, c.rms_norm_eps), self.gate_up, self.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, heads, head_dim]: element i turns with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


class Llama(torch.nn.Module):
    """A model: `config`, `dtype`, `device`, and weights that are whatever memory held until something fills them.

    Raises `ModelError` for a dtype that is not one of `FLOATS`. Its weights ask for no gradients. One thread at a time may
    use an attention; the model itself keeps nothing between calls.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if dtype not in FLOATS:
            raise ModelError(f"dtype must be one of {', '.join(map(str, FLOATS))}, not {dtype!r}")
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.blocks = torch.nn.ModuleList(Block(config, dtype, self.device) for _ in range(config.layers))
        self.norm = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.head = self.embedding if config.tie_embeddings else torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self._angles = frequencies(config.rope, config.head_dim).to(device)

    @property
    def bytes(self) -> int:
        """Bytes of all weights, tied ones once."""
        return sum(weight.nbytes for weight in self.parameters())

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, last: torch.Tensor) -> torch.Tensor:
        """Logits [m, vocab] of the tokens at `last` int64 [m] among T, in the model's type.

        token_ids, positions: int64 [T]. attention: it has begun the batch that these tokens are. Cost: every layer over all
        T, but the last layer past its attention, and the output matrix, over m alone.
        """
        cos, sin = self._rotary(positions)
        x = F.embedding(token_ids, self.embedding)
        final = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, partial(attention.run, index), last if index == final else None)
        return F.linear(rms_norm(x, self.norm, self.config.rms_norm_eps), self.head)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of the half, [T, 1, head_dim].

        No table: to compute T x head_dim / 2 angles once a step costs less than to keep a table as long as the context.
        """
        angle = positions.to(torch.float32).unsqueeze(1) * self._angles
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), 1).unsqueeze(1).to(self.dtype), torch.cat((-sin, sin), 1).unsqueeze(1).to(self.dtype)
