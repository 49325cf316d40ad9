"""The routing of a step: which tokens each expert of a layer has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def by_expert(experts: Tensor, count: int) -> list[tuple[int, Tensor]]:
    """Return each expert in use with the indices of its pairs of token and expert.

    The host waits for the routing. `experts` are those of each token, [tokens, top_k], of `count`.
    """
    ordered, pairs = experts.flatten().sort()
    bounds = torch.arange(count, device=experts.device)
    ends = torch.searchsorted(ordered, bounds, right=True).tolist()
    starts = [0, *ends]
    return [
        (number, pairs[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=False))
        if start < end
    ]


def sent_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on the host, for which the host waits once."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    # Pinned memory lets all copies go before the only wait.
    sent = [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return sent


# Another routing gives other tiles. So before the first tile, the memory of the largest possible
# one is allocated and freed: the tiles then use what the allocator keeps of it.
def reserve(device: torch.device, sizes_bytes: Sequence[int]) -> None:
    """Allocate memory of these sizes, all at once, and free it."""
    _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes_bytes]


def routing_bytes(experts: Tensor) -> list[int]:
    """Return the sizes of the sorted routing and of the buffers of its sort."""
    num_bytes = 8 * experts.numel()
    return [num_bytes, num_bytes, num_bytes, 2 * num_bytes]
