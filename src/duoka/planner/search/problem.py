"""Problem: one search for a placement, with the lower bounds and exact bytes found so far.

The exact bytes of a stage need a replay, so the programme first runs on lower bounds. Then the
stages of its optimum are *settled*: their bounds are replaced by exact bytes, the tightest stage
first, up to the first stage that doesn't fit. Each result holds for all stages of the same class.
The programme runs again, until all stages of an optimum are exact. Bounds never exceed exact bytes,
so no other placement is better than this optimum.

Example: of two placements the bounds are 10 and 12 GiB on the tightest device. The first one is
settled at 13 GiB; the programme now prefers the second placement, settles it at 12.5 GiB and stops,
if the bounds of all other placements are 12.5 GiB or more.
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
"""The goal of a search: an objective, or "balance" (maximize the least headroom by budget)."""

# Number of rounds to find the most even placement among the optimal ones.
_TIE_ROUNDS = 8
# Relative difference of latencies below which two placements count as equally fast.
_TIE_TOLERANCE = 2.0**-26
# To break ties, latencies and pressures become whole numbers up to these, with exact sums.
_LATENCY_UNITS = 2.0**50
_PRESSURE_UNITS = 2.0**18


class NoPlacement(Exception):
    """Raised if no placement fits. The planner turns it into an `InfeasibleError`."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("no placement fits the fleet")
        self._problems = problems

    def shortfall_bytes(self) -> int:
        """Return a lower bound of the missing bytes, computed on demand: it takes a search."""
        return min(problem.shortfall_bytes() for problem in self._problems)

    def __or__(self, failure: NoPlacement) -> NoPlacement:
        """Combine two failures; the shortfall is the smaller of the two."""
        return NoPlacement(*self._problems, *failure._problems)


class Problem:
    """One search for a placement: its groups of devices, its goal, and the bytes of stages.

    `memory` holds the bounds and exact bytes that earlier searches of the same costs on the same
    fleet have found; by default the search starts from lower bounds.
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
        # An optimum that `cheapest` has also found to be the most even one; empty if not.
        self._settled_even: Stages = ()
        if links is not None:
            # All devices of a group have equal links to any third device, so one of them represents
            # the group. The link within a group is that from its first device to its last.
            senders = [group.devices[0] for group in self._groups]
            receivers = [group.devices[-1] for group in self._groups]
            self._links = links[np.ix_(senders, receivers)]
        self._page_bytes = costs.page_bytes
        self.memory = memory or KnownBytes(costs, fleet)
        self.places = range(1, self.memory.num_places + 1)
        self._is_limited = bool(limits) and limits.num_devices is None

    def cheapest(self) -> tuple[Stages, float] | None:
        """Return the optimum on the fewest possible devices, and its exact cost.

        For the objective pages the optimum is over all numbers of devices. None if nothing fits.
        """
        # Invariant: costs in the tables never exceed exact costs, so the cost of an optimum bounds
        # the cost of every placement. Each round settles at least one stage, or is the last one.
        programme = self._programme()
        find_optimum = programme.find_best if self.aim == "pages" else programme.find_on_fewest
        if (optimum := find_optimum()) is None:
            return None
        if self.aim not in ("latency", "pages"):
            # Of equally good placements `most_even` takes the most even one in the end. So its
            # stages are settled first: if its bounds are exact, no other replays are needed.
            even, _ = self._tie_programme(optimum[1], len(optimum[0])).find_on_fewest() or optimum
            if self.settle(even):
                self._settled_even = even
                return even, optimum[1]
            programme.revise(self._tables())
        while (optimum := find_optimum()) is not None and not self.settle(optimum[0]):
            programme.revise(self._tables())
        return optimum

    def none(self) -> NoPlacement:
        """Return the exception if nothing fits; raise UsageError for contradictory pins."""
        if self._is_limited:
            self._refuse_impossible()
        return NoPlacement(self)

    def min_devices(self) -> int | None:
        """Return the fewest devices on which a placement fits by current bounds; None if none."""
        optimum = self._programme().find_on_fewest()
        return None if optimum is None else len(optimum[0])

    def most_even(self, stages: Stages, bound: float) -> Stages:
        """Return the most even of the placements that cost no more than `bound`, as `stages` do.

        The most even placement has the least total pressure (`_pressure`).
        """
        if stages == self._settled_even:
            return stages
        # A second programme minimizes the pressure among the placements that cost no more than the
        # bound; all others cost infinity. Its stages are settled in the same way, for a few rounds;
        # if none settles, the most even of the candidates so far is returned.
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
        # A placement that wasn't a candidate may be more even.
        return min(
            (stages for stages in candidates if self.judge(stages)[0] <= bound + tolerance),
            key=lambda stages: sum(
                self._pressure(self._group_of[stage.device], place)[stage.start, stage.stop]
                for place, stage in with_places(stages)
            ),
        )

    def judge(self, stages: Stages) -> tuple[float, int]:
        """Return the cost of a placement by current bounds, and the index of its binding device."""
        parts = self._cost_parts(stages)
        cost, device = max(parts, key=lambda part: part[0])
        return sum(part for part, _ in parts) if self.aim == "latency" else cost, device

    def _cost_parts(self, stages: Stages) -> list[tuple[float, int]]:
        """Return the cost of each stage and transfer; a transfer has the device that sends."""
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
        """Return a lower bound of the missing bytes: those of the placement that misses the fewest.

        A placement misses the bytes by which the lower bounds of its stages exceed their budgets,
        in total. A stage whose bound fits, but whose replay doesn't, misses at least one byte.
        """
        missing = [
            [self._missing_bytes(group, place) for group in self._groups] for place in self.places
        ]
        programme = Programme(missing, self._devices, slowest=False, num_stages=self.num_stages)
        nearest = programme.find_best()
        assert nearest is not None, "there is always a placement that doesn't fit"
        return int(nearest[1])

    def settle(self, stages: Stages) -> bool:
        """Replace the bounds of a placement's stages by exact bytes; see `KnownBytes.settle`."""
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
        """Return True for the stages that fit by current bounds and that pins allow.

        The result is [num_blocks + 1, num_blocks + 1], by start and stop.
        """
        return self.memory.fits[self._key(group, place)] & self._allowed[group.index]

    def _refuse_impossible(self) -> None:
        """Raise UsageError if no placement satisfies the pins even with unlimited memory."""
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
            # The cost is minus the number of further pages: free bytes by bytes of a page. A stage
            # without pages has a page of 1 byte here, so that it never limits their number.
            over = needed - self.memory.usable_bytes(budget)
            return np.where(fits, over / np.maximum(self._page_bytes, 1), np.inf)
        return np.where(fits, needed / budget if self.aim == "balance" else needed - budget, np.inf)

    def _tables(self) -> Floats:
        """Return the cost of each stage, [places, groups, num_blocks + 1, num_blocks + 1]."""
        return np.array([[self._costs(g, place) for g in self._groups] for place in self.places])

    def _missing_bytes(self, group: DeviceGroup, place: int) -> Floats:
        """Return the bytes of each stage beyond its budget; at least 1 if its replay doesn't fit.

        Infinite for stages that pins exclude.
        """
        key = self._key(group, place)
        over = self.memory.bytes[key] - self.memory.usable_bytes(group.budget_bytes)
        missing = np.maximum(over, np.where(self.memory.fits[key], 0, 1))
        return np.where(self._allowed[group.index], missing, np.inf)

    def _pressure(self, group: DeviceGroup, place: int) -> Floats:
        """Return the pressure of each stage on its budget, which grows as its headroom shrinks."""
        # A convex function of the headroom, so that its sum is least for even headroom. Example:
        # 24 GiB budgets, so the unit is 24 MiB. Two devices with 2 and 6 GiB of headroom have
        # 2^18 / (1 + 85.3) + 2^18 / (1 + 256) = 3036 + 1020 = 4056; with 4 GiB each they have
        # 2 x 1527 = 3054.
        unit = max(group.budget_bytes for group in self._groups) / 1024
        needed = self.memory.bytes[self._key(group, place)]
        headroom = np.maximum(group.budget_bytes - needed, 0)
        return np.asarray(np.rint(_PRESSURE_UNITS / (1 + headroom / unit)))

    def _programme(self) -> Programme:
        """Return the programme for the current bounds and exact bytes."""
        return Programme(
            self._tables(),
            self._devices,
            transfers=self._links,
            slowest=self.aim != "latency",
            num_stages=self.num_stages,
        )

    def _tie_programme(self, bound: float, num_stages: int) -> Programme:
        """Return the programme for the least pressure among placements within the bound."""
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
        """Convert costs of stages or transfers so as to rule out placements beyond the bound."""
        # A maximum is within the bound if every part is: parts above the bound cost infinity, all
        # others 0. A sum depends on all parts, so latencies stay part of the cost, in units such
        # that the bound is 2^50. A pressure is at most 2^18, so the pressures of 64 stages add up
        # to at most 2^24, the bound times 2^-26 (`_TIE_TOLERANCE`). So pressures decide among
        # latencies that differ by less, and a larger difference outweighs all pressures.
        if self.aim == "latency":
            # Whole numbers below 2^53 are added without rounding, in whatever order.
            return np.asarray(np.rint(costs * (_LATENCY_UNITS / (bound or 1.0))))
        return np.where(costs <= bound, 0.0, np.inf)


def with_places(stages: Stages) -> Iterator[tuple[int, BlockRange]]:
    """Yield the stages in order, each with its place from the end, from 1."""
    return zip(range(len(stages), 0, -1), stages, strict=True)
