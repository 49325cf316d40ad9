"""cuBLAS's workspace: memory of PyTorch's own allocator that matrix products get, and keep.

PyTorch takes it at the first product of a thread on a GPU: once where a model runs forward, and
once more in training, whose backward pass has a thread of its own for each GPU.
"""

from __future__ import annotations

import os
import re

CONFIG = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that says other sizes: pairs of KiB and how often, ":4096:2:16:8"."""

_BYTES = (2 * 4096 + 8 * 16) * 1024
_FROM_HOPPER_BYTES = 32 * 2**20
_HOPPER = (9, 0)


def workspace_bytes(compute_capability: tuple[int, int] | None = None) -> int:
    """What one takes; where the GPU isn't known, on one before Hopper."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(CONFIG, ""))
    if pairs:
        return sum(int(size) * int(number) for size, number in pairs) * 1024
    return _FROM_HOPPER_BYTES if (compute_capability or (0, 0)) >= _HOPPER else _BYTES
