"""Finding: the plan for a question, whatever it asks for."""

from __future__ import annotations

from dataclasses import replace

from duoka.errors import UsageError
from duoka.forecast.profile import Profile

from . import from_device_map, max_workload, planner
from .plan import Plan
from .planner import Question


def find(profile: Profile, question: Question, *, source: str = "") -> Plan:
    """The best plan, the plan for the question's device map, or that for the largest that fits."""
    if question.largest is None and question.device_map is None:
        return planner.solve(profile, question, source=source)
    if question.largest is None:
        return from_device_map.plan(profile, question, source=source)
    _refuse_map(question)
    found = max_workload.find_largest(profile, question)
    if found is None:
        return planner.solve(profile, max_workload.least(profile, question), source=source)
    return replace(found, source=source)


def attempt(profile: Profile, question: Question) -> Plan | None:
    """The plan that `find` finds; None where nothing fits, without a word on what is missing."""
    if question.largest is not None:
        return max_workload.find_largest(profile, question)
    if question.device_map is not None:
        return from_device_map.attempt(profile, question)
    return planner.attempt(profile, question)


def conceivable(profile: Profile, question: Question) -> bool:
    """Whether lower bounds leave a plan possible; without it there is none. Nothing is replayed."""
    if question.device_map is not None:
        return True  # they are those of placements in stages
    if question.largest is not None:
        question = max_workload.least(profile, question)
    return planner.conceivable(profile, question)


def _refuse_map(question: Question) -> None:
    if question.device_map is not None:
        raise UsageError(
            f"the largest {question.largest} is looked for where duoka places the modules",
            hint="leave out the device map",
        )
