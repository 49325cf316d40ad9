"""Modes: the plan for a problem, be it the best, by a device map, or for the largest that fits."""

from __future__ import annotations

from dataclasses import replace

from duoka.errors import UsageError
from duoka.forecast.profile import Profile

from . import from_device_map, max_workload, planner
from .plan import Plan
from .request import PlanProblem


def find(profile: Profile, problem: PlanProblem, *, source: str = "") -> Plan:
    """The best plan, the plan for the problem's device map, or that for the largest that fits."""
    if problem.largest is None and problem.device_map is None:
        return planner.solve(profile, problem, source=source)
    if problem.largest is None:
        return from_device_map.plan(profile, problem, source=source)
    if problem.device_map is not None:
        raise UsageError(
            f"the largest {problem.largest} is looked for where duoka places the modules",
            hint="leave out the device map",
        )
    plan = max_workload.find_largest(profile, problem)
    if plan is None:
        return planner.solve(profile, max_workload.least(profile, problem), source=source)
    return replace(plan, source=source)


def attempt(profile: Profile, problem: PlanProblem) -> Plan | None:
    """The plan that `find` finds; None where nothing fits, without a word on what is missing."""
    if problem.largest is not None:
        return max_workload.find_largest(profile, problem)
    if problem.device_map is not None:
        return from_device_map.attempt(profile, problem)
    return planner.attempt(profile, problem)


def conceivable(profile: Profile, problem: PlanProblem) -> bool:
    """Whether lower bounds leave a plan possible; without it there is none. Nothing is replayed."""
    if problem.device_map is not None:
        return True  # they are those of placements in stages
    if problem.largest is not None:
        problem = max_workload.least(profile, problem)
    return planner.conceivable(profile, problem)
