"""Running micro-batches through stages: all of them in one process, or those of this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from .channels import Channel
from .interceptor import BlockInterceptor
from .micro_batch import StageMicroBatch
from .route import Route
from .schedule import ScheduledPass

Forward = Callable[[int, torch.device], Tensor]
"""Calls the model with a micro-batch; its loss, as far as the last stage gets that."""


class StagePipeline:
    """Stages of a model, of which this process has some, by default all.

    `devices` has one for each stage; it is used of this process's alone.
    """

    def __init__(
        self,
        interceptor: BlockInterceptor,
        channel: Channel,
        devices: Sequence[torch.device],
        *,
        local: Collection[int] | None = None,
    ) -> None:
        self._interceptor = interceptor
        self._channel = channel
        self._devices = devices
        self._local = range(len(devices)) if local is None else local

    def run(
        self,
        routes: Sequence[Route],
        passes: Sequence[ScheduledPass],
        forward: Forward,
        *,
        learns: bool = True,
    ) -> list[Tensor]:
        """Run this process's passes in their order; the losses that were computed here.

        `routes` has the route of each micro-batch. Without `learns` there is no backward, and
        nothing is kept for it.
        """
        running: dict[tuple[int, int], tuple[StageMicroBatch, Tensor | None]] = {}
        losses: list[Tensor] = []
        for stage, number, is_backward in passes:
            if stage not in self._local:
                continue
            if is_backward:
                micro_batch, loss = running.pop((stage, number))
                micro_batch.backward(loss)
                continue
            device = self._devices[stage]
            micro_batch = StageMicroBatch(
                routes[number], stage, number, self._channel, device, learns=learns
            )
            loss = micro_batch.forward(self._interceptor, partial(forward, number, device))
            if learns:
                running[stage, number] = micro_batch, loss
            if loss is not None:
                losses.append(loss.detach())
        return losses
