"""Largest workloads: the longest context, or the largest batch, for which there is a plan.

More tokens need more memory, but for what segments and fragmentation make of it: a context may fit
where a slightly shorter one doesn't. So what is sought is said exactly. Contexts are whole
multiples of `STEP_TOKENS` (from `COARSE_FROM_TOKENS` on, of `COARSE_STEP_TOKENS`) and the model's
own limit; batches are whole numbers. The answer is the largest of them for which the planner finds
a plan, among all below the first one that lower bounds rule out: bounds have no fragmentation in
them, and grow with the number. With weights in the host's memory it is found by halves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.serving import least_pages
from duoka.forecast.workload import MOST_BATCH, MOST_BATCH_TOKENS, MOST_TOKENS, Workload

from .plan import Plan
from .planner import attempt, conceivable
from .reasons import Reason
from .request import PlanProblem

STEP_TOKENS = 64
COARSE_STEP_TOKENS = 256
COARSE_FROM_TOKENS = 16_384


def find_largest(profile: Profile, problem: PlanProblem) -> Plan | None:
    """The plan for the largest context or batch that fits; None where not even the least does."""
    numbers = candidates(profile, problem)

    def resized(index: int) -> PlanProblem:
        return replace(problem, workload=_workload(problem, numbers[index]))

    def fits(resized: PlanProblem) -> bool:
        return attempt(profile, resized, leave_room=False) is not None

    def ruled_out(index: int) -> bool:
        return not conceivable(profile, resized(index))

    stop = bisect_left(range(len(numbers)), True, key=ruled_out)
    if problem.constraints.offload:
        # Each answer is a search for what to offload, and takes seconds: here nothing is sought
        # above a number for which there is no plan.
        stop = bisect_left(range(stop), True, key=lambda i: not fits(resized(i)))
    for index in reversed(range(stop)):
        if fits(resized(index)):
            plan = attempt(profile, resized(index))
            assert plan is not None, "it fits"
            reason = _reason(profile, problem, plan, is_last=index == len(numbers) - 1)
            return replace(plan, why=(reason, *plan.why))
    return None


def least(profile: Profile, problem: PlanProblem) -> PlanProblem:
    """The problem for the least context or batch that there is."""
    return replace(
        problem, workload=_workload(problem, candidates(profile, problem)[0]), largest=None
    )


def candidates(profile: Profile, problem: PlanProblem) -> Sequence[int]:
    """The contexts or batches to choose from, in order."""
    workload = problem.workload
    if problem.largest == "batch":
        most = min(MOST_BATCH, MOST_BATCH_TOKENS // workload.context_tokens)
        return range(1, most + 1)
    limit = min(profile.max_context_tokens or MOST_TOKENS, MOST_BATCH_TOKENS // workload.batch)
    fine = range(STEP_TOKENS, min(limit, COARSE_FROM_TOKENS) + 1, STEP_TOKENS)
    coarse = range(COARSE_FROM_TOKENS + COARSE_STEP_TOKENS, limit + 1, COARSE_STEP_TOKENS)
    numbers = [n for n in sorted({*fine, *coarse, limit}) if n > workload.new_tokens]
    if not numbers:
        raise UsageError(
            f"{workload.new_tokens} new tokens leave no room for a prompt in a context of {limit}",
            hint="ask for fewer new tokens",
        )
    return numbers


def _workload(problem: PlanProblem, number: int) -> Workload:
    workload = problem.workload
    if problem.largest == "batch" and workload.is_paged:
        # So many requests, as long as one may be, are there at once.
        return replace(workload, batch=number, pages=number * least_pages(workload))
    if problem.largest == "batch":
        return replace(workload, batch=number)
    return replace(workload, prompt_tokens=number - workload.new_tokens)


def _reason(profile: Profile, problem: PlanProblem, plan: Plan, *, is_last: bool) -> Reason:
    """That it is the largest, and what is in the way of more."""
    tokens = plan.workload.context_tokens
    limit = "duoka plans for no more" if is_last else "memory is what limits it"
    if problem.largest == "batch":
        values: dict[str, int | str] = {
            "tokens": tokens,
            "batch": plan.workload.batch,
            "limit": limit,
        }
        return Reason("largest-batch", values)
    if tokens == profile.max_context_tokens:
        return Reason("model-limit", {"tokens": tokens})
    step = STEP_TOKENS if tokens < COARSE_FROM_TOKENS else COARSE_STEP_TOKENS
    return Reason("longest-context", {"tokens": tokens, "step": step, "limit": limit})
