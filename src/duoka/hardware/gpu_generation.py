"""What the memory of a workload depends on that differs from one generation of GPUs to the next.

PyTorch takes cuBLAS's workspace from its own allocator at the first matrix product of a thread on a
GPU, and keeps it: once where a model runs forward, and once more in training, whose backward pass
has a thread of its own for each GPU. Flash attention, and fused attention in bfloat16, need Ampere;
older GPUs (T4, V100, RTX 2080 Ti) make the scores of all tokens with all others instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from duoka.errors import UsageError

WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that says other sizes: pairs of KiB and how often, ":4096:2:16:8"."""

_BYTES = (2 * 4096 + 8 * 16) * 1024
_FROM_HOPPER_BYTES = 32 * 2**20
_HOPPER = (9, 0)


def workspace_bytes(compute_capability: tuple[int, int] | None = None) -> int:
    """What one takes; where the GPU isn't known, on one before Hopper."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(WORKSPACE_CONFIG, ""))
    if pairs:
        return sum(int(size) * int(number) for size, number in pairs) * 1024
    return _FROM_HOPPER_BYTES if (compute_capability or (0, 0)) >= _HOPPER else _BYTES


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """How all GPUs of a fleet are taken to be; by default those from Ampere to Ada."""

    workspace_bytes: int = field(default_factory=workspace_bytes)
    before_ampere: bool = False

    def __post_init__(self) -> None:
        if self.workspace_bytes < 0:
            raise UsageError(f"a workspace can't have {self.workspace_bytes} bytes")
