"""What a plan is for and what its devices hold, in words; for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator

from duoka.base.units import format_count
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Training, Workload
from duoka.planner.plan import Plan

_CHOSEN = {"given": "as given", "balance": "balanced", "order": "filled in order"}


def title(plan: Plan) -> tuple[str, str]:
    """The model, and on how many of the devices it is."""
    kind = "devices" if "cpu" in plan.fleet.names else "GPUs"
    return plan.model or "model", f"on {len(plan.devices)} of {len(plan.fleet.devices)} {kind}"


def facts(plan: Plan) -> Iterator[str]:
    """What was planned for."""
    workload = plan.workload
    yield workload.dtype
    if workload.quantize != "none":
        yield f"weights in {workload.quantize}"
    if workload.training is None:
        yield from _inference(workload)
    else:
        yield from _training(workload, workload.training)
    yield _CHOSEN.get(plan.objective, f"for {plan.objective}")


def _inference(workload: Workload) -> Iterator[str]:
    new = f"({workload.prompt_tokens} + {workload.new_tokens} new)"
    chunk = workload.prefill_chunk_tokens
    yield f"batch {workload.batch}"
    yield f"context {workload.context_tokens} {new}"
    if workload.images:
        height, width = workload.image_size
        yield f"{format_count(workload.images, 'image')} of {width}x{height}"
    yield "whole prompt at once" if chunk is None else f"prompt in chunks of {chunk}"
    if workload.cache != "dynamic":
        yield f"{workload.cache} cache"


def _training(workload: Workload, training: Training) -> Iterator[str]:
    lora = training.method == "lora"
    yield f"training LoRA of rank {training.lora_rank}" if lora else "training all weights"
    yield f"{workload.batch} x {workload.prompt_tokens} tokens"
    if training.micro_batches > 1:
        yield f"{training.micro_batches} micro-batches, {training.schedule}"
    yield training.optimizer
    if training.gradient_checkpointing:
        yield "gradient checkpointing"
    if training.master_weights:
        yield "master weights in float32"


def kinds_of(forecast: StageBytes) -> tuple[tuple[str, int], ...]:
    """Bytes by kind; together they are what is reserved."""
    return (
        ("weights", forecast.weight_bytes),
        ("KV cache", forecast.kv_cache_bytes),
        ("activations", forecast.activation_bytes),
        ("gradients", forecast.gradient_bytes),
        ("optimizer", forecast.optimizer_bytes),
        ("overhead", forecast.overhead_bytes),
    )
