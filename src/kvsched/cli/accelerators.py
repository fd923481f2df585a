"""A small catalogue of accelerators by memory size, each with its source: data for the commands, and for nothing else.

The size is what the driver's own tool reports as the total of one device. A process sees a little less, because the driver keeps some for itself,
so what a running device says is better: `--gpu-bytes` takes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvsched.errors import ConfigError
from kvsched.sizing.amounts import KIB, MIB


@attrs.frozen
class Accelerator:
    """bytes: total memory of one device. source: where that figure is shown."""

    bytes: int
    source: str


_SURVEY = "nvidia-smi totals listed in github.com/modal-labs/modal-client pull request 2797"
ACCELERATORS: Mapping[str, Accelerator] = {
    "a10": Accelerator(23_028 * MIB, _SURVEY),
    "a100-40gb": Accelerator(40_960 * MIB, _SURVEY),
    "a100-80gb": Accelerator(81_920 * MIB, _SURVEY),
    "b200": Accelerator(183_359 * MIB, "nvidia-smi in github.com/NVIDIA/TensorRT-LLM issue 10278"),
    "h100-80gb": Accelerator(81_559 * MIB, _SURVEY + "; nvidia-smi in github.com/wilicc/gpu-burn issue 114"),
    "h100-nvl": Accelerator(99_961_274_368, "device total in github.com/fastfetch-cli/fastfetch issue 1658"),
    "h200": Accelerator(143_771 * MIB, "nvidia-smi of eight NVIDIA H200, driver 570.158.01"),
    "l20": Accelerator(46_068 * MIB, "nvidia-smi in github.com/vllm-project/vllm issue 14011"),
    "l4": Accelerator(23_034 * MIB, _SURVEY),
    "l40s": Accelerator(46_068 * MIB, _SURVEY),
    "mi300x": Accelerator(201_310_208 * KIB, "rocminfo, pool size, in github.com/ROCm/legacy-rocm-build issue 4414"),
    "rtx-4090": Accelerator(24_564 * MIB, "nvidia-smi in github.com/vllm-project/vllm issue 7553"),
    "t4": Accelerator(15_360 * MIB, _SURVEY),
}
"""By the names that the commands take."""


def accelerator(name: str) -> Accelerator:
    """The entry of that name, in upper or lower case. Raises `ConfigError` naming those there are."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu must be one of {', '.join(ACCELERATORS)}, not {name!r}; --gpu-bytes takes any size")
    return found
