"""Trial: a placement in stages, held against a fleet with the planner's own costs."""

from __future__ import annotations

from collections.abc import Sequence

from ..fleet import Fleet
from ..forecast import Costs
from ..search import Objective, Stage, judge
from ..seconds import Seconds
from .data import Share

# No device has that much: what a stage needs where nothing limits it.
_UNLIMITED = 1 << 62

Stages = tuple[Stage, ...]


class Trial:
    """What stages need, and what an objective makes of them.

    Parameters
    ----------
    costs : Costs
    fleet : Fleet
    objective : {"headroom", "latency", "throughput"}
    """

    def __init__(self, costs: Costs, fleet: Fleet, objective: Objective) -> None:
        self.costs = costs
        self.fleet = fleet
        self.objective: Objective = objective
        known = [costs.seconds(device) is not None for device in fleet.devices]
        self.has_speeds = all(known)

    def share(self, stage: Stage) -> Share:
        """What a stage's device has."""
        device = self.fleet.devices[stage.device]
        needed = self.costs.reserved_bytes(stage.start, stage.stop, device.budget_bytes)
        if needed is None:
            least = self.costs.reserved_bytes(stage.start, stage.stop, _UNLIMITED)
            assert least is not None, "nothing limits it"
            # What fits in bytes and not for fragmentation misses one byte at least.
            needed = max(least, device.budget_bytes + 1)
        return Share(
            device=device.name,
            modules=self.modules(stage.start, stage.stop),
            needed_bytes=needed,
            budget_bytes=device.budget_bytes,
        )

    def modules(self, start: int, stop: int) -> tuple[str, ...]:
        """The modules of a run of blocks."""
        blocks = self.costs.profile.blocks
        return tuple(
            module
            for index in self.costs.blocks_of(start, stop)
            for module in blocks[index].modules
        )

    def fits(self, stages: Sequence[Stage]) -> bool:
        """Whether every stage fits its device."""
        return all(self.share(stage).free_bytes >= 0 for stage in stages)

    def value(self, stages: Stages) -> float | None:
        """What the objective makes of it; None where it doesn't fit."""
        return judge(self.costs, self.fleet, stages, self.objective) if self.fits(stages) else None

    def request_seconds(self, stages: Stages) -> float | None:
        """From the request to the last token; None where that is unknown or it doesn't fit."""
        found = self.seconds(stages) if self.fits(stages) else None
        return None if found is None else found.total_seconds

    def seconds(self, stages: Stages) -> Seconds | None:
        """What each stage takes; None where speeds are unknown."""
        devices = self.fleet.devices
        named = [(devices[stage.device].name, stage.start, stage.stop) for stage in stages]
        return self.costs.times.of(named, self.fleet)

    def is_better(self, one: float, other: float) -> bool:
        """Whether one value is better than another by more than rounding."""
        gain = one - other if self.objective == "headroom" else other - one
        return gain > 1e-9 * max(abs(one), abs(other))
