"""What computes the steps of a plan: one process, or one for each of its GPUs."""

from __future__ import annotations

import os

from duoka.api.load import OpenedModel, Progress, load_proved, prove_here, read_adapter_for
from duoka.checkpoint.quantized import method_of
from duoka.errors import DuokaError, ModelError, UsageError
from duoka.forecast.serving import PAGE_TOKENS, Capacity, WarmUp
from duoka.models.lora import native_form
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime.call.paged_model import reads_pages
from duoka.runtime.prompt_reader import PromptReader, num_embeddings
from duoka.stages.route import Routes, find_step_routes

from .executor import Executor, InlineExecutor
from .generation_rules import GenerationRules
from .staged_executor import StagedExecutor


def open_executor(
    plan: Plan,
    opened: OpenedModel,
    processes: bool | None,
    *,
    warm_up: WarmUp = "every",
    adapter: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    download_progress: Progress | None = None,
) -> tuple[Executor, int | None, PromptReader, GenerationRules]:
    """Load a model for a plan.

    Besides what computes, the rows of its embedding, its reader, and its generation config's rules.
    See `Engine` for what is given and raised.
    """
    if plan.workload.training is not None:
        raise UsageError(
            "the plan is for training, and the engine generates", hint="plan without training"
        )
    warm_up = warm_up if plan.workload.is_paged else "first"
    capacity = capacity_of(plan)
    routes = None
    if processes or (processes is None and len(plan.devices) > 1):
        try:
            routes = _routes(plan, opened)
        except DuokaError:
            if processes:
                raise
    lora = None if adapter is None else read_adapter_for(plan, adapter)
    plan = prove_here(plan, opened, download_progress)
    # Before a weight is read.
    rules = GenerationRules.of(opened.model, opened.checkpoint.generation_config)
    rows, reader = num_embeddings(opened.model), opened.reader
    if routes is None:
        # Where there are pages tokens are drawn where logits are.
        stay = plan.workload.is_paged
        model = load_proved(plan, opened, progress=progress, lora=lora, outputs_stay=stay)
        inline = InlineExecutor(model, capacity, plan.workload, warm_up=warm_up, plan=plan)
        return inline, rows, reader, rules
    executor = StagedExecutor(
        plan,
        capacity,
        routes,
        warm_up=warm_up,
        trust_remote_code=opened.checkpoint.trust_remote_code,
        adapter=None if lora is None else native_form(lora, opened.checkpoint.config),
    )
    return executor, rows, reader, rules


def capacity_of(plan: Plan) -> Capacity:
    """What the memory of a plan for generating is there for."""
    workload = plan.workload
    if workload.is_paged:
        return Capacity.of(workload)
    chunk = workload.prefill_chunk_tokens
    assert chunk != "auto", "a plan's workload is resolved"
    return Capacity(
        sequences=workload.batch,
        context_tokens=workload.context_tokens,
        pages=workload.batch * -(-workload.context_tokens // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        step_tokens=workload.batch * min(chunk or workload.prompt_tokens, workload.prompt_tokens),
        whole_prompts=chunk is None,
    )


def _routes(plan: Plan, opened: OpenedModel) -> Routes:
    """What crosses between a plan's stages; refused where each can't have its own process."""
    if len(plan.devices) == 1:
        raise UsageError(
            "a process for each GPU is wanted, and the plan has one GPU",
            hint="plan for several, with --use-all if one is enough, or leave processes out",
        )
    if plan.workload.images:
        raise UsageError(
            "prompts with images are read by one process",
            hint="leave processes out, or plan without --images",
        )
    if plan.workload.cache == "int8":
        raise UsageError(
            "a cache of the kind 'int8' is filled by one process",
            hint="leave processes out, or plan without --cache",
        )
    if plan.offloaded:
        raise UsageError(
            "weights that are in the host's memory are brought to GPUs by one process",
            hint="leave processes out, or plan without --offload",
        )
    if method_of(opened.checkpoint.config) is not None:
        raise ModelError(
            "a checkpoint that was published quantized is read whole by one process",
            hint="leave processes out, or take the original with --quantize",
        )
    model = opened.model
    if not reads_pages(model):
        raise ModelError(
            f"{type(model).__name__} keeps more than keys and values, or calls attention itself",
            hint="leave processes out",
        )
    if any(name.startswith("vgpu") for name in plan.devices):  # torch has to know their names
        devices.materialise(plan.fleet)
    return find_step_routes(model, plan.placement)
