"""Solve: plan a problem for the best placement, a device map, or the largest workload."""

from __future__ import annotations

from duoka.errors import UsageError
from duoka.forecast.profile import Profile

from . import planner
from .from_device_map import follow_map
from .limits import limit_graphs
from .max_workload import find_largest, smallest_problem
from .plan import Plan
from .planner import NoPlan, place_best
from .request import PlanProblem


def solve(profile: Profile, problem: PlanProblem, *, leave_room: bool = True) -> Plan | NoPlan:
    """Find the best placement, follow the device map, or find the largest size.

    Without `leave_room` the best placement need not leave the recommended free memory.
    """
    problem = limit_graphs(profile, problem)
    if problem.largest is None and problem.device_map is None:
        return place_best(profile, problem, leave_room=leave_room)
    if problem.largest is None:
        return follow_map(profile, problem)
    if problem.device_map is not None:
        raise UsageError(
            f"the largest {problem.largest} can't be searched with a device map",
            hint="omit the device map",
        )
    return find_largest(profile, problem)


def find_plan(profile: Profile, problem: PlanProblem) -> Plan:
    """Solve a problem; raise InfeasibleError if there is no plan."""
    plan = solve(profile, problem)
    if isinstance(plan, NoPlan):
        raise plan.describe()
    return plan


def is_conceivable(profile: Profile, problem: PlanProblem) -> bool:
    """Return False if lower bounds rule out every plan; nothing is replayed."""
    if problem.device_map is not None:
        return True  # the lower bounds are only valid for placements with one stage per device
    if problem.largest is not None:
        problem = smallest_problem(profile, problem)
    return planner.is_conceivable(profile, problem)
