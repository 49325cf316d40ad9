"""Solving: the questions that the planner asks, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from duoka.errors import UsageError
from duoka.fleet import Fleet

from .costs import StageCosts
from .groups import speeds
from .problem import Objective, Problem
from .programme import Stages


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
    problem = Problem(costs, fleet, _resolve(objective, costs, fleet), use_all)
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


def judge(costs: StageCosts, fleet: Fleet, stages: Stages, objective: Objective) -> float:
    """What an objective makes of a placement that fits: bytes of headroom, or seconds.

    Parameters
    ----------
    costs : StageCosts
    fleet : Fleet
    stages : tuple of Stage
        Contiguous, each on a device of its own.
    objective : {"headroom", "latency", "throughput"}
    """
    problem = Problem(costs, fleet, objective, False)
    problem.settle(stages)
    value, _ = problem.judge(stages)
    return -value if objective == "headroom" else value


def fits(costs: StageCosts, fleet: Fleet, *, use_all: bool = False) -> bool:
    """Tell whether any placement fits; cheaper than `search`, because nothing is proved optimal.

    Raises
    ------
    UsageError
        As `search` does.
    """
    return Problem(costs, fleet, "headroom", use_all).fits()


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
    known = {speeds(device) for device in fleet.devices}
    unknown = [d.name for d in fleet.devices if costs.seconds(d) is None]
    if objective == "auto":
        return "headroom" if unknown or len(known) == 1 else "latency"
    if objective != "headroom" and unknown:
        raise UsageError(
            f"the objective {objective} needs speeds, and those of {', '.join(unknown)} "
            "are unknown",
            hint="ask for the objective headroom",
        )
    return objective
