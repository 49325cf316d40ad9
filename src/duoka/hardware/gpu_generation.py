"""GPU generation: memory needs that depend on the generation of a GPU.

PyTorch's allocator allocates a cuBLAS workspace at a thread's first matrix product on a GPU, and
never frees it: one for the forward pass and, in training, one for the backward pass, which has its
own thread per GPU. Flash attention, and fused attention in bfloat16, need Ampere or newer; older
GPUs (T4, V100, RTX 2080 Ti) materialize the attention weights of all pairs of tokens instead.
Environment variables override the size of the workspace, and choose how the allocator reserves
memory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that overrides the sizes: pairs of KiB and count, as ":4096:2:16:8"."""

ALLOCATOR_CONFIGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the options of PyTorch's allocator, the one that it prefers first."""

# PyTorch's defaults: ":4096:2:16:8" (8.125 MiB), and from Hopper on ":4096:8" (32 MiB), in
# `parseChosenWorkspaceSize` of aten/src/ATen/cuda/CublasHandlePool.cpp.
_BYTES = (2 * 4096 + 8 * 16) * 1024
_FROM_HOPPER_BYTES = 32 * 2**20
_HOPPER = (9, 0)


def workspace_bytes(compute_capability: tuple[int, int] | None = None) -> int:
    """Return the bytes of a cuBLAS workspace; for an unknown GPU the default before Hopper."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(WORKSPACE_CONFIG, ""))
    if pairs:
        return sum(int(size) * int(number) for size, number in pairs) * 1024
    return _FROM_HOPPER_BYTES if (compute_capability or (0, 0)) >= _HOPPER else _BYTES


def has_expandable_segments() -> bool:
    """Return True if the environment makes the segments of PyTorch's allocator expandable."""
    # PyTorch reads the first variable that is set, be it empty; the last of equal options counts.
    options = next((os.environ[name] for name in ALLOCATOR_CONFIGS if name in os.environ), "")
    return re.findall(r"expandable_segments:(\w+)", "".join(options.split()))[-1:] == ["True"]


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """Memory needs assumed for all GPUs of a fleet; by default of Ampere to Ada.

    `expandable_segments` is the option of PyTorch's allocator, by default as in the environment.
    """

    workspace_bytes: int = field(default_factory=workspace_bytes)
    before_ampere: bool = False
    expandable_segments: bool = field(default_factory=has_expandable_segments)
