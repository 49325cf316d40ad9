"""Copies between devices, and the detour where they don't arrive.

Where one GPU may write to another's memory (peer access), an IOMMU or PCIe's access control can
lead the bytes astray, and nobody reports an error: zeros or garbage arrive. So each pair of GPUs
that tensors go between is tested once in a process, by bytes that are read again by the host; where
they don't arrive, tensors go through the host's memory, which both GPUs reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from duoka.base.progress import say

# In the allocator's smallest segments, and more than what goes in one piece over any link.
_WORDS = 2**16


def carry(tensor: Tensor, device: torch.device, **options: Any) -> Tensor:
    """Copy a tensor to a device as `Tensor.to` does; through the host where direct copies fail."""
    source = tensor.device
    if source.type == device.type == "cuda" and not arrives(_index(source), _index(device)):
        tensor = tensor.cpu()
    return tensor.to(device=device, **options)


def try_copies(devices: Iterable[torch.device]) -> None:
    """Test the copies between neighbours, and between the last and the first, before their use.

    Other pairs are tested at their first copy. The memory of the test is released.
    """
    gpus = list(dict.fromkeys(_index(device) for device in devices if device.type == "cuda"))
    tested = _arrives.cache_info().misses
    for pair in zip(gpus, [*gpus[1:], *gpus[:1]], strict=True):
        arrives(*pair)
        arrives(*reversed(pair))
    if len(gpus) > 1 and _arrives.cache_info().misses > tested:
        torch.cuda.empty_cache()


def arrives(source: int, target: int) -> bool:
    """Return True if copies from one CUDA device to another are known to arrive."""
    try:
        return _arrives(source, target)
    except torch.OutOfMemoryError:
        return False  # it can't be known now


@cache  # what a machine does to bytes it does until it is restarted
def _arrives(source: int, target: int) -> bool:
    if source == target or not torch.cuda.can_device_access_peer(source, target):
        return True  # the driver leads it through the host's memory itself
    fault = copy_fault(f"cuda:{source}", f"cuda:{target}")
    if fault:
        say(
            f"cuda:{source} → cuda:{target}: {fault} in direct copies between these GPUs; duoka "
            "copies through CPU memory instead (see `duoka doctor`)"
        )
    return not fault


def copy_fault(source: str, target: str) -> str:
    """Describe the damage to bytes that are copied between two devices; empty if they arrive."""
    with torch.inference_mode():
        pattern = torch.arange(1, _WORDS + 1, dtype=torch.int32, device="cpu")
        inverse = pattern.bitwise_not()
        received = inverse.to(target, copy=True)
        received.copy_(pattern.to(source))
        back = received.cpu()
    if torch.equal(back, pattern):
        return ""
    if not back.any():
        return "zeros arrive"
    if torch.equal(back, inverse):
        return "nothing arrives"
    return f"{int((back != pattern).sum())} of {_WORDS} numbers are corrupted"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
