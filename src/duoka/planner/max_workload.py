"""Largest workloads: the longest context, or the largest batch, that has a plan.

Because of the allocator's segments and fragmentation, a context may fit although a slightly shorter
one doesn't. So the search is defined exactly. Candidate contexts are multiples of `STEP_TOKENS`
(from `COARSE_FROM_TOKENS` on, of `COARSE_STEP_TOKENS`) and the model's limit; candidate batches are
all integers. Lower bounds ignore fragmentation and grow with the size, so they rule out all sizes
from some size on. The result is the largest candidate below that size for which the planner finds a
plan. With offloaded weights the result is found by bisection, and may miss a larger one that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.serving import least_pages
from duoka.forecast.workload import MOST_BATCH, MOST_BATCH_TOKENS, MOST_TOKENS, Workload

from .plan import Plan
from .planner import NoPlan, is_conceivable, place_best
from .reasons import Reason
from .request import PlanProblem

STEP_TOKENS = 64
COARSE_STEP_TOKENS = 256
COARSE_FROM_TOKENS = 16_384


def find_largest(profile: Profile, problem: PlanProblem) -> Plan | NoPlan:
    """Find the plan for the largest fitting context or batch.

    Experts are in host memory only if all are to be there: with "auto" the GPUs limit the size.
    """
    request = problem.request
    if problem.constraints.experts == "auto":
        constraints = replace(problem.constraints, experts="gpu")
        problem = replace(problem, constraints=constraints)
    sizes = sizes_to_try(profile, problem)

    def resize(index: int) -> PlanProblem:
        return replace(problem, workload=_resize(problem, sizes[index]))

    def fits(index: int) -> bool:
        return bool(place_best(profile, resize(index), leave_room=False))

    # Bounds grow with the size, so bisection finds the first size that they rule out. Exact bytes
    # need not grow, so the sizes below are tried one by one from there downwards.
    stop = bisect_left(
        range(len(sizes)), True, key=lambda index: not is_conceivable(profile, resize(index))
    )
    if problem.constraints.offload or problem.constraints.experts == "host":
        # Each `fits` searches for weights to move, which takes seconds: bisection assumes that no
        # size fits above a size that doesn't.
        stop = bisect_left(range(stop), True, key=lambda index: not fits(index))
    for index in reversed(range(stop)):
        if fits(index):
            plan = place_best(profile, resize(index))
            assert isinstance(plan, Plan), "it fits"
            reason = _reason(profile, problem, plan, is_last=index == len(sizes) - 1)
            request = replace(plan.request, constraints=request.constraints)
            return replace(plan, why=(reason, *plan.why), request=request)

    def describe() -> InfeasibleError:
        plan = place_best(profile, smallest_problem(profile, problem))
        assert isinstance(plan, NoPlan), "the smallest size was tried"
        return plan.describe()

    return NoPlan(describe)


def smallest_problem(profile: Profile, problem: PlanProblem) -> PlanProblem:
    """Return the problem for the smallest context or batch."""
    workload = _resize(problem, sizes_to_try(profile, problem)[0])
    return replace(problem, workload=workload, largest=None)


def sizes_to_try(profile: Profile, problem: PlanProblem) -> Sequence[int]:
    """Return the candidate contexts or batches, in ascending order."""
    workload = problem.workload
    if problem.largest == "batch":
        max_batch = min(MOST_BATCH, MOST_BATCH_TOKENS // workload.context_tokens)
        return range(1, max_batch + 1)
    limit = min(profile.max_context_tokens or MOST_TOKENS, MOST_BATCH_TOKENS // workload.batch)
    fine = range(STEP_TOKENS, min(limit, COARSE_FROM_TOKENS) + 1, STEP_TOKENS)
    coarse = range(COARSE_FROM_TOKENS + COARSE_STEP_TOKENS, limit + 1, COARSE_STEP_TOKENS)
    sizes = [size for size in sorted({*fine, *coarse, limit}) if size > workload.new_tokens]
    if not sizes:
        raise UsageError(
            f"{workload.new_tokens} new tokens leave no tokens for a prompt in a context of "
            f"{limit}",
            hint="reduce the number of new tokens",
        )
    return sizes


def _resize(problem: PlanProblem, size: int) -> Workload:
    """Return the problem's workload with another batch or context."""
    workload = problem.workload
    if problem.largest == "batch" and workload.is_paged and not workload.pages_for_batch:
        # Enough pages to run `size` requests of the full context at the same time.
        return replace(workload, batch=size, pages=size * least_pages(workload))
    if problem.largest == "batch":
        return replace(workload, batch=size)
    return replace(workload, prompt_tokens=size - workload.new_tokens)


def _reason(profile: Profile, problem: PlanProblem, plan: Plan, *, is_last: bool) -> Reason:
    """Give the reason why no larger size fits."""
    tokens = plan.workload.context_tokens
    limit = "this is the largest supported number" if is_last else "memory is the limit"
    if problem.largest == "batch":
        batch = plan.workload.batch
        return Reason("largest-batch", {"tokens": tokens, "batch": batch, "limit": limit})
    if tokens == profile.max_context_tokens:
        return Reason("model-limit", {"tokens": tokens})
    step = STEP_TOKENS if tokens < COARSE_FROM_TOKENS else COARSE_STEP_TOKENS
    return Reason("longest-context", {"tokens": tokens, "step": step, "limit": limit})
