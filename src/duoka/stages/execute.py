"""Runs micro-batches through the stages of this process: all stages of a model, or some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .channels import Channel
from .interceptor import BlockInterceptor
from .micro_batch import StageMicroBatch
from .route import Route
from .schedule import ScheduledPass

Forward = Callable[[int, torch.device], Tensor]
"""Calls the model with micro-batch `number` on a device; returns the loss in the last stage."""


@dataclass(eq=False)
class StagePipeline:
    """Runs micro-batches through this process's stages of a model.

    `devices` has the device of each stage of the model; `local` has the numbers of this process's
    stages, by default all. `before_last_backward` is called before the last backward pass of a run.
    """

    interceptor: BlockInterceptor
    channel: Channel
    devices: Sequence[torch.device]
    local: Collection[int] | None = None
    before_last_backward: Callable[[], object] = lambda: None

    def run(
        self,
        routes: Sequence[Route],
        passes: Sequence[ScheduledPass],
        forward: Forward,
        *,
        learns: bool = True,
    ) -> list[Tensor]:
        """Run the passes of this process's stages in order; return the losses of the last stage.

        `routes` has the route of each micro-batch. If `learns` is False, `passes` has no backward
        passes, and nothing is kept for them. Without the last stage here the list is empty.
        """
        running: dict[tuple[int, int], tuple[StageMicroBatch, Tensor | None]] = {}
        losses: list[Tensor] = []
        local = range(len(self.devices)) if self.local is None else self.local
        own_passes = [step for step in passes if step.stage in local]
        for index, (stage, number, is_backward) in enumerate(own_passes):
            if is_backward:
                if index == len(own_passes) - 1:
                    self.before_last_backward()
                micro_batch, loss = running.pop((stage, number))
                micro_batch.backward(loss)
                continue
            device = self.devices[stage]
            micro_batch = StageMicroBatch(
                routes[number], stage, number, self.channel, device, learns=learns
            )
            loss = micro_batch.forward(self.interceptor, partial(forward, number, device))
            if learns:
                running[stage, number] = micro_batch, loss
            if loss is not None:
                losses.append(loss.detach())
        return losses
