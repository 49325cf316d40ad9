"""Running micro-batches through stages: all of them in one process, or those of this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from .channels import Channel
from .interceptor import Interceptor
from .micro_batch import MicroBatch
from .route import Route
from .schedule import Pass


def run_passes(
    interceptor: Interceptor,
    routes: Sequence[Route],
    passes: Sequence[Pass],
    channel: Channel,
    devices: Sequence[torch.device],
    forward: Callable[[int, torch.device], Tensor],
    *,
    stages: Collection[int] | None = None,
) -> list[Tensor]:
    """Run passes in their order, those of some `stages` alone; the losses that were computed here.

    `routes` has the route of each micro-batch; `forward(number, device)` calls the model with a
    micro-batch and returns its loss, as far as the last stage gets that.
    """
    running: dict[tuple[int, int], tuple[MicroBatch, Tensor | None]] = {}
    losses: list[Tensor] = []
    for stage, number, is_backward in passes:
        if stages is not None and stage not in stages:
            continue
        if is_backward:
            micro_batch, loss = running.pop((stage, number))
            micro_batch.backward(loss)
            continue
        device = devices[stage]
        micro_batch = MicroBatch(routes[number], stage, number, channel, device)
        loss = micro_batch.forward(interceptor, lambda: forward(number, device))  # noqa: B023
        running[stage, number] = micro_batch, loss
        if loss is not None:
            losses.append(loss.detach())
    return losses
