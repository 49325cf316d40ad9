"""Problem: a search, with its bounds and exact values so far.

The exact bytes of a stage take a replay, so the programme first runs on lower bounds. The stages of
its optimum are settled (their bounds replaced by exact bytes), the tightest first, up to the first
one that is refused; the result holds for all equal stages; and the programme runs again, until an
optimum consists of exact stages only. As bounds never exceed exact bytes, no other placement is
better then.

Example: of two placements the bounds are 10 and 12 GiB on the tightest device. The first one is
settled and turns out to need 13 GiB; the programme now prefers the second, settles it at 12.5 GiB,
and stops: the first one is known to be worse, and every other bound was above 12 already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from duoka.errors import UsageError
from duoka.forecast.costs import Costs
from duoka.hardware.fleet import Fleet

from .device_groups import DeviceGroup, group_devices, link_seconds
from .dynamic_programme import BlockRange, Floats, Programme, Stages, UnsearchableError
from .known_bytes import KnownBytes
from .limits import NO_LIMITS, PlacementLimits

Objective = Literal["headroom", "latency", "throughput", "pages"]
OBJECTIVES: tuple[Objective | Literal["auto"], ...] = ("auto", *get_args(Objective))
Aim = Literal["headroom", "latency", "throughput", "pages", "balance"]
"""What the programme optimises: an objective, or the largest least share of headroom."""

# How often a more even placement among the optimal ones is looked for.
_TIE_ROUNDS = 8
# Part of the latency: placements that differ by less count as equally fast.
_TIE_TOLERANCE = 2.0**-26
# Costs of ties are rounded to whole numbers of this size, whose sums are exact in any order.
_LATENCY_UNITS = 2.0**50
_PRESSURE_UNITS = 2.0**18


class NoPlacement(Exception):
    """Raised if nothing fits. The planner turns it into an `InfeasibleError`."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("no placement fits the fleet")
        self._problems = problems

    def shortfall_bytes(self) -> int:
        """Return the missing bytes; computed on demand, because suggestions fail often."""
        return min(problem.shortfall_bytes() for problem in self._problems)

    def __or__(self, failure: NoPlacement) -> NoPlacement:
        """Combine two failures; the shortfall is the smaller one."""
        return NoPlacement(*self._problems, *failure._problems)


class Problem:
    """A search: its groups of devices, its objective, and the bytes of stages so far.

    `memory` is what is known of the bytes of stages; bounds by default.
    """

    def __init__(
        self,
        costs: Costs,
        fleet: Fleet,
        aim: Aim,
        *,
        use_all: bool = False,
        limits: PlacementLimits = NO_LIMITS,
        memory: KnownBytes | None = None,
    ) -> None:
        num_devices = len(fleet.devices)
        if use_all and num_devices > costs.num_blocks:
            raise UnsearchableError(
                f"{num_devices} devices are required, and the model has only {costs.num_blocks} "
                f"block{'s' if costs.num_blocks > 1 else ''} to place",
                hint="use fewer devices, or omit --use-all",
            )
        max_stages = min(num_devices, costs.num_blocks)
        self.aim: Aim = aim
        min_stages = max_stages if use_all else limits.num_devices or 1
        stop = min(max_stages, limits.num_devices or max_stages) + 1
        self.num_stages = range(min_stages, stop)
        timed = aim in ("latency", "throughput")
        links = link_seconds(costs, fleet) if timed and fleet.links else None
        self._groups = group_devices(costs, fleet, links=links, timed=timed, fixed=limits.devices)
        self._allowed = [limits.allow(costs.num_blocks, g.devices[0]) for g in self._groups]
        self._devices = [group.devices for group in self._groups]
        self._group_of = {device: group for group in self._groups for device in group.devices}
        self._links: Floats | None = None
        # The last optimum that is known to be the most even one as well.
        self._even: Stages = ()
        if links is not None:
            # Any two devices of a group have equal links to a third one, so one stands for all. The
            # link inside a group is that of its first device to its last.
            senders = [group.devices[0] for group in self._groups]
            receivers = [group.devices[-1] for group in self._groups]
            self._links = links[np.ix_(senders, receivers)]
        self._page_bytes = costs.page_bytes
        self.memory = memory or KnownBytes(costs, fleet)
        self.places = range(1, self.memory.num_places + 1)
        self._is_limited = bool(limits) and limits.num_devices is None

    def cheapest(self) -> tuple[Stages, float] | None:
        """Return the optimum among placements on as few devices, and its exact cost.

        For the objective pages it is the optimum on any number of devices. None where nothing fits.
        """
        # Invariant: costs in the tables never exceed the exact ones, so the cost of an optimum is a
        # bound for every placement. Each round settles at least one stage or ends.
        programme = self._programme()
        find_optimum = programme.find_best if self.aim == "pages" else programme.find_on_fewest
        if (optimum := find_optimum()) is None:
            return None
        if self.aim not in ("latency", "pages"):
            # Of equally good placements the most even one is wanted in the end, so its stages are
            # settled first: if it keeps its cost, both searches are done with one set of replays.
            even, _ = self._tie_programme(optimum[1], len(optimum[0])).find_on_fewest() or optimum
            if self.settle(even):
                self._even = even
                return even, optimum[1]
            programme.revise(self._tables())
        while (optimum := find_optimum()) is not None and not self.settle(optimum[0]):
            programme.revise(self._tables())
        return optimum

    def none(self) -> NoPlacement:
        """Return the exception for a search without any result."""
        if self._is_limited:
            self._refuse_impossible()
        return NoPlacement(self)

    def min_devices(self) -> int | None:
        """Return the fewest devices for a placement by current bounds; None if on no number."""
        optimum = self._programme().find_on_fewest()
        return None if optimum is None else len(optimum[0])

    def most_even(self, stages: Stages, bound: float) -> Stages:
        """Return the most even among the placements as good as `stages`."""
        if stages == self._even:
            return stages
        # A second programme, with the pressure on budgets as its cost, runs over the placements at
        # the bound alone: all others cost infinity. Its bounds are settled in the same way, for a
        # few rounds; then the best placement settled so far is taken.
        tolerance = _TIE_TOLERANCE * bound if self.aim == "latency" else 0.0
        candidates = [stages]
        programme = self._tie_programme(bound, len(stages))
        for _ in range(_TIE_ROUNDS):
            even = programme.find_on_fewest()
            assert even is not None, "the optimum itself is a candidate"
            if self.settle(even[0]):
                return even[0]
            candidates.append(even[0])
            programme.revise(self._tie_tables(bound))
        # Another may be more even still, but these are known.
        return min(
            (stages for stages in candidates if self.judge(stages)[0] <= bound + tolerance),
            key=lambda stages: sum(
                self._pressure(self._group_of[stage.device], place)[stage.start, stage.stop]
                for place, stage in with_places(stages)
            ),
        )

    def judge(self, stages: Stages) -> tuple[float, int]:
        """Return the cost of a placement by current bounds, and its binding device."""
        parts = self._parts(stages)
        cost, device = max(parts, key=lambda part: part[0])
        return sum(part for part, _ in parts) if self.aim == "latency" else cost, device

    def _parts(self, stages: Stages) -> list[tuple[float, int]]:
        """Return the cost of each stage and transfer, with its device."""
        parts: list[tuple[float, int]] = []
        previous: BlockRange | None = None
        for place, stage in with_places(stages):
            group = self._group_of[stage.device]
            if previous is not None and self._links is not None:
                sender = self._group_of[previous.device]
                seconds = self._links[sender.index, group.index, stage.start]
                parts.append((float(seconds), previous.device))
            cost = self._costs(group, place)[stage.start, stage.stop]
            parts.append((float(cost), stage.device))
            previous = stage
        return parts

    def shortfall_bytes(self) -> int:
        """Return the missing bytes of the nearest placement, a lower bound.

        That is the total of what the stages' lower bounds exceed their devices' budgets by. A stage
        that is known not to fit in spite of its bound misses at least one byte.
        """
        missing = [
            [self._missing_bytes(group, place) for group in self._groups] for place in self.places
        ]
        programme = Programme(missing, self._devices, slowest=False, num_stages=self.num_stages)
        nearest = programme.find_best()
        assert nearest is not None, "there is always a placement that doesn't fit"
        return int(nearest[1])

    def settle(self, stages: Stages) -> bool:
        """Replace the bounds of a placement by exact bytes; return True if nothing changed."""
        return self.memory.settle(
            [
                (stage.start, stage.stop, self._key(self._group_of[stage.device], place))
                for place, stage in with_places(stages)
            ]
        )

    def group_of(self, device: int) -> DeviceGroup:
        """Return the group of a device, by its index in the fleet."""
        return self._group_of[device]

    def may_be(self, group: DeviceGroup, place: int) -> npt.NDArray[np.bool_]:
        """[num_blocks + 1, num_blocks + 1]: True for possible stages, by current bounds."""
        return self.memory.fits[self._key(group, place)] & self._allowed[group.index]

    def _refuse_impossible(self) -> None:
        """Refuse limits without any placement, whatever the memory."""
        tables = np.where(self._allowed, 0.0, np.inf)[None]
        programme = Programme(tables, self._devices, slowest=False, num_stages=self.num_stages)
        if programme.find_best() is None:
            raise UsageError(
                "the constraints contradict each other: no split of the model into stages, one "
                "on each device, satisfies all",
                hint="remove pins: each device holds one contiguous run of modules in execution "
                "order",
            )

    def _key(self, group: DeviceGroup, place: int) -> tuple[int, int]:
        return self.memory.key(group.budget_bytes, place)

    def _costs(self, group: DeviceGroup, place: int) -> Floats:
        """Return the cost of each stage on a device of the group, by current bounds."""
        fits = self.may_be(group, place)
        if self.aim in ("latency", "throughput"):
            assert group.seconds is not None
            return np.where(fits, group.seconds, np.inf)
        needed, budget = self.memory.bytes[self._key(group, place)], group.budget_bytes
        if self.aim == "pages":
            assert self._page_bytes is not None, "there are pages"
            # The pages that a stage has no memory for, negated: free bytes by bytes of a page.
            over = needed - self.memory.usable_bytes(budget)
            # A stage without layers has room for whatever the others have.
            return np.where(fits, over / np.maximum(self._page_bytes, 1), np.inf)
        return np.where(fits, needed / budget if self.aim == "balance" else needed - budget, np.inf)

    def _tables(self) -> Floats:
        """[places, groups, num_blocks + 1, num_blocks + 1]: the cost of each stage."""
        return np.array([[self._costs(g, place) for g in self._groups] for place in self.places])

    def _missing_bytes(self, group: DeviceGroup, place: int) -> Floats:
        """Return the bytes of each stage beyond the budget; 1 if refused in spite of its bound."""
        key = self._key(group, place)
        over = self.memory.bytes[key] - self.memory.usable_bytes(group.budget_bytes)
        missing = np.maximum(over, np.where(self.memory.fits[key], 0, 1))
        return np.where(self._allowed[group.index], missing, np.inf)

    def _pressure(self, group: DeviceGroup, place: int) -> Floats:
        """Return the pressure of each stage on its budget: larger with less free memory."""
        # A convex function of the headroom, whose sum is least where the headroom is even. Example:
        # 24 GiB budgets, so the unit is 24 MiB. Two devices with 2 and 6 GiB of headroom have
        # 2^18 / (1 + 85.3) + 2^18 / (1 + 256) = 3036 + 1020 = 4056; with 4 GiB each they have
        # 2 x 1527 = 3054.
        unit = max(group.budget_bytes for group in self._groups) / 1024
        needed = self.memory.bytes[self._key(group, place)]
        headroom = np.maximum(group.budget_bytes - needed, 0)
        return np.asarray(np.rint(_PRESSURE_UNITS / (1 + headroom / unit)))

    def _programme(self) -> Programme:
        return Programme(
            self._tables(),
            self._devices,
            transfers=self._links,
            slowest=self.aim != "latency",
            num_stages=self.num_stages,
        )

    def _tie_programme(self, bound: float, num_stages: int) -> Programme:
        """Return the programme for the least pressure at the bound."""
        return Programme(
            self._tie_tables(bound),
            self._devices,
            transfers=None if self._links is None else self._tie_costs(self._links, bound),
            slowest=False,
            num_stages=range(num_stages, num_stages + 1),
        )

    def _tie_tables(self, bound: float) -> Floats:
        pressure = [[self._pressure(g, place) for g in self._groups] for place in self.places]
        return np.asarray(self._tie_costs(self._tables(), bound) + np.array(pressure))

    def _tie_costs(self, costs: Floats, bound: float) -> Floats:
        """Convert costs of parts to costs among placements at the bound."""
        # A maximum is at the bound if every part is: parts above cost infinity, others nothing. A
        # sum is at the bound if the parts add up to it, so the latency stays a part of the cost: in
        # units of which the bound has 2^50. A pressure is at most 2^18, so those of 64 stages are
        # at most 2^24, which is the bound times 2^-26 (`_TIE_TOLERANCE`): pressures decide among
        # latencies that differ by less, and a larger difference outweighs all of them.
        if self.aim == "latency":
            # Whole numbers below 2^53 are added without rounding, in whatever order.
            return np.asarray(np.rint(costs * (_LATENCY_UNITS / (bound or 1.0))))
        return np.where(costs <= bound, 0.0, np.inf)


def with_places(stages: Stages) -> Iterator[tuple[int, BlockRange]]:
    """Yield the stages in order, each with its place from the end, from 1."""
    return zip(range(len(stages), 0, -1), stages, strict=True)
