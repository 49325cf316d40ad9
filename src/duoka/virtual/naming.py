"""Torch's names of virtual GPUs: ``privateuseone:0``, or ``vgpu:0`` on request.

torch has a single slot for device types that it doesn't know. Naming this slot makes it torch's
accelerator for the rest of the process, even beside CUDA: backward on CUDA then fails, and memory
is no longer pinned. Backward on virtual GPUs, in turn, needs them to be the accelerator. So the
slot is named only if a user requests virtual GPUs by name, and for backward where there is no CUDA.
Traces and checks that duoka runs for itself, maybe before CUDA is used, leave the slot unnamed.
"""

from __future__ import annotations

import torch

PLACE = "privateuseone"
"""torch's own name of the slot, which it accepts even after the slot is renamed."""

NAME = "vgpu"


def virtual_device(index: int) -> torch.device:
    """Return the device of the virtual GPU with this index."""
    return torch.device(PLACE, index)


def is_virtual(device: torch.device) -> bool:
    """Return True if a device is a virtual GPU, under either name."""
    return device.type in (PLACE, NAME)


def device_type() -> str:
    """Return the current device type of virtual GPUs: ``privateuseone``, or ``vgpu`` if named."""
    return virtual_device(0).type


def spoken(text: str) -> str:
    """Replace torch's name of virtual GPUs by ``vgpu`` in a text."""
    return text.replace(PLACE, NAME)
