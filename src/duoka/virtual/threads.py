"""What every thread needs before it can use virtual GPUs.

Both switches are torch's own and belong to one thread. ``torch.tensor(..., device="vgpu:0")`` works
only when new data is lifted to a device after it was built on the CPU; and backward must run in
the calling thread, because a device guard written in Python knows one device only.
"""

from __future__ import annotations

import torch

from .world import thread


def arm() -> None:
    """Set the switches for this thread, unless they are set; they stay."""
    if thread.armed:
        return
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_multithreading_enabled(False)
    thread.armed = True
