"""Merging of attention partials by log-sum-exp, and the two gates that a merge has to pass (law I1).

What lives here: the merge, which a host needs that splits the KV of one request over ranks by tokens, the change between
natural and base-2 logarithms, and the gates. What does not: how partials are computed, and how they travel between ranks.

A partial is what attention over some of the keys gives for a token and a head: the output, normalized over those keys
alone, and the log-sum-exp of their scores. Partials are merged in rank order. Floating-point sums depend on their order,
so an order of arrival would give other bytes from run to run, and ranks that compare or share results would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from kvsched_kernels.errors import KernelError

LN2 = math.log(2.0)

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""One tensor, or several in a fixed order, such as what `merge` returns."""


class GateFailed(Exception):
    """A merge, or whatever was put through a gate, did not pass. The message carries the facts."""


class NotDeterministic(GateFailed):
    """The same inputs gave other bytes the second time.

    output: position of the tensor that differs. differing: elements that differ, of `elements`. index: the first of them.
    """

    def __init__(self, message: str, *, output: int, differing: int, elements: int, index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.output, self.differing, self.elements, self.index = output, differing, elements, index


class NotInAgreement(GateFailed):
    """The merged result is further from the unsplit one than the tolerance allows.

    output: position of the tensor. error: largest absolute difference (NaN where a value is not a number). tolerance: what
    was allowed. index: where the largest is. merged, unsplit: the two values there. beyond: elements beyond the tolerance.
    """

    def __init__(self, message: str, *, output: int, error: float, tolerance: float, index: tuple[int, ...], merged: float,
                 unsplit: float, beyond: int) -> None:
        super().__init__(message)
        self.output, self.error, self.tolerance, self.index = output, error, tolerance, index
        self.merged, self.unsplit, self.beyond = merged, unsplit, beyond


def natural_from_base2(lse: torch.Tensor) -> torch.Tensor:
    """Natural log-sum-exp of a base-2 one, which is what FlashInfer returns unless asked otherwise. A new tensor.

    >>> natural_from_base2(torch.tensor([1.0, float("-inf")]))
    tensor([0.6931,   -inf])
    """
    return lse * LN2


def base2_from_natural(lse: torch.Tensor) -> torch.Tensor:
    """Base-2 log-sum-exp of a natural one, which is what FlashInfer's merge takes. A new tensor."""
    return lse / LN2


def in_rank_order(arrived: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials as they came in, by rank, stacked in rank order: what `merge` takes.

    arrived: rank to (output [tokens, heads, head_dim], lse [tokens, heads]), in whatever order they were put in; ranks 0 to
    n - 1, each there. A rank without keys sends lse = -inf, it does not stay away. Raises `KernelError` naming the ranks
    that are missing or unexpected.
    """
    if not arrived:
        raise KernelError("arrived must hold the partials of at least one rank")
    expected = range(len(arrived))
    strange = sorted(set(arrived) - set(expected))
    if strange:
        missing = [rank for rank in range(max(strange)) if rank not in arrived]
        raise KernelError(f"arrived must hold ranks 0 to n - 1: has {sorted(arrived)}, missing {missing}")
    ordered = [arrived[rank] for rank in expected]
    return torch.stack([output for output, _ in ordered]), torch.stack([lse for _, lse in ordered])


def merge(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of all parts' keys, from attention over each part's, summed in the order of the parts.

    outputs: [parts, tokens, heads, head_dim]. lses: natural log-sum-exp [parts, tokens, heads]; what comes from FlashInfer
    goes through `natural_from_base2` first. Index 0 is rank 0. A part with lse -inf saw no key for that token and head and
    contributes nothing, whatever its output holds; where no part saw any, the result is 0 and -inf.

    Returns (output [tokens, heads, head_dim] in the type of `outputs`, lse [tokens, heads]). Sums and the returned lse are
    in float32, in float64 where an input is. Raises `KernelError` for shapes or types that do not fit. Cost: reads every
    input once, O(parts) elementwise steps.
    """
    check_parts(outputs, lses)
    kind = torch.promote_types(torch.promote_types(outputs.dtype, lses.dtype), torch.float32)
    scores = lses.to(kind)
    top = scores.amax(dim=0)
    # Where no part saw a key, top is -inf and (-inf) - (-inf) is no number: there every weight is exp(-inf - 0) = 0.
    base = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros_like(base)
    merged = torch.zeros(outputs.shape[1:], dtype=kind, device=outputs.device)
    for rank in range(outputs.shape[0]):  # one by one: the order of a reduction over a dimension is the library's choice
        weight = torch.exp(scores[rank] - base)
        seen = (scores[rank] != -torch.inf).unsqueeze(-1)
        total = total + weight
        merged = merged + weight.unsqueeze(-1) * torch.where(seen, outputs[rank].to(kind), 0.0)
    divisor = total.masked_fill(top == -torch.inf, 1.0).unsqueeze(-1)
    return (merged / divisor).to(outputs.dtype), base + torch.log(total)


def check_parts(outputs: torch.Tensor, lses: torch.Tensor) -> None:
    """Raise `KernelError` unless the two are partials that can be merged."""
    if outputs.dim() != 4 or outputs.shape[0] < 1:
        raise KernelError(f"outputs must be [parts, tokens, heads, head_dim] with at least one part, not {list(outputs.shape)}")
    if lses.shape != outputs.shape[:3]:
        raise KernelError(f"lses must be [parts, tokens, heads] = {list(outputs.shape[:3])}, not {list(lses.shape)}")
    if not outputs.is_floating_point() or not lses.is_floating_point():
        raise KernelError(f"outputs and lses must be floating point, not {outputs.dtype} and {lses.dtype}")
    if outputs.device != lses.device:
        raise KernelError(f"outputs and lses must be on one device, not on {outputs.device} and {lses.device}")


def _tensors(value: Tensors) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def gate_determinism(fn: Callable[..., Tensors], inputs: Sequence[torch.Tensor], *, device: torch.device | str = "cpu") -> None:
    """Gate 1: `fn` of the same inputs twice must give the same bytes. There is no tolerance.

    inputs: tensors on the CPU, sampled there, so that every machine gates the same values; each run gets its own copies on
    `device`. fn: gives a tensor or several. Zeros of either sign differ, and so do not-a-numbers with other bits.
    Raises `NotDeterministic` with the facts, `KernelError` for inputs that are not on the CPU.
    """
    for at, tensor in enumerate(inputs):
        if tensor.device.type != "cpu":
            raise KernelError(f"inputs must be sampled on the CPU: input {at} is on {tensor.device}")
    first, second = (
        tuple(result.detach().cpu() for result in _tensors(fn(*[tensor.detach().clone().to(device) for tensor in inputs])))
        for _ in range(2)
    )
    if [(a.shape, a.dtype) for a in first] != [(b.shape, b.dtype) for b in second]:
        shapes = [[f"{list(t.shape)} {t.dtype}" for t in run] for run in (first, second)]
        raise NotDeterministic(
            f"the same inputs gave {shapes[0]} and then {shapes[1]}", output=0, differing=0, elements=0, index=())
    for at, (a, b) in enumerate(zip(first, second, strict=True)):
        unequal = (_bytes(a) != _bytes(b)).any(dim=-1)
        if bool(unequal.any()):
            flat = int(unequal.nonzero()[0])
            where, differing = _index(flat, a.shape), int(unequal.sum())
            raise NotDeterministic(
                f"output {at}: {differing} of {a.numel()} elements differ between two runs on the same inputs; "
                f"the first at {list(where)}: {a.reshape(-1)[flat].item()!r} and then {b.reshape(-1)[flat].item()!r}",
                output=at, differing=differing, elements=a.numel(), index=where)


def gate_agreement(merged: Tensors, unsplit: Tensors, *, tolerance: float) -> float:
    """Gate 2: `merged` must agree with `unsplit` within an absolute tolerance that was fixed before the run.

    merged, unsplit: a tensor, or several of the same count and shapes. tolerance: at least 0; there is no default, because
    a tolerance chosen after a look at the result proves nothing. Equal infinities agree; a not-a-number never does.
    Returns the largest absolute difference. Raises `NotInAgreement` with the facts, `KernelError` for shapes that differ.
    """
    _check_tolerance(tolerance)
    ours, theirs = _tensors(merged), _tensors(unsplit)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = [[list(t.shape) for t in side] for side in (ours, theirs)]
        raise KernelError(f"merged and unsplit must have the same shapes, not {shapes[0]} and {shapes[1]}")
    largest = 0.0
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not a.numel():
            continue
        mine, want = (t.detach().to("cpu", torch.float64).reshape(-1) for t in (a, b))
        error = torch.where(mine == want, 0.0, (mine - want).abs())
        worst = torch.where(error.isnan(), torch.inf, error)
        flat = int(worst.argmax())
        if not float(worst[flat]) <= tolerance:
            where, beyond = _index(flat, a.shape), int((worst > tolerance).sum())
            raise NotInAgreement(
                f"output {at}: off by {float(error[flat])!r} at {list(where)}, where merged is {float(mine[flat])!r} and unsplit "
                f"{float(want[flat])!r}; the tolerance is {tolerance!r}, and {beyond} of {a.numel()} elements are beyond it",
                output=at, error=float(error[flat]), tolerance=float(tolerance), index=where, merged=float(mine[flat]),
                unsplit=float(want[flat]), beyond=beyond)
        largest = max(largest, float(worst[flat]))
    return largest


def _check_tolerance(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise KernelError(f"tolerance must be a finite number of at least 0, not {value!r}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of each element, [elements, bytes]."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), -1) if flat.numel() else torch.zeros((0, 1), dtype=torch.uint8)


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    where = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        where.append(rest)
    return tuple(reversed(where))
