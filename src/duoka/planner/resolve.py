"""Resolve: plan a request for a checkpoint; if nothing fits, search suggestions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

from duoka.base.progress import say
from duoka.checkpoint.adapters import digest_of, native_targets
from duoka.checkpoint.architecture import (
    caches_latents,
    reads_block_tables,
    refuse_images,
    refuse_unbuildable,
)
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import InfeasibleError, ModelError, UsageError, WayOut
from duoka.forecast.profile import Profile
from duoka.forecast.workload import (
    BLOCK_TABLE_PAGE_TOKENS,
    LATENT_PAGE_TOKENS,
    PAGE_TOKENS,
    Training,
    Workload,
    with_quantization,
)

from .limits import check_context, host_of
from .plan import Plan
from .reasons import chunk_reason, load_reason, quantization_reason
from .request import PlanProblem, PlanRequest
from .solve import find_plan, solve
from .suggestions import ProfileFor, SuggestionSearch

# Prefill chunks to try with images; each needs a trace of its own.
_IMAGE_CHUNKS = (4096, 1024, 256)

Find = Callable[[Workload], Profile]
"""A function that returns a checkpoint's profile for a workload, from the cache or a new trace."""


def answer(
    profile: Profile,
    problem: PlanProblem,
    *,
    profile_for: ProfileFor | None = None,
    request: PlanRequest | None = None,
    suggest: bool = True,
) -> Plan:
    """Plan a problem; raise InfeasibleError if nothing fits, with suggestions if `suggest`.

    With `profile_for`, smaller image batches and chunks are tried first. `request` is stored in the
    plan, by default the problem's.
    """
    request = request or problem.request
    try:
        return replace(find_plan(profile, problem), request=request)
    except InfeasibleError as error:
        plan = None if profile_for is None else _plan_in_parts(profile, problem, profile_for)
        if plan is not None:
            return replace(plan, request=request)
        if not suggest:
            raise
        say(f"{error}; searching suggestions")  # which takes longer than this answer
        search = SuggestionSearch(profile, problem, profile_for, request)
        layers = profile.outline.joined_layers
        because = "" if layers is None else f"; {joined_note(layers)}"
        raise error.with_ways_out(_announced(search.run()), because) from None


def _announced(ways: Iterable[WayOut]) -> Iterator[WayOut]:
    """Yield suggestions, and report each as it is found."""
    for way in ways:
        say(f"found: {way.text}")
        yield way


def _plan_in_parts(profile: Profile, problem: PlanProblem, profile_for: ProfileFor) -> Plan | None:
    """Plan with the largest image batch or prefill chunk that fits; return None if none fits."""
    if problem.largest is not None:
        return None
    workloads = [*_reduce_parts(problem.workload, profile)]

    @cache
    def plan_for(workload: Workload) -> Plan | None:
        part_profile = profile_for(workload)
        if part_profile is None:
            return None
        return solve(part_profile, replace(problem, workload=workload)) or None

    # Each workload needs a trace, so few are tried: smaller parts need no more memory, so bisection
    # finds the first workload that fits.
    index = bisect_left(workloads, True, key=lambda workload: plan_for(workload) is not None)
    for plan in map(plan_for, workloads[index : index + 1]):
        if plan is not None:
            return replace(plan, why=(*chunk_reason(problem.workload, plan.workload), *plan.why))
    return None


def _reduce_parts(workload: Workload, profile: Profile) -> Iterator[Workload]:
    """Yield workloads with ever smaller image batches, then also with ever smaller chunks."""
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
    """Explain why all `layers` must be on one GPU: the model's code combines their outputs."""
    return (
        f"{layers} stays whole on one GPU, because the model's code combines the outputs of its "
        "layers (duoka check shows the line where a split fails, and duoka check --fix fixes it)"
    )


def whole_prompt_note(checkpoint: Checkpoint, workload: Workload) -> str:
    """Explain that only duoka's class supports chunked prefill, if that is the case; else ""."""
    if checkpoint.builds_own_model and workload.training is None:
        with suppress(ModelError):
            refuse_unbuildable(checkpoint.config)
            return (
                "the checkpoint's own code doesn't support chunked prefill; duoka's class of "
                "this model does (omit --trust-remote-code)"
            )
    return ""


def answer_checkpoint(
    checkpoint: Checkpoint, problem: PlanProblem, find_profile: Find, *, suggest: bool = True
) -> Plan:
    """Plan a checkpoint; for "auto" quantization choose the first scheme that fits."""
    say("planning")
    method = method_of(checkpoint.config)
    if method is not None and problem.constraints.offload:
        raise UsageError(
            f"{checkpoint.name} is already quantized ({method}); such weights can't be offloaded",
            hint="omit --offload, or use the 16-bit checkpoint",
        )
    # Schemes and suggestions may need the profile for a workload several times.
    find_profile = cache(find_profile)
    problem = replace(problem, trust_remote_code=checkpoint.trust_remote_code)

    def profile_for(workload: Workload) -> Profile:
        return find_profile(workload_for(checkpoint, workload))

    problem = replace(problem, find_profile=profile_for)
    *earlier, selected = _with_schemes(checkpoint, problem)
    failed = []
    for candidate in earlier:
        profile = find_profile(candidate.workload)
        if solve(profile, candidate) or _plan_in_parts(profile, candidate, profile_for):
            selected = candidate
            break
        failed.append(candidate.workload.quantize)
    try:
        plan = answer(
            find_profile(selected.workload),
            selected,
            profile_for=profile_for,
            request=problem.request,
            suggest=suggest,
        )
    except InfeasibleError as error:
        note = whole_prompt_note(checkpoint, selected.workload)
        raise error.with_ways_out(error.ways_out, f"; {note}") if note else error from None
    reasons = quantization_reason(plan.workload, failed, is_offloaded=bool(plan.offloaded))
    loading = load_reason(checkpoint.weight_bytes, plan.forecast.expert_bytes)
    return replace(plan, source=checkpoint.source, why=(*reasons, *plan.why, *loading))


def _with_schemes(checkpoint: Checkpoint, problem: PlanProblem) -> Iterator[PlanProblem]:
    """Yield the problem with each scheme that its quantization allows, in order of preference."""
    workload, *smaller = with_quantization(workload_for(checkpoint, problem.workload))
    unquantized = replace(problem, workload=workload)
    if not smaller:
        yield unquantized
        return
    # For "auto": unquantized, int8, int4 (nf4 in training), all on the GPUs; finally unquantized
    # with offloaded weights, because their copies over PCIe for each token cost the most.
    # Experts on the host are read for each token, so there they have the fewest bits.
    constraints = replace(problem.constraints, offload=False, experts="gpu")
    on_gpus = replace(problem, constraints=constraints)
    for quantized in (workload, *smaller):
        yield replace(on_gpus, workload=quantized)
    if problem.constraints.experts != "gpu" and host_of(problem) is not None:
        yield replace(problem, workload=smaller[-1])
    if problem.constraints.offload:
        yield unquantized


def workload_for(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """Resolve the dtype, adapters and chunks of a workload for a checkpoint, or refuse them."""
    if not checkpoint.builds_own_model:
        refuse_unbuildable(checkpoint.config)
    if workload.images:
        refuse_images(checkpoint.config)
    digests = tuple(digest_of(directory) for _, directory in workload.adapters)
    workload = replace(workload, adapter_digests=digests)
    workload = replace(workload, training=native_training(checkpoint, workload.training))
    check_context(workload, checkpoint.max_context_tokens, checkpoint.name)
    workload = _refuse_requantizing(checkpoint, workload)
    is_encoder = bool(checkpoint.config.get("is_encoder_decoder", False))
    workload = whole_prompt(
        workload, is_encoder=is_encoder, is_own_code=checkpoint.builds_own_model
    )
    workload = workload.resolved(dtype=checkpoint.default_dtype or "float32")
    generation = workload.gpu_generation
    has_tables = (
        workload.cache == "paged"
        and workload.dtype != "float32"
        and generation.workspace_bytes > 0  # there are GPUs
        and not generation.before_ampere
        and reads_block_tables(checkpoint.config)
    )
    if workload.pages is not None and not workload.pages_for_batch:
        return workload  # the number given counts pages of the size given
    size = BLOCK_TABLE_PAGE_TOKENS if has_tables else PAGE_TOKENS
    has_latents = not checkpoint.builds_own_model and caches_latents(checkpoint.config)
    return replace(workload, page_tokens=LATENT_PAGE_TOKENS if has_latents else size)


def learning(workload: Workload, training: Training) -> Workload:
    """Return the workload of training on sequences as long as the context of a workload."""
    return replace(
        workload,
        prompt_tokens=workload.context_tokens,
        new_tokens=0,
        prefill_chunk_tokens="auto",
        vision_batch=None,
        training=training,
    )


def native_training(checkpoint: Checkpoint, training: Training | None) -> Training | None:
    """Translate LoRA targets to module names of duoka's class; None for None."""
    if training is None:
        return None
    return replace(training, lora_targets=native_targets(checkpoint, training.lora_targets))


def _refuse_requantizing(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """Set quantize to "none" for a quantized checkpoint; refuse other schemes and training."""
    method, dtype = method_of(checkpoint.config), checkpoint.default_dtype or "float32"
    if method is None:
        return workload
    if workload.training is not None:
        problem = "; duoka trains adapters only on weights that it quantizes itself"
        hint = "use the 16-bit checkpoint with --quantize nf4 or int8"
    elif workload.quantize not in ("none", "auto"):
        problem = f"; it can't be quantized to {workload.quantize}"
        hint = "omit quantize, or use the 16-bit checkpoint"
    elif workload.dtype not in ("auto", dtype):
        problem = f" for {dtype}; it can't compute in {workload.dtype}"
        hint = "omit the dtype, or use the 16-bit checkpoint"
    else:
        return replace(workload, quantize="none")
    raise UsageError(f"{checkpoint.name} is already quantized ({method}){problem}", hint=hint)


def whole_prompt(workload: Workload, *, is_encoder: bool, is_own_code: bool = False) -> Workload:
    """Set prefill to a single pass for encoder-decoder models and for a checkpoint's own code.

    An encoder needs the whole prompt. A checkpoint's own code may assume that the first call has
    the prompt and every later call one token. A given chunk size is refused.
    """
    if not is_encoder and not is_own_code:
        return workload
    if isinstance(workload.prefill_chunk_tokens, int):
        own_code = "a checkpoint's own code isn't guaranteed to"
        reader = "an encoder can't" if is_encoder else own_code
        raise UsageError(
            f"{reader} support prefill chunks of {workload.prefill_chunk_tokens}",
            hint="omit the prefill chunk",
        )
    return replace(workload, prefill_chunk_tokens=None)
