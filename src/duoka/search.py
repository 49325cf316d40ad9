"""Search: the best cut of a model's blocks into stages, and the best device for each stage.

Blocks run in order, so a placement is a cut of that order into stages and an assignment of
stages to devices. The optimum over all of them, all subsets and all orders of devices is found
by a dynamic programme over (block, devices used so far, first device of the rest). Identical
devices are counted, not told apart.

Exact memory is dear to compute, so the programme runs on lower bounds. The optimum's entries are
made exact, and it runs again until its optimum consists of exact entries alone. A bound never
exceeds the exact value, so nothing else can be better. No rule that a longer stage needs more
memory than a part of it is assumed.

It knows nothing of models, workloads or how costs come about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .fleet import Device, Fleet
from .programme import Floats, Programme, Stage, Stages

__all__ = [
    "NoPlacement",
    "Objective",
    "Shortfall",
    "Solution",
    "Stage",
    "StageCosts",
    "fits",
    "largest",
    "search",
]

Objective = Literal["headroom", "latency", "throughput"]

_WALKS = 16
# How often a more even placement among the optimal ones is looked for.
_TIE_ROUNDS = 8
# Part of the latency: placements that differ by less count as equally fast.
_TIE_TOLERANCE = 2.0**-26
# Costs of ties are rounded to whole numbers of this size, whose sums are exact in any order.
_LATENCY_UNITS = 2.0**50
_PRESSURE_UNITS = 2.0**18


class StageCosts(Protocol):
    """What the search asks about stages, which are half-open runs of blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks in execution order."""

    @property
    def lower_bound_bytes(self) -> npt.NDArray[np.int64]:
        """[num_blocks + 1, num_blocks + 1], by start and stop: at most what is reserved."""

    @property
    def boundary_bytes(self) -> npt.NDArray[np.int64]:
        """[num_blocks + 1]: bytes that one decode step sends over the cut before each block."""

    def reserved_bytes(self, start: int, stop: int, budget_bytes: int) -> int | None:
        """Exact peak of reserved bytes on a device of that budget; None when it doesn't fit."""

    def seconds(self, device: Device) -> Floats | None:
        """[num_blocks + 1, num_blocks + 1]: seconds of one decode token; None when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement that is optimal for its objective.

    Parameters
    ----------
    stages : tuple of Stage
        In execution order.
    objective : {"headroom", "latency", "throughput"}
        "auto" is resolved.
    value : float
        The objective's value: bytes of headroom on the fullest device, or seconds.
    bound : float
        What no placement with as few devices can beat: the proof that `value` is optimal.
    exact_evaluations : int
        How many stages were computed exactly.
    binding_device : int
        The device that limits the value: with the least headroom, or the longest time.
    """

    stages: Stages
    objective: Objective
    value: float
    bound: float
    exact_evaluations: int
    binding_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """How far the nearest placement is from fitting.

    Parameters
    ----------
    shortfall_bytes : int
        The least total, over all placements, of what the stages' lower bounds exceed their
        devices' budgets by; a stage that is known not to fit in spite of its bound misses at
        least one byte. No placement can miss less.
    stages : tuple of Stage
        A placement that attains it.
    blocks : tuple of int
        The blocks that fit no device, each on its own.
    """

    shortfall_bytes: int
    stages: Stages
    blocks: tuple[int, ...]


class NoPlacement(Exception):
    """Nothing fits. The planner turns it into an `InfeasibleError` with the ways out."""

    def __init__(self, problem: _Problem) -> None:
        super().__init__("no placement fits the fleet")
        self._problem = problem

    def shortfall(self) -> Shortfall:
        """Say by how much; computed on demand, because a search for ways out fails often."""
        return self._problem.shortfall()


def search(
    costs: StageCosts,
    fleet: Fleet,
    *,
    objective: Objective | Literal["auto"] = "auto",
    use_all: bool = False,
) -> Solution:
    """Find the optimal contiguous placement.

    Fewest devices come first, then the objective. Placements that the objective can't tell apart
    are ranked by how evenly they leave memory free (this rank is sought in a few rounds, not
    proved), then by the user's order of devices.

    Parameters
    ----------
    costs : StageCosts
        What stages cost.
    fleet : Fleet
        Where they may run. A pair of devices without a link is taken to be as slow as the slowest
        link given; without any link, transfers are free.
    objective : {"auto", "headroom", "latency", "throughput"}
        The largest minimum of free memory; the smallest sum of stage and transfer times of one
        token; or the fastest slowest stage or transfer. "auto" is headroom when the speeds are
        equal or unknown, and latency otherwise.
    use_all : bool
        Use every device, instead of as few as possible.

    Raises
    ------
    NoPlacement
        If nothing fits.
    UsageError
        If there are more devices to use than blocks, the objective is unknown or needs speeds
        that are unknown, or the devices are too many and too different.
    """
    problem = _Problem(costs, fleet, _resolve(objective, costs, fleet), use_all)
    stages, bound = problem.optimum()
    stages = problem.most_even(stages, bound)
    value, binding = problem.judge(stages)
    headroom = problem.objective == "headroom"
    return Solution(
        stages=stages,
        objective=problem.objective,
        value=-value if headroom else value,
        bound=-bound if headroom else bound,
        exact_evaluations=problem.memory.num_evaluations,
        binding_device=binding,
    )


def fits(costs: StageCosts, fleet: Fleet, *, use_all: bool = False) -> bool:
    """Tell whether any placement fits; cheaper than `search`, because nothing is proved optimal.

    Raises
    ------
    UsageError
        As `search` does.
    """
    return _Problem(costs, fleet, "headroom", use_all).fits()


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, where any smaller one fits as well.

    Examples
    --------
    >>> largest(lambda number: number * number <= 50, 1, 100)
    7
    >>> largest(lambda number: False, 1, 100) is None
    True
    """
    if low > high or not fits(low):
        return None
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resolve(objective: Objective | Literal["auto"], costs: StageCosts, fleet: Fleet) -> Objective:
    if objective not in (*get_args(Objective), "auto"):
        raise UsageError(
            f"the objective {objective!r} is unknown",
            hint=f"known are auto, {', '.join(get_args(Objective))}",
        )
    speeds = {_speeds(device) for device in fleet.devices}
    unknown = [d.name for d in fleet.devices if costs.seconds(d) is None]
    if objective == "auto":
        return "headroom" if unknown or len(speeds) == 1 else "latency"
    if objective != "headroom" and unknown:
        raise UsageError(
            f"the objective {objective} needs speeds, and those of {', '.join(unknown)} "
            "are unknown",
            hint="ask for the objective headroom",
        )
    return objective


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Devices that nothing but their names tells apart, by index, in the user's order."""

    index: int
    devices: tuple[int, ...]
    budget_bytes: int
    seconds: Floats | None


class _Memory:
    """What is known of stages' reserved bytes, by budget: bounds, made exact one by one."""

    def __init__(self, costs: StageCosts, budgets: Sequence[int]) -> None:
        shape = (costs.num_blocks + 1, costs.num_blocks + 1)
        stages = np.triu(np.ones(shape, dtype=bool), 1)
        bound = np.where(stages, costs.lower_bound_bytes, np.inf)
        self._costs = costs
        self.num_evaluations = 0
        self.bytes = {budget: bound.copy() for budget in budgets}
        self.fits = {budget: bound <= budget for budget in budgets}
        self._exact = {budget: np.zeros(shape, dtype=bool) for budget in budgets}

    def settle(self, stages: Sequence[tuple[int, int, int]]) -> bool:
        """Make (start, stop, budget) exact, the tightest first, up to one that doesn't fit.

        Returns whether all were what they were thought to be.
        """
        as_thought = True
        for start, stop, budget in sorted(
            stages, key=lambda stage: stage[2] - self.bytes[stage[2]][stage[:2]]
        ):
            if self._exact[budget][start, stop]:
                continue
            self._exact[budget][start, stop] = True
            self.num_evaluations += 1
            reserved = self._costs.reserved_bytes(start, stop, budget)
            if reserved is None or reserved > budget:
                self.fits[budget][start, stop] = False
                return False
            assert reserved >= self.bytes[budget][start, stop], "the lower bound is none"
            as_thought &= bool(reserved == self.bytes[budget][start, stop])
            self.bytes[budget][start, stop] = reserved
        return as_thought


class _Problem:
    """One search: its groups of devices, its objective, and what is known of memory so far."""

    def __init__(
        self, costs: StageCosts, fleet: Fleet, objective: Objective, use_all: bool
    ) -> None:
        num_devices = len(fleet.devices)
        if use_all and num_devices > costs.num_blocks:
            raise UsageError(
                f"{num_devices} devices are to be used, and the model has only "
                f"{costs.num_blocks} blocks to place",
                hint="name fewer devices, or let duoka use as few as it needs",
            )
        most = min(num_devices, costs.num_blocks)
        self.objective: Objective = objective
        self._num_stages = range(most if use_all else 1, most + 1)
        timed = objective != "headroom"
        links = _link_seconds(costs, fleet) if timed and fleet.links else None
        self._groups = _group(costs, fleet, links=links, timed=timed)
        self._group_of = {device: group for group in self._groups for device in group.devices}
        self._links: Floats | None = None
        if links is not None:
            senders = [group.devices[0] for group in self._groups]
            receivers = [group.devices[-1] for group in self._groups]
            self._links = links[np.ix_(senders, receivers)]
        self.memory = _Memory(costs, [group.budget_bytes for group in self._groups])

    def optimum(self) -> tuple[Stages, float]:
        """A placement with exact costs that nothing with as few devices beats, and its cost."""
        best: tuple[float, Stages] = (math.inf, ())
        while (found := (programme := self._programme()).fewest()) is not None:
            stages, bound = found
            if self._settle(stages):
                return found
            # The programme is dear: once it has run, most that it would find next is found by
            # walking again over the costs that are known by then.
            for _ in range(_WALKS):
                self._revise(programme, stages)
                if (again := programme.walk()) is None:
                    break
                stages = again[0]
                if self._settle(stages):
                    best = min(best, (self.judge(stages)[0], stages), key=lambda pair: pair[0])
                    break
            if best[0] <= bound:
                return best[1], bound
        raise NoPlacement(self)

    def fits(self) -> bool:
        """Whether any placement fits. Tried are those of most headroom under the bounds."""
        while (found := self._programme().best()) is not None:
            self._settle(found[0])
            if math.isfinite(self.judge(found[0])[0]):
                return True
        return False

    def most_even(self, stages: Stages, bound: float) -> Stages:
        """Of the placements as good as `stages`, one that leaves memory free evenly."""
        tolerance = _TIE_TOLERANCE * bound if self.objective == "latency" else 0.0
        candidates = [stages]
        for _ in range(_TIE_ROUNDS):
            found = self._tie_programme(bound, len(stages)).fewest()
            assert found is not None, "the optimum itself is a candidate"
            if self._settle(found[0]):
                return found[0]
            candidates.append(found[0])
        # Another may be more even still, but these are known.
        return min(
            (each for each in candidates if self.judge(each)[0] <= bound + tolerance),
            key=lambda each: sum(
                self._pressure(self._group_of[stage.device])[stage.start, stage.stop]
                for stage in each
            ),
        )

    def judge(self, stages: Stages) -> tuple[float, int]:
        """The cost of a placement as far as known, and the device with its dearest part."""
        parts: list[tuple[float, int]] = []
        before: Stage | None = None
        for stage in stages:
            group = self._group_of[stage.device]
            if before is not None and self._links is not None:
                sender = self._group_of[before.device]
                seconds = self._links[sender.index, group.index, stage.start]
                parts.append((float(seconds), before.device))
            parts.append((float(self._costs(group)[stage.start, stage.stop]), stage.device))
            before = stage
        cost, device = max(parts, key=lambda part: part[0])
        return (sum(part for part, _ in parts) if self.objective == "latency" else cost), device

    def shortfall(self) -> Shortfall:
        """How far the nearest placement is from fitting."""
        missing = [
            np.maximum(self.memory.bytes[budget] - budget, np.where(self.memory.fits[budget], 0, 1))
            for budget in (group.budget_bytes for group in self._groups)
        ]
        found = self._run(missing, slowest=False, num_stages=self._num_stages).best()
        assert found is not None, "there is always a placement that doesn't fit"
        fits = np.any([np.diagonal(fits, 1) for fits in self.memory.fits.values()], axis=0)
        return Shortfall(
            shortfall_bytes=int(found[1]),
            stages=found[0],
            blocks=tuple(int(block) for block in np.flatnonzero(~fits)),
        )

    def _settle(self, stages: Stages) -> bool:
        return self.memory.settle(
            [(s.start, s.stop, self._group_of[s.device].budget_bytes) for s in stages]
        )

    def _costs(self, group: _Group) -> Floats:
        """What the objective makes of each stage on a device of the group, as far as known."""
        fits, budget = self.memory.fits[group.budget_bytes], group.budget_bytes
        if self.objective == "headroom":
            return np.where(fits, self.memory.bytes[budget] - budget, np.inf)
        assert group.seconds is not None
        return np.where(fits, group.seconds, np.inf)

    def _revise(self, programme: Programme, stages: Stages) -> None:
        """Tell the programme what the stages turned out to cost."""
        for stage in stages:
            budget = self._group_of[stage.device].budget_bytes
            for group in self._groups:
                if group.budget_bytes == budget:
                    cost = self._costs(group)[stage.start, stage.stop]
                    programme.revise(group.index, stage.start, stage.stop, float(cost))

    def _pressure(self, group: _Group) -> Floats:
        """How hard each stage presses on its budget: the more the less it leaves free."""
        unit = max(each.budget_bytes for each in self._groups) / 1024
        headroom = np.maximum(group.budget_bytes - self.memory.bytes[group.budget_bytes], 0)
        return np.asarray(np.rint(_PRESSURE_UNITS / (1 + headroom / unit)))

    def _programme(self) -> Programme:
        tables = [self._costs(group) for group in self._groups]
        return self._run(
            tables,
            transfers=self._links,
            slowest=self.objective != "latency",
            num_stages=self._num_stages,
        )

    def _tie_programme(self, bound: float, num_stages: int) -> Programme:
        """The pressure as the cost, among the placements that attain the bound."""
        links, tables = self._links, [self._costs(group) for group in self._groups]
        if self.objective == "latency":
            # Small enough that all pressures together stay within the tolerance.
            scale = _LATENCY_UNITS / (bound or 1.0)
            tables = [np.rint(table * scale) for table in tables]
            links = None if links is None else np.rint(links * scale)
        else:
            tables = [np.where(table <= bound, 0.0, np.inf) for table in tables]
            links = None if links is None else np.where(links <= bound, 0.0, np.inf)
        return self._run(
            [
                table + self._pressure(group)
                for table, group in zip(tables, self._groups, strict=True)
            ],
            transfers=links,
            slowest=False,
            num_stages=range(num_stages, num_stages + 1),
        )

    def _run(
        self,
        tables: Sequence[Floats],
        *,
        transfers: Floats | None = None,
        slowest: bool,
        num_stages: range,
    ) -> Programme:
        return Programme(
            tables,
            [group.devices for group in self._groups],
            transfers=transfers,
            slowest=slowest,
            num_stages=num_stages,
        )


def _link_seconds(costs: StageCosts, fleet: Fleet) -> Floats:
    """[devices, devices, num_blocks + 1]: seconds of the transfer at the cut before each block."""
    seconds = {
        (link.source, link.target): link.latency_seconds
        + costs.boundary_bytes / link.bytes_per_second
        for link in fleet.links
    }
    slowest = np.max(list(seconds.values()), axis=0)
    return np.array(
        [
            [seconds.get((source, target), slowest) for target in fleet.names]
            for source in fleet.names
        ]
    )


def _group(
    costs: StageCosts, fleet: Fleet, *, links: Floats | None, timed: bool
) -> tuple[_Group, ...]:
    """Put devices together that can be exchanged without changing any cost.

    The seconds of a stage are taken to depend on the device's speeds alone.
    """
    members: list[list[int]] = []
    for index, device in enumerate(fleet.devices):
        for group in members:
            other = fleet.devices[group[0]]
            if (
                device.budget_bytes == other.budget_bytes
                and (not timed or _speeds(device) == _speeds(other))
                and (links is None or _exchangeable(links, group[0], index))
            ):
                group.append(index)
                break
        else:
            members.append([index])
    return tuple(
        _Group(
            index=index,
            devices=tuple(group),
            budget_bytes=fleet.devices[group[0]].budget_bytes,
            seconds=costs.seconds(fleet.devices[group[0]]) if timed else None,
        )
        for index, group in enumerate(members)
    )


def _speeds(device: Device) -> tuple[float | None, float | None]:
    return device.memory_bytes_per_second, device.flops_per_second


def _exchangeable(links: Floats, one: int, other: int) -> bool:
    """Whether exchanging two devices leaves every link as fast as it was."""
    order = np.arange(len(links))
    order[[one, other]] = other, one
    return np.array_equal(links[np.ix_(order, order)], links)
