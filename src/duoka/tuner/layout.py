"""Layout of processes: ranks, replicas, and the owners of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from duoka.forecast.stage_bytes import StageBytes
from duoka.models import base_name
from duoka.planner.plan import Plan

# Gradients of so many bytes at a time pass through the host's memory.
_BUCKET_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Layout:
    """Processes of a run: one per device of each replica's plan, in this order."""

    plans: tuple[Plan, ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(len(plan.devices) for plan in self.plans)

    def place(self, rank: int) -> tuple[int, str]:
        """Return replica and device of a process."""
        for replica, plan in enumerate(self.plans):
            if rank < len(plan.devices):
                return replica, plan.devices[rank]
            rank -= len(plan.devices)
        raise AssertionError("more processes than devices")

    def rank(self, replica: int, device: str) -> int:
        """Return the process of a replica's device."""
        num_earlier = sum(len(plan.devices) for plan in self.plans[:replica])
        return num_earlier + self.plans[replica].devices.index(device)

    def label(self, rank: int) -> str:
        """Return the display name of a process's device."""
        replica, device = self.place(rank)
        return f"{device} (copy {replica + 1})" if len(self.plans) > 1 else device

    def forecast(self, rank: int) -> StageBytes:
        """Return the forecast of a process's device."""
        replica, device = self.place(rank)
        devices = self.plans[replica].forecast.devices
        return next(stage for stage in devices if stage.device == device)

    def owners(self, parameter: str) -> tuple[int, ...]:
        """Return the processes that hold a parameter, one per replica."""
        name = base_name(parameter)
        return tuple(
            self.rank(replica, plan.placement.device_of(name) or "")
            for replica, plan in enumerate(self.plans)
        )


# Two replicas of a model with layers 0 and 1, the first on one GPU, the second on two:
#
#   rank 0: layers 0 and 1      rank 1: layer 0      rank 2: layer 1
#
# Gradients of layer 0 are summed over ranks {0, 1}, those of layer 1 over {0, 2}: a process group
# for each set of owners. They pass through the host's memory in buckets; behind the gradients of a
# bucket are as many numbers, 1 for each gradient that is there. A sum of 0 says that no replica has
# one: the parameter stays without, and the optimizer passes over it as on one GPU.
class GradientSum:
    """All-reduces each parameter's gradients over the replicas.

    Replicas may be split differently, so each parameter has its own set of processes.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._owners: dict[str, tuple[int, ...]] = {}
        if len(layout.plans) == 1:
            return
        # Every process has to make every group, in the same order.
        for name in names:
            owners = self._owners[name] = layout.owners(name)
            if owners not in self._groups:
                self._groups[owners] = dist.new_group(list(owners), backend="gloo")

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum gradients into every replica; a missing gradient counts as zero.

        Parameters without a gradient in all replicas stay without.
        """
        for owners, group in self._groups.items():
            shared = [p for name, p in parameters.items() if self._owners[name] == owners]
            for bucket in _buckets(shared):
                _sum(bucket, group)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Cut parameters into groups of about `_BUCKET_BYTES`."""
    ends = accumulate(parameter.nbytes for parameter in parameters)
    numbered = zip((end // _BUCKET_BYTES for end in ends), parameters, strict=True)
    for _, bucket in groupby(numbered, key=itemgetter(0)):
        yield [parameter for _, parameter in bucket]


def _sum(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    host = torch.zeros(sum(sizes) + len(sizes))
    *parts, numbers = host.split([*sizes, len(sizes)])
    for at, (part, parameter) in enumerate(zip(parts, parameters, strict=True)):
        if parameter.grad is not None:
            part.copy_(parameter.grad.reshape(-1))
            numbers[at] = 1
    dist.all_reduce(host, group=group)
    for number, part, parameter in zip(numbers.tolist(), parts, parameters, strict=True):
        if number:
            total: Tensor = part.view(parameter.shape).to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = total.to(parameter.device)
            else:
                parameter.grad.copy_(total)
