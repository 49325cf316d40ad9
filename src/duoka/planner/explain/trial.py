"""Trial: a placement in stages, held against a fleet with the planner's own costs."""

from __future__ import annotations

from collections.abc import Sequence

from duoka.forecast.costs import Costs
from duoka.forecast.latency import Seconds
from duoka.hardware.fleet import Fleet

from ..search import Limits, Stage
from .data import Share

# No device has that much: what a stage needs where nothing limits it.
_UNLIMITED = 1 << 62
_LARGER_IS_BETTER = ("headroom", "balance", "order")
TIMED = ("latency", "throughput")

Stages = tuple[Stage, ...]


class Trial:
    """What stages need, and what an objective makes of them.

    Parameters
    ----------
    costs : Costs
    fleet : Fleet
    objective : str
        As a plan has it.
    limits : Limits
        What was demanded of cuts and devices.
    """

    def __init__(self, costs: Costs, fleet: Fleet, objective: str, limits: Limits) -> None:
        self.costs = costs
        self.fleet = fleet
        self.limits = limits
        self.has_speeds = all(costs.seconds(device) is not None for device in fleet.devices)
        # A map that was given has no objective, and a file can say anything.
        known = (*_LARGER_IS_BETTER, *(TIMED if self.has_speeds else ()))
        self.objective = objective if objective in known else "headroom"

    def shares(self, stages: Sequence[Stage]) -> tuple[Share, ...]:
        """What the devices of a placement have, in execution order."""
        num = len(stages)
        return tuple(self._share(stage, num - number) for number, stage in enumerate(stages))

    def _share(self, stage: Stage, place: int) -> Share:
        device = self.fleet.devices[stage.device]
        start, stop, budget = stage.start, stage.stop, device.budget_bytes
        allocated = self.costs.requested_bytes(start, stop, budget, place=place)
        if allocated is None:
            least = self.costs.requested_bytes(start, stop, _UNLIMITED, place=place)
            assert least is not None, "nothing limits it"
            # What fits in bytes and not for fragmentation misses one byte at least.
            allocated = max(least, budget + 1)
        return Share(
            device=device.name,
            modules=self.modules(start, stop),
            requested_bytes=allocated,
            budget_bytes=budget,
        )

    def modules(self, start: int, stop: int) -> tuple[str, ...]:
        """The modules of a run of blocks."""
        blocks = self.costs.profile.blocks
        return tuple(
            module
            for index in self.costs.blocks_of(start, stop)
            for module in blocks[index].modules
        )

    def allows(self, stages: Sequence[Stage]) -> bool:
        """Whether a placement is what was demanded."""
        num = self.costs.num_blocks
        return all(self.limits.allow(num, s.device)[s.start, s.stop] for s in stages)

    def value(self, stages: Stages) -> float | None:
        """What the objective makes of it; None where it doesn't fit."""
        shares = self.shares(stages)
        free = [share.free_bytes for share in shares]
        if min(free) < 0:
            return None
        if self.objective == "headroom":
            return float(min(free))
        if self.objective == "balance":
            return min(share.free_bytes / share.budget_bytes for share in shares)
        if self.objective == "order":
            return float(sum(s.stop - s.start for s in stages if s.device == 0))
        seconds = self.seconds(stages)
        assert seconds is not None, "what is optimised is known"
        return seconds.total_seconds if self.objective == "latency" else seconds.slowest_seconds

    def seconds(self, stages: Sequence[Stage]) -> Seconds | None:
        """What each stage takes; None where speeds are unknown."""
        devices = self.fleet.devices
        named = [(devices[stage.device].name, stage.start, stage.stop) for stage in stages]
        return self.costs.latency.seconds_of(named, self.fleet)

    def is_better(self, one: float, other: float) -> bool:
        """Whether one value is better than another by more than rounding."""
        gain = one - other if self.objective in _LARGER_IS_BETTER else other - one
        return gain > 1e-9 * max(abs(one), abs(other))
