"""Solve: the planner's problems, and their solutions."""

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

    Of the objective "auto" is resolved; "balance" and "order" are those of the strategies balanced
    and sequential. `value` is bytes of headroom on the fullest device; seconds; the share of the
    budget that is headroom on the fullest; or the blocks on the first device. `bound` is what no
    placement with as few devices can beat, of "order" none in the order of the devices: the proof
    that `value` is optimal. `binding_device` limits the value: it has the least headroom, the
    longest time, the least share of headroom; or is the first one in use.
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
    """Find the optimal contiguous placement.

    By the strategy "auto" fewest devices come first, then the objective. By "balanced" every
    device is used, and the share of its budget that the fullest one has as headroom is the largest;
    of equal devices that is the largest least headroom. By "sequential" the devices are filled in
    the user's order: among the placements in this order the one with the most blocks
    on the first device, of those the one with the most on the second, and so on.

    Placements that the objective can't tell apart are ranked by how evenly they leave headroom
    (this rank is sought in a few rounds, not proved), then by the user's order of devices.
    `memory` is what other searches of these costs on this fleet have found out.
    """
    _refuse_contradictions(strategy, objective, use_all)
    if strategy == "sequential":
        return _sequential(costs, fleet, limits)
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


def _sequential(costs: Costs, fleet: Fleet, limits: PlacementLimits) -> Solution:
    """Find the placement in the order of devices with the lexicographically largest counts.

    A device may be left out where nothing of what is left fits it. It takes as many blocks as
    leave the rest a place, which may be fewer than it could hold.
    """
    problem = Problem(costs, fleet, "headroom", limits=limits)
    while (stages := _furthest(problem, costs.num_blocks, len(fleet.devices))) is not None:
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
    """Return False if lower bounds rule out a placement, for each of these costs."""
    problem = Problem(
        costs[0],
        fleet,
        "headroom",
        use_all=use_all or strategy == "balanced",
        limits=limits,
        memory=KnownBytes(costs[0], fleet, costs[1:]),
    )
    if strategy == "sequential":
        return _furthest(problem, costs[0].num_blocks, len(fleet.devices)) is not None
    return problem.min_devices() is not None


def min_devices(
    costs: Sequence[Costs], fleet: Fleet, *, limits: PlacementLimits = NO_LIMITS
) -> int:
    """Return the fewest devices by lower bounds, for the best of these costs."""
    memory = KnownBytes(costs[0], fleet, costs[1:])
    problem = Problem(costs[0], fleet, "headroom", limits=limits, memory=memory)
    number = problem.min_devices()
    if number is None:
        raise problem.none()
    return number


def resolve_objective(
    objective: Objective | Literal["auto"], costs: Costs, fleet: Fleet
) -> Objective:
    """Resolve the objective "auto" for a workload and fleet; refuse unsuitable ones.

    Many requests over a paged cache are for pages. Equal or unknown devices are for headroom, and
    others for time: a request's latency, or in a training pipeline the slowest stage.
    """
    choose("the objective", objective, OBJECTIVES)
    # Two cases: there are pages to count and the objective is another one, or there are none and
    # the objective is pages.
    if (costs.page_bytes is None) == (objective == "pages"):
        if objective == "auto":
            return "pages"
        if objective == "pages":
            if costs.workload.is_paged:
                raise UsageError(
                    "the objective pages maximizes the number of pages, which is fixed here",
                    hint="omit the objective",
                )
            raise UsageError(
                "the objective pages needs a paged KV cache",
                hint="add --serve",
            )
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


# Example of `_furthest`: a chain of four blocks; devices 0, 1 and 2 hold at most 2, 1 and 2 blocks.
#
#   reach from        1 stage        2 stages     3 stages
#     device 2 on     block 2, 3     -            -
#     device 1 on     block 2, 3     block 1, 2   -
#     device 0 on     block 2, 3     block 0-2    block 0, 1
#
#   device   stages left   stops by number of stages left            takes      stages after it
#     0        2 or 3      2: block 2; 3: blocks 1 and 2             [0, 2)     1 or 2
#     1        1 or 2      1: none; 2: block 3                       [2, 3)     1
#     2        1           1: block 4                                [3, 4)     0
#
# The number of stages left is part of the state because a stage's memory in training depends on its
# place from the end (micro-batches in flight under 1F1B).
def _furthest(problem: Problem, num_blocks: int, num_devices: int) -> Stages | None:
    """Return the best placement by current bounds; its stages may turn out not to fit."""
    # Two passes. Backward: for each device and block, the numbers of stages in which the rest of
    # the chain fits the devices from there on. Forward: each device takes as many blocks as leave
    # the rest a place, for any number of stages that is still possible.
    groups = [problem.group_of(device) for device in range(num_devices)]
    # reach[device][number of stages, block] is True if the blocks from `block` to the end fit this
    # device and those after it, in so many stages.
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
    lefts = {place for place in range(num_devices + 1) if reach[0][place, 0]}
    if not lefts:
        return None
    for device, group in enumerate(groups):
        reach_after = reach[device + 1]
        stops = {
            num_left: np.flatnonzero(
                problem.may_be(group, num_left)[start] & reach_after[num_left - 1]
            )
            for num_left in lefts - {0}
        }
        stop = max(
            (int(possible[-1]) for possible in stops.values() if len(possible)), default=start
        )
        if stop > start:
            stages.append(BlockRange(start=start, stop=stop, device=device))
            lefts = {num_left - 1 for num_left, possible in stops.items() if stop in possible}
            start = stop
        else:
            lefts = {num_left for num_left in lefts if reach_after[num_left, start]}
    return tuple(stages)
