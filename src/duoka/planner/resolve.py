"""Resolving: a request to its plan, or to what would fit instead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from duoka.base.progress import say
from duoka.checkpoint.adapters import native_targets
from duoka.checkpoint.architecture import refuse_images, refuse_unbuildable
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import InfeasibleError, ModelError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training, Workload, with_quantization

from .modes import attempt, find
from .plan import Plan
from .planner import check_context
from .reasons import chunk_reason, quantization_reason
from .request import PlanProblem, PlanRequest
from .suggestions import ProfileFor, WaysOut

# Each is a profile of its own.
_IMAGE_CHUNKS = (4096, 1024, 256)

Find = Callable[[Workload], Profile]
"""The profile of a checkpoint for a workload: a cached one, or else a new one."""


def answer(
    profile: Profile,
    problem: PlanProblem,
    *,
    source: str = "",
    profile_for: ProfileFor | None = None,
    request: PlanRequest | None = None,
    suggest: bool = True,
) -> Plan:
    """The plan for a problem, or what would fit instead."""
    request = request or problem.request
    try:
        return replace(find(profile, problem, source=source), request=request)
    except InfeasibleError as error:
        plan = None if profile_for is None else _attempt_in_parts(profile, problem, profile_for)
        if plan is not None:
            return replace(plan, source=source, request=request)
        if not suggest:
            raise
        say("looking for what would fit instead")
        ways = WaysOut(profile, problem, profile_for, request)
        joined = profile.outline.joined_layers
        because = "" if joined is None else f"; {joined_note(joined)}"
        raise error.with_ways_out(ways.search(), because) from None


def _attempt_in_parts(
    profile: Profile, problem: PlanProblem, profile_for: ProfileFor
) -> Plan | None:
    """The plan where images are encoded, or their prompt is read, in the largest parts that fit."""
    if problem.largest is not None:
        return None
    parts = [*_in_parts(problem.workload, profile)]
    plans: dict[int, Plan | None] = {}

    def fits(index: int) -> bool:
        other = profile_for(parts[index])
        of_parts = replace(problem, workload=parts[index])
        plans[index] = None if other is None else attempt(other, of_parts)
        return plans[index] is not None

    # Each is a trace of its own; smaller parts need no more memory.
    plan = plans.get(bisect_left(range(len(parts)), True, key=fits))
    if plan is None:
        return None
    return replace(plan, why=(*chunk_reason(problem.workload, plan.workload), *plan.why))


def _in_parts(workload: Workload, profile: Profile) -> Iterator[Workload]:
    """The workload with fewer images encoded at a time, then its prompt in chunks: ever smaller."""
    if not profile.encodes_images:
        return
    if workload.vision_batch == "auto":
        images = workload.images * workload.batch
        while images > 1:
            images = -(-images // 2)
            workload = replace(workload, vision_batch=images)
            yield workload
    if workload.prefill_chunk_tokens == "auto" and profile.reads_images_in_chunks:
        for tokens in _IMAGE_CHUNKS:
            if tokens < workload.prompt_tokens:
                yield replace(workload, prefill_chunk_tokens=tokens)


def joined_note(layers: str) -> str:
    """What a person should know of code that joins what its layers make."""
    return (
        f"{layers} stays whole on one GPU, since the model's code joins what its layers make "
        "(where that fails, duoka check shows the line, and duoka check --fix mends it)"
    )


def whole_prompt_note(checkpoint: Checkpoint, workload: Workload) -> str:
    """What a person should know where a checkpoint's own code needs more memory than another's."""
    if not checkpoint.builds_own_model or workload.training is not None:
        return ""
    try:
        refuse_unbuildable(checkpoint.config)
    except ModelError:
        return ""
    return (
        "the checkpoint's own code reads a prompt whole; duoka plan without --trust-remote-code "
        "takes another class of this model, which reads it in chunks"
    )


def answer_checkpoint(
    checkpoint: Checkpoint, problem: PlanProblem, find: Find, *, suggest: bool = True
) -> Plan:
    """The plan for a checkpoint; of an "auto" quantization for the first one that fits."""
    say("planning")
    refuse_offload(checkpoint, problem)
    find = cache(find)
    problem = replace(problem, trust_remote_code=checkpoint.trust_remote_code)

    def profile_for(workload: Workload) -> Profile:
        return find(workload_for(checkpoint, workload))

    *earlier, last = _resolved(checkpoint, problem)
    chosen, tried = last, [candidate.workload.quantize for candidate in earlier]
    for number, candidate in enumerate(earlier):
        first = find(candidate.workload)
        if attempt(first, candidate) or _attempt_in_parts(first, candidate, profile_for):
            chosen, tried = candidate, tried[:number]
            break
    try:
        plan = answer(
            find(chosen.workload),
            chosen,
            source=checkpoint.source,
            profile_for=profile_for,
            request=problem.request,
            suggest=suggest,
        )
    except InfeasibleError as error:
        note = whole_prompt_note(checkpoint, chosen.workload)
        raise error.with_ways_out(error.ways_out, f"; {note}") if note else error from None
    reasons = quantization_reason(plan.workload, tried, is_offloaded=bool(plan.offloaded))
    return replace(plan, why=(*reasons, *plan.why))


def _resolved(checkpoint: Checkpoint, problem: PlanProblem) -> Iterator[PlanProblem]:
    """The problem with what it leaves open of the weights: what to try, in this order."""
    first, *smaller = with_quantization(workload_for(checkpoint, problem.workload))
    first_choice = replace(problem, workload=first)
    if not smaller:
        yield first_choice
        return
    # Weights are quantized or offloaded; to read them over PCIe for each token costs more.
    on_gpus = replace(problem, constraints=replace(problem.constraints, offload=False))
    for workload in (first, *smaller):
        yield replace(on_gpus, workload=workload)
    if problem.constraints.offload:
        yield first_choice


def workload_for(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload with what the checkpoint decides: its dtype, and whether it reads in chunks."""
    if not checkpoint.builds_own_model:
        refuse_unbuildable(checkpoint.config)
    if workload.images:
        refuse_images(checkpoint.config)
    workload = replace(workload, training=native_training(checkpoint, workload.training))
    check_context(workload, checkpoint.max_context_tokens, checkpoint.name)
    workload = _unquantized(checkpoint, workload)
    is_encoder = bool(checkpoint.config.get("is_encoder_decoder", False))
    workload = whole_prompt(
        workload, is_encoder=is_encoder, is_own_code=checkpoint.builds_own_model
    )
    return workload.resolved(dtype=checkpoint.default_dtype or "float32")


def learning(workload: Workload, training: Training) -> Workload:
    """Training on sequences as long as the workload's context."""
    return replace(
        workload,
        prompt_tokens=workload.context_tokens,
        new_tokens=0,
        prefill_chunk_tokens="auto",
        vision_batch=None,
        training=training,
    )


def native_training(checkpoint: Checkpoint, training: Training | None) -> Training | None:
    """The training with its adapters on modules of the class that is built."""
    if training is None:
        return None
    return replace(training, lora_targets=native_targets(checkpoint, training.lora_targets))


def _unquantized(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload of a checkpoint that is quantized already: nothing is left to quantize."""
    method = method_of(checkpoint.config)
    if method is None:
        return workload
    if workload.training is not None:
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); duoka trains beside weights "
            "that it has quantized itself",
            hint="take the 16-bit checkpoint, with --quantize nf4 or int8",
        )
    if workload.quantize not in ("none", "auto"):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); it can't become "
            f"{workload.quantize}",
            hint="leave quantize out, or take the 16-bit checkpoint",
        )
    dtype = checkpoint.default_dtype or "float32"
    if workload.dtype not in ("auto", dtype):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}) for {dtype}; it can't compute "
            f"in {workload.dtype}",
            hint="leave the dtype out, or take the 16-bit checkpoint",
        )
    return replace(workload, quantize="none")


def refuse_offload(checkpoint: Checkpoint, problem: PlanProblem) -> None:
    """Refuse to keep weights on the host that packages load where they compute."""
    method = method_of(checkpoint.config)
    if method is not None and problem.constraints.offload:
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); such weights can't lie in "
            "the host's memory",
            hint="leave out the offload, or take the 16-bit checkpoint",
        )


def whole_prompt(workload: Workload, *, is_encoder: bool, is_own_code: bool = False) -> Workload:
    """The workload without chunks for an encoder, which can't read its prompt in such.

    A checkpoint's own code may prepare its first call for the prompt, and every later one for one
    token, whatever it is given.
    """
    reasons = {
        "an encoder can't read its prompt": is_encoder,
        "code that comes with a checkpoint can't be relied on to read its prompt": is_own_code,
    }
    reader = next((reader for reader, is_so in reasons.items() if is_so), None)
    if reader is None:
        return workload
    if isinstance(workload.prefill_chunk_tokens, int):
        raise UsageError(
            f"{reader} in chunks of {workload.prefill_chunk_tokens}",
            hint="leave the chunk out",
        )
    return replace(workload, prefill_chunk_tokens=None)
