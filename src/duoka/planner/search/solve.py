"""Solving: the problems that the planner asks, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from duoka.base.choices import choose
from duoka.errors import UsageError
from duoka.hardware.fleet import Fleet

from ..constraints import STRATEGIES, Strategy
from .dynamic_programme import Stages
from .filling import fill, furthest
from .limits import NO_LIMITS, Limits
from .passes import quickest
from .problem import OBJECTIVES, Aim, Objective, Problem
from .stage_costs import StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement that is optimal for its objective.

    Parameters
    ----------
    stages : tuple of Stage
        In execution order.
    objective : {"headroom", "latency", "throughput", "balance", "order"}
        "auto" is resolved; the last two are those of the strategies balanced and sequential.
    value : float
        The objective's value: bytes of headroom on the fullest device; seconds; the share of the
        budget that is free on the fullest device; or the blocks on the first device.
    bound : float
        What no placement with as few devices can beat: the proof that `value` is optimal.
        Of "order" what no placement in the order of the devices can beat.
    exact_evaluations : int
        How many stages were computed exactly.
    binding_device : int
        The device that limits the value: with the least headroom, the longest time, the least
        share free; or the first one in use.
    """

    stages: Stages
    objective: Aim | Literal["order"]
    value: float
    bound: float
    exact_evaluations: int
    binding_device: int


def search(
    costs: StageCosts,
    fleet: Fleet,
    *,
    objective: Objective | Literal["auto"] = "auto",
    use_all: bool = False,
    strategy: Strategy = "auto",
    limits: Limits = NO_LIMITS,
) -> Solution:
    """Find the optimal contiguous placement.

    By the strategy "auto" fewest devices come first, then the objective. By "balanced" every
    device is used, and the share of its budget that the fullest one has free is the largest; of
    equal devices that is the largest minimum of free memory. By "sequential" the devices are
    filled in the user's order: among the placements in this order the one with the most blocks
    on the first device, of those the one with the most on the second, and so on.

    Placements that the objective can't tell apart
    are ranked by how evenly they leave memory free (this rank is sought in a few rounds, not
    proved), then by the user's order of devices.
    """
    _refuse_contradictions(strategy, objective, use_all)
    if strategy == "sequential":
        return _filled(costs, fleet, limits)
    balanced = strategy == "balanced"
    aim: Aim = "balance" if balanced else _resolve(objective, costs, fleet)
    problem = Problem(costs, fleet, aim, use_all=use_all or balanced, limits=limits)
    found = quickest(problem)
    if found is None:
        raise problem.none()
    stages, bound = found
    stages = problem.most_even(stages, bound)
    value, binding = problem.judge(stages)
    return Solution(
        stages=stages,
        objective=aim,
        value=_told(aim, value),
        bound=_told(aim, bound),
        exact_evaluations=problem.memory.num_evaluations,
        binding_device=binding,
    )


def _told(aim: Aim, cost: float) -> float:
    """The value that people are told for a cost that was made small."""
    return {"headroom": -cost, "balance": 1.0 - cost}.get(aim, cost)


def _filled(costs: StageCosts, fleet: Fleet, limits: Limits) -> Solution:
    problem = Problem(costs, fleet, "headroom", limits=limits)
    stages = fill(problem, costs.num_blocks, len(fleet.devices))
    first = float(stages[0].stop if stages[0].device == 0 else 0)
    return Solution(
        stages=stages,
        objective="order",
        value=first,
        bound=first,
        exact_evaluations=problem.memory.num_evaluations,
        binding_device=stages[0].device,
    )


def _refuse_contradictions(
    strategy: Strategy, objective: Objective | Literal["auto"], use_all: bool
) -> None:
    choose("the strategy", strategy, STRATEGIES)
    if strategy != "auto" and objective != "auto":
        raise UsageError(
            f"the strategy {strategy} says what is optimised, and so does the objective "
            f"{objective!r}",
            hint="give one of the two",
        )
    if strategy == "sequential" and use_all:
        raise UsageError(
            "the strategy sequential fills each GPU before the next, and may leave some empty; "
            "all of them are to be used",
            hint="the strategy balanced uses them all",
        )


def conceivable(
    costs: Sequence[StageCosts],
    fleet: Fleet,
    *,
    use_all: bool = False,
    strategy: Strategy = "auto",
    limits: Limits = NO_LIMITS,
) -> bool:
    """Tell whether lower bounds leave a placement possible, whichever of these costs are so."""
    use_all = use_all or strategy == "balanced"
    one, *others = costs
    problem = Problem(one, fleet, "headroom", use_all=use_all, limits=limits, others=others)
    if strategy == "sequential":
        return furthest(problem, one.num_blocks, len(fleet.devices)) is not None
    return problem.conceivable()


def fewest(costs: Sequence[StageCosts], fleet: Fleet, *, limits: Limits = NO_LIMITS) -> int:
    """How many devices it takes at the least, by lower bounds, whichever of these costs are so."""
    one, *others = costs
    problem = Problem(one, fleet, "headroom", limits=limits, others=others)
    number = problem.fewest()
    if number is None:
        raise problem.none()
    return number


def _resolve(objective: Objective | Literal["auto"], costs: StageCosts, fleet: Fleet) -> Objective:
    choose("the objective", objective, OBJECTIVES)
    if objective == "headroom":
        return objective
    if objective == "auto" and len({device.speeds for device in fleet.devices}) == 1:
        return "headroom"
    unknown = [d.name for d in fleet.devices if costs.seconds(d) is None]
    if objective == "auto":
        return "headroom" if unknown else "latency"
    if unknown:
        raise UsageError(
            f"the objective {objective} needs speeds, and those of {', '.join(unknown)} "
            "are unknown",
            hint="ask for the objective headroom",
        )
    # A piece of work of many passes is quickest at once for itself and for many of them.
    return objective if costs.more_passes is None else "latency"
