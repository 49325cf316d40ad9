"""Copies between devices; through the host's memory where direct copies between GPUs fail.

When one GPU writes directly to another's memory (peer access), an IOMMU or PCIe's access control
can misroute the bytes without any error: zeros or garbage arrive. So each ordered pair of GPUs in
use is tested once per process, with a pattern that the host reads back. If the pattern is damaged,
tensors between the two go through the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from duoka.base.progress import say

# 256 KiB: fits the allocator's small segments, and is more than any link sends in one piece.
_WORDS = 2**16


def carry(tensor: Tensor, device: torch.device, **options: Any) -> Tensor:
    """Copy a tensor to a device as `Tensor.to` does, through the host if direct copies fail."""
    source = tensor.device
    if source.type == device.type == "cuda" and not arrives(_index(source), _index(device)):
        tensor = tensor.cpu()
    return tensor.to(device=device, **options)


def try_copies(devices: Iterable[torch.device]) -> None:
    """Test the copies between neighbouring GPUs, and between last and first, before their use.

    Other pairs are tested at their first copy. The test's memory is released.
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
        return False  # no memory for the test now: assume that copies fail


@cache  # the result holds until the machine restarts
def _arrives(source: int, target: int) -> bool:
    """Test the copies from one CUDA device to another; report failing ones to the user."""
    if source == target or not torch.cuda.can_device_access_peer(source, target):
        return True  # without peer access the driver copies through the host
    fault = copy_fault(f"cuda:{source}", f"cuda:{target}")
    if fault:
        say(
            f"cuda:{source} → cuda:{target}: {fault} in direct copies between these GPUs; duoka "
            "copies through CPU memory instead (see `duoka doctor`)"
        )
    return not fault


def copy_fault(source: str, target: str) -> str:
    """Describe the damage to bytes copied between two devices; return "" if they arrive intact."""
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
