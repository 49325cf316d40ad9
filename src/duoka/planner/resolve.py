"""Answer: a question to its plan, or to what would fit instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload, with_quantization

from .modes import attempt, find
from .plan import Plan, Request
from .planner import Question
from .suggestions import ProfileFor, WaysOut
from .workloads import refuse_offload, workload_for

Find = Callable[[Workload], Profile]
"""The profile of a checkpoint for a workload: a cached one, or else a new one."""


def answer(
    profile: Profile,
    question: Question,
    *,
    source: str = "",
    profile_for: ProfileFor | None = None,
    request: Request | None = None,
) -> Plan:
    """The plan for a question, or what would fit instead."""
    request = request or question.request
    try:
        return replace(find(profile, question, source=source), request=request)
    except InfeasibleError as error:
        ways = WaysOut(profile, question, profile_for, request)
        raise error.with_ways_out(ways.found()) from None


def answer_checkpoint(checkpoint: Checkpoint, question: Question, find: Find) -> Plan:
    """The plan for a checkpoint; of an "auto" quantization for the first one that fits."""
    refuse_offload(checkpoint, question)
    request = replace(question.request, trust_remote_code=checkpoint.trust_remote_code)
    *others, last = _resolved(checkpoint, question)
    chosen, tried = last, [each.workload.quantize for each in others]
    for number, each in enumerate(others):
        if attempt(find(each.workload), each) is not None:
            chosen, tried = each, tried[:number]
            break
    plan = answer(
        find(chosen.workload),
        chosen,
        source=checkpoint.source,
        profile_for=lambda other: find(workload_for(checkpoint, other)),
        request=request,
    )
    return replace(plan, why=(*_why_quantized(plan, tried), *plan.why))


def _resolved(checkpoint: Checkpoint, question: Question) -> Iterator[Question]:
    """The question with what it leaves open of the weights: what to try, in this order."""
    first, *others = with_quantization(workload_for(checkpoint, question.workload))
    asked = replace(question, workload=first)
    if not others:
        yield asked
        return
    # Weights are quantized or offloaded; to read them over PCIe for each token costs more.
    here = replace(question, constraints=replace(question.constraints, offload=False))
    for workload in (first, *others):
        yield replace(here, workload=workload)
    if question.constraints.offload:
        yield asked


def _why_quantized(plan: Plan, tried: Sequence[str]) -> Iterator[str]:
    """Why the weights are what they are, where that was left open."""
    names = ["unquantized" if each == "none" else f"in {each}" for each in tried]
    if names:
        became = (
            "Some weights leave the GPUs"
            if plan.offloaded
            else f"The weights become {plan.workload.quantize}"
        )
        yield f"{became}: {' or '.join(names)} they don't fit."
