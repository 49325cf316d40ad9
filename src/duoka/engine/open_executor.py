"""Open the executor of a plan: in this process, or in one process per GPU."""

from __future__ import annotations

import os

from duoka.api.load import OpenedModel, Progress, load_proved, prove_here, read_adapter_for
from duoka.errors import DuokaError, UsageError
from duoka.forecast.serving import Capacity, WarmUp
from duoka.forecast.workload import PAGE_TOKENS
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
    """Prove the plan, load its model, and open its executor.

    See `Engine` for parameters and errors. `opened` is the plan's model without weights.

    Returns
    -------
    executor : Executor
    num_embeddings : int or None
        As `num_embeddings` returns it: token ids must be smaller.
    reader : PromptReader
    rules : GenerationRules
        The rules of the checkpoint's generation config.
    """
    if plan.workload.training is not None:
        raise UsageError(
            "the plan is for training, and the engine only generates", hint="plan without training"
        )
    warm_up = warm_up if plan.workload.is_paged else "first"
    capacity = capacity_of(plan)
    routes = None
    if processes or (processes is None and len(plan.devices) > 1):
        try:
            routes = _find_routes(plan, opened)
        except DuokaError:
            if processes:
                raise
    lora = None if adapter is None else read_adapter_for(plan, adapter)
    plan = prove_here(plan, opened, download_progress)
    # Raises before a weight is read.
    rules = GenerationRules.of(opened.model, opened.checkpoint.generation_config)
    rows, reader = num_embeddings(opened.model), opened.reader
    if routes is None:
        # With pages, tokens are sampled on the device of the logits.
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
        adapter=lora,
    )
    return executor, rows, reader, rules


def capacity_of(plan: Plan) -> Capacity:
    """Return the sequences, pages and tokens for which a plan reserves memory."""
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


def _find_routes(plan: Plan, opened: OpenedModel) -> Routes:
    """Find the tensors sent between stages; raise UsageError if stages can't be processes."""
    if len(plan.devices) == 1:
        raise UsageError(
            "one process per GPU is requested, and the plan uses one GPU",
            hint="plan for several GPUs (--use-all), or omit processes",
        )
    model = opened.model
    reasons = {
        "images": plan.workload.images,
        "an int8 cache without pages": plan.workload.cache == "int8",
        "offloaded weights": plan.offloaded,
        "state other than keys and values, or its own attention": not reads_pages(model),
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is not None:
        raise UsageError(f"a model with {reason} needs a single process", hint="omit processes")
    if any(name.startswith("vgpu") for name in plan.devices):  # register their names with torch
        devices.materialise(plan.fleet)
    return find_step_routes(model, plan.placement)
