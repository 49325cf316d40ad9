"""Layout of a run's processes: the rank of each device of each replica, and gradient reduction."""

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

# Size of the buckets in which gradients are copied to the host's memory and all-reduced.
_BUCKET_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a run: a process for each device of each replica, in the order of the plans.

    `plans` has the plan of each replica.
    """

    plans: tuple[Plan, ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(len(plan.devices) for plan in self.plans)

    def place(self, rank: int) -> tuple[int, str]:
        """Return the replica and the device of a process."""
        for replica, plan in enumerate(self.plans):
            if rank < len(plan.devices):
                return replica, plan.devices[rank]
            rank -= len(plan.devices)
        raise AssertionError("more processes than devices")

    def rank(self, replica: int, device: str) -> int:
        """Return the rank of the process for a device of a replica."""
        num_earlier = sum(len(plan.devices) for plan in self.plans[:replica])
        return num_earlier + self.plans[replica].devices.index(device)

    def label(self, rank: int) -> str:
        """Return the display name of a process's device, with its replica if there are several."""
        replica, device = self.place(rank)
        return f"{device} (copy {replica + 1})" if len(self.plans) > 1 else device

    def forecast(self, rank: int) -> StageBytes:
        """Return the forecast memory of a process's device."""
        replica, device = self.place(rank)
        devices = self.plans[replica].forecast.devices
        return next(stage for stage in devices if stage.device == device)

    def owners(self, parameter: str) -> tuple[int, ...]:
        """Return the ranks with a parameter: a rank for each replica."""
        name = base_name(parameter)
        return tuple(
            self.rank(replica, plan.placement.device_of(name) or "")
            for replica, plan in enumerate(self.plans)
        )


# Two replicas of a model with layers 0 and 1, the first on one GPU, the second on two:
#
#   rank 0: layers 0 and 1      rank 1: layer 0      rank 2: layer 1
#
# Gradients of layer 0 are summed over ranks {0, 1}, those of layer 1 over {0, 2}: each set of
# owners has a process group. Gradients are all-reduced in buckets in the host's memory. A bucket
# ends with a count for each parameter: 1 if this rank has a gradient, 0 if not. A summed count of 0
# means that no replica has a gradient: `grad` stays None, and the optimizer skips the parameter as
# on one GPU.
class GradientSum:
    """All-reduces the gradients of each parameter over the replicas.

    Replicas may be split differently over GPUs, so parameters differ in the ranks that own them.
    `names` are the trained parameters of the whole model.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._owners: dict[str, tuple[int, ...]] = {}
        if len(layout.plans) == 1:
            return
        # torch.distributed requires every process to create every group, in the same order.
        for name in names:
            owners = self._owners[name] = layout.owners(name)
            if owners not in self._groups:
                self._groups[owners] = dist.new_group(list(owners), backend="gloo")

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace gradients by their sums over the replicas; a missing gradient counts as zero.

        A parameter whose `grad` is None in all replicas keeps None.
        """
        for owners, group in self._groups.items():
            shared = [p for name, p in parameters.items() if self._owners[name] == owners]
            for bucket in _buckets(shared):
                _all_reduce_gradients(bucket, group)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Split parameters, in order, into buckets of about `_BUCKET_BYTES`."""
    ends = accumulate(parameter.nbytes for parameter in parameters)
    numbered = zip((end // _BUCKET_BYTES for end in ends), parameters, strict=True)
    for _, bucket in groupby(numbered, key=itemgetter(0)):
        yield [parameter for _, parameter in bucket]


def _all_reduce_gradients(params: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of parameters over the ranks of `group`, in place.

    A parameter whose `grad` is None on every rank keeps None; with None on some ranks it gets the
    sum of the others.
    """
    sizes = [parameter.numel() for parameter in params]
    flat = torch.zeros(sum(sizes) + len(sizes))
    *parts, grad_counts = flat.split([*sizes, len(sizes)])
    for index, (part, parameter) in enumerate(zip(parts, params, strict=True)):
        if parameter.grad is not None:
            part.copy_(parameter.grad.reshape(-1))
            grad_counts[index] = 1
    dist.all_reduce(flat, group=group)
    for grad_count, part, parameter in zip(grad_counts.tolist(), parts, params, strict=True):
        if grad_count:
            total: Tensor = part.view(parameter.shape).to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = total.to(parameter.device)
            else:
                parameter.grad.copy_(total)
