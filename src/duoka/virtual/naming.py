"""Torch's names of virtual GPUs: ``privateuseone:0``, or ``vgpu:0`` on request.

torch keeps one place for devices that it doesn't know. To name that place makes it torch's
accelerator for the rest of the process, even beside CUDA: backward on CUDA then fails, and memory
is no longer pinned. Backward on virtual GPUs, in turn, works when they are the accelerator. So the
name is given to those who ask for virtual GPUs by it, and for backward where there is no CUDA; what
duoka runs for its own purposes in a process that may use CUDA afterwards does without.
"""

from __future__ import annotations

import torch

PLACE = "privateuseone"
"""torch's name for the place, which it understands even when the place has another."""

NAME = "vgpu"


def virtual_device(index: int) -> torch.device:
    """Return the device of the virtual GPU of this number."""
    return torch.device(PLACE, index)


def is_virtual(device: torch.device) -> bool:
    """Return True for the device of a virtual GPU."""
    return device.type in (PLACE, NAME)


def device_type() -> str:
    """Return the type of a virtual GPU's device, as it is called in this process now."""
    return virtual_device(0).type


def spoken(text: str) -> str:
    """Replace torch's name of virtual GPUs by ``vgpu`` in a text."""
    return text.replace(PLACE, NAME)
