"""What every thread needs before it can use virtual GPUs.

Both switches are torch's own and belong to one thread. ``torch.tensor(..., device="vgpu:0")`` works
only when new data is lifted to a device after it was built on the CPU; and backward must run in
the calling thread, because a device guard written in Python knows one device only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .world import thread


def arm() -> None:
    """Set the switches for this thread, unless they are set; they stay, outside of `armed`."""
    if thread.armed:
        return
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_multithreading_enabled(False)
    thread.armed = True


@contextmanager
def armed() -> Iterator[None]:
    """Set the switches for this thread inside the scope: CUDA's backward wants its own threads."""
    before = torch._C._only_lift_cpu_tensors(), torch._C._is_multithreading_enabled(), thread.armed
    thread.armed = False
    arm()
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before[0])
        torch._C._set_multithreading_enabled(before[1])
        thread.armed = before[2]
