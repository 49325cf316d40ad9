"""Copies of a model on one fleet, and the largest context or batch, for `optimality.py`.

The planner's answer for one group of GPUs, or one size, is taken as it is (`optimality_profiles.py`
holds it against brute force); how GPUs are dealt to copies and which sizes are asked for is tried
out here, all of it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from optimality_profiles import draw_profile, draw_question

from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.max_workload import find_largest, sizes_to_try
from duoka.planner.plan import Plan
from duoka.planner.replicas import plan_replicas
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve

_LONGEST = 768
_LARGEST_BATCH = 40


def dealt(count: int) -> Iterator[list[list[int]]]:
    """Every way to put devices into groups, or to leave them idle."""
    for owners in itertools.product(range(count + 1), repeat=count):
        groups = [[i for i, owner in enumerate(owners) if owner == g + 1] for g in range(count)]
        used = [group for group in groups if group]
        # Groups have no names: only those in the order of their first devices, one after another.
        if groups == used + [[]] * (count - len(used)) and used == sorted(used):
            yield used


def replicas_differ(rng: random.Random) -> tuple[bool, str]:
    """Whether any copy fits, and how duoka's answer differs from the best of all ways to deal."""
    profile = draw_profile(rng)
    problem = replace(draw_question(rng, profile), use_all=rng.random() < 0.2)
    count = len(problem.fleet.devices)
    plans: dict[tuple[int, ...], Plan | None] = {}
    best: tuple[int, int, float] | None = None
    for groups in dealt(count):
        idle = count - sum(map(len, groups))
        if not groups or (problem.use_all and idle):
            continue
        made = [_plan(profile, problem, tuple(group), plans) for group in groups]
        whole = [plan for plan in made if plan is not None]
        if len(whole) == len(made):
            worth = _worth(whole, problem.objective)
            tried = (len(groups), idle, worth)
            best = tried if best is None else max(best, tried)
    try:
        found = plan_replicas(profile, problem)
    except (InfeasibleError, UsageError):
        return best is not None, "" if best is None else f"nothing instead of {best}"
    worth = _worth(found.plans, problem.objective)
    got = (len(found.plans), len(found.idle), worth)
    if best is not None and got[:2] == best[:2] and math.isclose(worth, best[2], rel_tol=1e-9):
        return True, ""
    return best is not None, f"{problem.objective}: {got} instead of {best}"


def _plan(
    profile: Profile,
    problem: PlanProblem,
    group: tuple[int, ...],
    plans: dict[tuple[int, ...], Plan | None],
) -> Plan | None:
    if group not in plans:
        fleet = Fleet(devices=tuple(problem.fleet.devices[index] for index in group))
        try:
            plans[group] = solve(profile, replace(problem, fleet=fleet, use_all=True)) or None
        except UsageError:
            plans[group] = None
    return plans[group]


def _worth(plans: Sequence[Plan], objective: str) -> float:
    """The tightest group's headroom, the slowest one's latency, or the throughput of all."""
    values = [plan.value for plan in plans]
    if objective == "throughput":
        return math.fsum(1.0 / value for value in values)
    return min(values) if objective == "headroom" else -max(values)


def reach_differs(rng: random.Random) -> tuple[bool, str]:
    """Whether any size fits, and how duoka's largest differs from that of all that are tried."""
    profile = replace(draw_profile(rng), max_context_tokens=_LONGEST)
    what = rng.choice(("context", "batch"))
    problem = replace(draw_question(rng, profile), largest=what)
    if what == "batch":
        tokens = min(problem.workload.prompt_tokens, 100)
        problem = replace(problem, workload=replace(problem.workload, prompt_tokens=tokens))
    field = "context_tokens" if what == "context" else "batch"
    best = None
    for number in sizes_to_try(profile, problem):
        if what == "batch" and number > _LARGEST_BATCH:
            break
        if solve(profile, replace(problem, largest=None, workload=_sized(problem, number))):
            best = number
    found = find_largest(profile, problem)
    got = getattr(found.workload, field) if found else None
    if got is not None and what == "batch" and got > _LARGEST_BATCH:
        return True, ""  # more than was tried
    return best is not None, "" if got == best else f"{what}: {got} instead of {best}"


def _sized(problem: PlanProblem, number: int) -> Workload:
    workload = problem.workload
    if problem.largest == "batch":
        return replace(workload, batch=number)
    return replace(workload, prompt_tokens=number - workload.new_tokens)
