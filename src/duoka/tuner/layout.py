"""Layout of a run's processes: the rank of each device of each replica."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.forecast.stage_bytes import StageBytes
from duoka.models import base_name
from duoka.planner.plan import Plan


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
