"""Trial: placements other than a plan's, evaluated with the costs that the planner optimizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duoka.forecast.costs import Costs
from duoka.forecast.latency import Seconds
from duoka.hardware.fleet import Fleet

from ..room import room_bytes
from ..search import BlockRange, PlacementLimits
from .data import Share

# A budget beyond any device, to replay a stage without a limit.
_UNLIMITED = 1 << 62
_MAXIMIZED = ("headroom", "balance", "order")
_TIMED = ("latency", "throughput")

Stages = tuple[BlockRange, ...]


@dataclass
class Trial:
    """Evaluates placements for an explanation, with the costs that the planner optimizes.

    A placement is a sequence of stages, each on a device of its own. Its value is that of the
    plan's objective, or of "headroom" if the plan has another one than the planner's (a device map)
    or the speeds of the fleet are unknown. With `leaves_room` a placement fits only if every device
    keeps the recommended free memory (`room_bytes`); `eligible` are the costs with this condition.
    """

    costs: Costs
    fleet: Fleet
    objective: str
    limits: PlacementLimits
    leaves_room: bool

    def __post_init__(self) -> None:
        self.eligible = self.costs.leaving(room_bytes) if self.leaves_room else self.costs
        speeds = map(self.costs.seconds, self.fleet.devices)
        has_speeds = all(seconds is not None for seconds in speeds)
        # A plan of a device map has the objective "given", and a plan file may contain any text.
        objectives = (*_MAXIMIZED, *(_TIMED if has_speeds else ()))
        if self.objective not in objectives:
            self.objective = "headroom"

    def shares(self, stages: Sequence[BlockRange]) -> tuple[Share, ...]:
        """Return the share of each device in a placement, in execution order."""
        num = len(stages)
        return tuple(self._share(stage, num - number) for number, stage in enumerate(stages))

    def _share(self, stage: BlockRange, place: int) -> Share:
        """Return the share of a stage at a place from the end, even if it exceeds its budget."""
        # A stage beyond its budget is replayed again without a limit, which gives its bytes. If its
        # bytes fit the budget, the stage was refused for fragmentation, and is recorded as one byte
        # more than the budget (`Share.is_fragmented`).
        device = self.fleet.devices[stage.device]
        start, stop, budget = stage.start, stage.stop, device.budget_bytes
        requested = self.costs.requested_bytes(start, stop, budget, place=place)
        roomy = self.eligible.requested_bytes(start, stop, budget, place=place)
        is_tight = requested is not None and roomy is None
        if requested is None:
            unlimited = self.costs.requested_bytes(start, stop, _UNLIMITED, place=place)
            assert unlimited is not None, "there is no limit"
            requested = max(unlimited, budget + 1)
        return Share(
            device=device.name,
            modules=self.modules(start, stop),
            requested_bytes=requested,
            budget_bytes=budget,
            is_tight=is_tight,
        )

    def modules(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the modules of the stage [start, stop), in execution order."""
        blocks = self.costs.profile.blocks
        return tuple(
            module
            for index in self.costs.blocks_of(start, stop)
            for module in blocks[index].modules
        )

    def allows(self, stages: Sequence[BlockRange]) -> bool:
        """Return True if a placement satisfies the pins of the plan's request."""
        num = self.costs.num_blocks
        return all(self.limits.allow(num, s.device)[s.start, s.stop] for s in stages)

    def value(self, stages: Stages) -> float | None:
        """Return the value of a placement; None if a share doesn't fit or is tight."""
        shares = self.shares(stages)
        headrooms = [share.headroom_bytes for share in shares]
        if not all(share.holds for share in shares):
            return None
        if self.objective == "headroom":
            return float(min(headrooms))
        if self.objective == "balance":
            return min(share.headroom_bytes / share.budget_bytes for share in shares)
        if self.objective == "order":
            return float(sum(s.stop - s.start for s in stages if s.device == 0))
        seconds = self.seconds(stages)
        assert seconds is not None, "what is optimised is known"
        return seconds.total_seconds if self.objective == "latency" else seconds.slowest_seconds

    def seconds(self, stages: Sequence[BlockRange]) -> Seconds | None:
        """Return the seconds of a placement; None if a speed of a device is unknown."""
        devices = self.fleet.devices
        runs = [(devices[stage.device].name, stage.start, stage.stop) for stage in stages]
        return self.costs.latency.seconds_of(runs, self.fleet)

    def is_better(self, value: float, other_value: float) -> bool:
        """Return True if `value` is better than `other_value` by more than rounding errors."""
        gain = value - other_value if self.objective in _MAXIMIZED else other_value - value
        return gain > 1e-9 * max(abs(value), abs(other_value))
