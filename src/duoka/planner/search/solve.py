"""Solve: the entry points of the search, and the solution that they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast.costs import Costs
from duoka.hardware.fleet import Fleet

from ..constraints import STRATEGIES, Strategy
from .dynamic_programme import BlockRange, Stages
from .known_bytes import KnownBytes
from .limits import NO_LIMITS, PlacementLimits
from .problem import OBJECTIVES, Aim, Objective, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An optimal placement for an objective.

    `objective` is never "auto"; "balance" and "order" belong to the strategies balanced and
    sequential. `value` depends on it:

    - "headroom": the least headroom of a device, in bytes
    - "latency", "throughput": seconds
    - "pages": the pages that fit beyond those counted in the costs
    - "balance": the least headroom of a device, as a share of its budget
    - "order": the number of blocks on the first device

    `bound` is the best value of any placement on the same number of devices (for "order", in the
    devices' order), which proves that `value` is optimal. `binding_device` is the index of the
    device that limits the value; for "order", of the first device in use.
    """

    stages: Stages
    objective: Aim | Literal["order"]
    value: float
    bound: float
    binding_device: int


def search(
    costs: Costs,
    fleet: Fleet,
    *,
    objective: Objective | Literal["auto"] = "auto",
    use_all: bool = False,
    strategy: Strategy = "auto",
    limits: PlacementLimits = NO_LIMITS,
    memory: KnownBytes | None = None,
) -> Solution:
    """Find the optimal contiguous placement; raise NoPlacement if nothing fits.

    The strategy "auto" uses the fewest devices, and among the placements on them the best one for
    the objective. "balanced" uses every device and maximizes the least headroom, as a share of the
    device's budget. "sequential" fills the devices in the user's order: it maximizes the number of
    blocks on the first device, then on the second, and so on.

    Among equally good placements, the search prefers even headroom (sought in a few rounds, without
    a proof), then the user's order of devices. `memory` holds the bounds and exact bytes found by
    earlier searches of these costs on this fleet.
    """
    _refuse_contradictions(strategy, objective, use_all)
    if strategy == "sequential":
        return _search_sequential(costs, fleet, limits)
    balanced = strategy == "balanced"
    aim: Aim = "balance" if balanced else resolve_objective(objective, costs, fleet)
    problem = Problem(costs, fleet, aim, use_all=use_all or balanced, limits=limits, memory=memory)
    optimum = problem.cheapest()
    if optimum is None:
        raise problem.none()
    stages, bound = optimum
    stages = problem.most_even(stages, bound)
    value, binding = problem.judge(stages)
    return Solution(
        stages=stages,
        objective=aim,
        value=_value_of(aim, value),
        bound=_value_of(aim, bound),
        binding_device=binding,
    )


def _value_of(aim: Aim, cost: float) -> float:
    """Convert the minimized cost to the objective's value."""
    return {"headroom": -cost, "pages": -cost, "balance": 1.0 - cost}.get(aim, cost)


def _search_sequential(costs: Costs, fleet: Fleet, limits: PlacementLimits) -> Solution:
    """Find the placement in the order of devices with the lexicographically largest block counts.

    A device takes as many blocks as possible so that the remaining blocks fit the devices after it;
    this may be fewer blocks than it can hold. A device that can't take a block is skipped.
    """
    problem = Problem(costs, fleet, "headroom", limits=limits)
    while (stages := _fill_in_order(problem, costs.num_blocks, len(fleet.devices))) is not None:
        if problem.settle(stages):
            num_first = float(stages[0].stop if stages[0].device == 0 else 0)
            return Solution(
                stages=stages,
                objective="order",
                value=num_first,
                bound=num_first,
                binding_device=stages[0].device,
            )
    raise problem.none()


def _refuse_contradictions(
    strategy: Strategy, objective: Objective | Literal["auto"], use_all: bool
) -> None:
    """Refuse a strategy together with an objective, and "sequential" with `use_all`."""
    choose("the strategy", strategy, STRATEGIES)
    if strategy != "auto" and objective != "auto":
        raise UsageError(
            f"the strategy {strategy} conflicts with the objective {objective!r}",
            hint="give only one of them",
        )
    if strategy == "sequential" and use_all:
        raise UsageError(
            "the strategy sequential may leave GPUs unused, and --use-all requires all",
            hint="use the strategy balanced, which uses all",
        )


def is_conceivable(
    costs: Sequence[Costs],
    fleet: Fleet,
    *,
    use_all: bool = False,
    strategy: Strategy = "auto",
    limits: PlacementLimits = NO_LIMITS,
) -> bool:
    """Return False if lower bounds rule out every placement under each of these costs."""
    problem = Problem(
        costs[0],
        fleet,
        "headroom",
        use_all=use_all or strategy == "balanced",
        limits=limits,
        memory=KnownBytes(costs[0], fleet, costs[1:]),
    )
    if strategy == "sequential":
        return _fill_in_order(problem, costs[0].num_blocks, len(fleet.devices)) is not None
    return problem.min_devices() is not None


def min_devices(
    costs: Sequence[Costs], fleet: Fleet, *, limits: PlacementLimits = NO_LIMITS
) -> int:
    """Return a lower bound of the devices needed, over all of these costs.

    Raises NoPlacement if the lower bounds rule out any number of devices.
    """
    memory = KnownBytes(costs[0], fleet, costs[1:])
    problem = Problem(costs[0], fleet, "headroom", limits=limits, memory=memory)
    number = problem.min_devices()
    if number is None:
        raise problem.none()
    return number


def resolve_objective(
    objective: Objective | Literal["auto"], costs: Costs, fleet: Fleet
) -> Objective:
    """Resolve the objective "auto" for a workload and a fleet; refuse unsuitable objectives.

    "auto" becomes "pages" if the number of pages of a paged cache is to be found, "headroom" if all
    devices have equal speeds or a speed is unknown, and otherwise an objective of time: in training
    the one that the schedule implies, else "latency".
    """
    choose("the objective", objective, OBJECTIVES)
    # True in two cases: the number of pages is to be found and the objective isn't pages, or there
    # is no number to find and the objective is pages.
    if (costs.page_bytes is None) == (objective == "pages"):
        if objective == "auto":
            return "pages"
        if objective == "pages":
            if costs.workload.is_paged:
                raise UsageError(
                    "the objective pages maximizes the number of pages, which is fixed here",
                    hint="omit the objective",
                )
            raise UsageError("the objective pages needs a paged KV cache", hint="add --serve")
    if objective in ("headroom", "pages"):
        return objective
    if objective == "auto" and len({device.speeds for device in fleet.devices}) == 1:
        return "headroom"
    unknown = [d.name for d in fleet.devices if costs.seconds(d) is None]
    if objective == "auto" and unknown:
        return "headroom"
    if unknown:
        raise UsageError(
            f"the objective {objective} needs the speeds of all GPUs; unknown: "
            f"{', '.join(unknown)}",
            hint="use the objective headroom",
        )
    return costs.time_objective or ("latency" if objective == "auto" else objective)


# Example of `_fill_in_order`: four blocks; devices 0, 1 and 2 hold at most 2, 1 and 2 blocks.
#
#   reach from        1 stage        2 stages     3 stages
#     device 2 on     block 2, 3     -            -
#     device 1 on     block 2, 3     block 1, 2   -
#     device 0 on     block 2, 3     block 0-2    block 0, 1
#
#   device   stages left   possible stops by stages left             takes      stages after it
#     0        2 or 3      2: block 2; 3: blocks 1 and 2             [0, 2)     1 or 2
#     1        1 or 2      1: none; 2: block 3                       [2, 3)     1
#     2        1           1: block 4                                [3, 4)     0
#
# The number of stages left is part of the state because a stage's memory in training depends on its
# place from the end (micro-batches in flight under 1F1B).
def _fill_in_order(problem: Problem, num_blocks: int, num_devices: int) -> Stages | None:
    """Return the sequential placement by current bounds; None if no placement fits the bounds.

    Exact bytes may still rule out its stages.
    """
    # Two passes. Backward: for each device and block, find the numbers of stages in which the rest
    # of the chain fits this device and the devices after it. Forward: each device takes as many
    # blocks as possible so that the rest fits, in any number of stages that is still possible.
    groups = [problem.group_of(device) for device in range(num_devices)]
    # reach[device][number of stages, block] is True if the blocks from `block` to the end fit this
    # device and the devices after it, in this number of stages.
    reach = [np.zeros((num_devices + 1, num_blocks + 1), np.bool_)]
    reach[0][0, -1] = True
    for group in reversed(groups):
        reach_before = reach[-1].copy()
        for place in range(1, num_devices + 1):
            fits = problem.may_be(group, place) & reach[-1][place - 1]
            reach_before[place] |= np.any(fits, axis=1)
        reach.append(reach_before)
    reach.reverse()
    stages, start = [], 0
    counts = {place for place in range(num_devices + 1) if reach[0][place, 0]}
    if not counts:
        return None
    for device, group in enumerate(groups):
        reach_after = reach[device + 1]
        stops = {
            num_left: np.flatnonzero(
                problem.may_be(group, num_left)[start] & reach_after[num_left - 1]
            )
            for num_left in counts - {0}
        }
        stop = max(
            (int(possible[-1]) for possible in stops.values() if len(possible)), default=start
        )
        if stop > start:
            stages.append(BlockRange(start=start, stop=stop, device=device))
            counts = {num_left - 1 for num_left, possible in stops.items() if stop in possible}
            start = stop
        else:
            counts = {num_left for num_left in counts if reach_after[num_left, start]}
    return tuple(stages)
