"""Parts shared by several exports: visible GPUs, notes, model names, cache sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from duoka.forecast.profile import Profile, evaluate, monomials
from duoka.forecast.serving import Capacity
from duoka.forecast.tensor_names import layer_of
from duoka.hardware.device import Device
from duoka.planner.plan import Plan

from .stages import LayerPipeline
from .text import export_error

_PLACEHOLDER = "MODEL"
_CHATGLM = ("ChatGLM", "GLM4V")
# A plan's source for a model on the Hub (with its commit) or on ModelScope; not a local path.
_HUB_SOURCE = re.compile(
    r"(?P<hub>[^/@\s:]+/[^/@\s]+)@(?P<commit>[0-9a-f]{40})"
    r"|modelscope:(?P<scope>[^/@\s]+/[^/@\s]+)(@(?P<revision>\S+))?",
    re.ASCII,
)


def visible_environment(tool: str, devices: Sequence[Device]) -> list[tuple[str, str]]:
    """Return the environment variables that make CUDA list exactly these devices in this order.

    Detected GPUs are named by UUID, which is independent of numbering; declared GPUs by index (CUDA
    C++ Programming Guide, "CUDA Environment Variables").
    """
    if all(device.uuid for device in devices):
        return [("CUDA_VISIBLE_DEVICES", ",".join(device.uuid for device in devices))]
    numbers = [device.name.partition(":")[2] for device in devices]
    if not all(numbers):
        raise export_error(tool, f"{devices[0].name} has no number", "plan for GPUs")
    return [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", ",".join(numbers))]


def common_notes(plan: Plan, pipeline: LayerPipeline | None = None) -> Iterator[str]:
    """Yield the notes that apply to every tool."""
    if any(name.startswith("vgpu") for name in plan.devices):
        yield "NOTE: planned for virtual GPUs; their numbers are used as CUDA device numbers."
    elif not all(plan.fleet.device(name).uuid for name in plan.devices):
        yield (
            "NOTE: the GPUs were declared, not detected; their numbers are used as nvidia-smi "
            "indices."
        )
    if plan.request.constraints.pins:
        pins = " ".join(f"--pin {name}={at}" for name, at in plan.request.constraints.pins)
        yield f"Pinned: {pins}."
    if pipeline is not None and pipeline.returning:
        names = ", ".join(pipeline.returning)
        yield (
            f"NOTE: {names} is tied and runs on {pipeline.stages[0].device.name} in the plan; "
            f"this tool keeps a copy of the weights on {pipeline.stages[-1].device.name} instead, "
            "which the plan doesn't include."
        )


def is_glm4v(plan: Plan) -> bool:
    """Return True for GLM-4V, which is published with the class and architecture of GLM-4."""
    has_tower = any(".vision" in name for name, _ in plan.placement.entries)
    return has_tower and plan.model.startswith(_CHATGLM)


def code_option(plan: Plan) -> list[str]:
    """Return ["--trust-remote-code"] if needed: always for ChatGLM, whose tokenizer is code."""
    is_needed = plan.request.trust_remote_code or plan.model.startswith(_CHATGLM)
    return ["--trust-remote-code"] if is_needed else []


def published_class(plan: Plan) -> str:
    """Return the name of the model's class in published checkpoints."""
    return "ChatGLMModel" if plan.model.startswith(_CHATGLM) else plan.model


def class_notes(plan: Plan, pipeline: LayerPipeline, tool: str) -> tuple[str, ...]:
    """Refuse a split model of a class that the tool runs on one GPU; note an unknown class."""
    text = (Path(__file__).parent / "pipelines.json").read_text(encoding="utf-8")
    classes = json.loads(text)[tool.lower()]
    name = published_class(plan)
    modules = " ".join(name for name, _ in plan.placement.entries)
    is_single = name in classes["single"] or any(
        word in modules for word in classes["single_modules"]
    )
    if is_single and len(pipeline.stages) > 1:
        why = f"its class for {name} doesn't support pipelines (as of {classes['version']})"
        raise export_error(tool, why, "plan for one GPU, or serve it with duoka")
    note = (
        f"NOTE: {tool} has no own class for {name}: it runs the class of transformers, split by "
        "its base_model_pp_plan if that exists."
    )
    is_foreign = classes["pipeline"] and name not in (*classes["single"], *classes["pipeline"])
    return (note,) if is_foreign else ()


def total_bytes(device: Device) -> int:
    """Return the total memory of a GPU; if unknown, its budget plus reserve."""
    if device.memory_bytes is not None:
        return device.memory_bytes
    return device.budget_bytes + device.reserve_bytes


def model_name(plan: Plan) -> str:
    """Return the model's directory or repository; a placeholder for a plan without weights."""
    if not plan.source or plan.source.endswith(".json"):  # a model in memory, or a config alone
        return _PLACEHOLDER
    match = _HUB_SOURCE.fullmatch(plan.source)
    return match["hub"] or match["scope"] if match else plan.source


def model_revision(plan: Plan) -> str | None:
    """Return the planned commit on the Hub or revision on ModelScope; None for a local model."""
    match = _HUB_SOURCE.fullmatch(plan.source)
    return match["commit"] or match["revision"] if match else None


def is_on_modelscope(plan: Plan) -> bool:
    """Return True for a model on ModelScope."""
    return plan.source.startswith("modelscope:")


def source_note(plan: Plan) -> Iterator[str]:
    """Yield a note if `model_name` is a placeholder."""
    if model_name(plan) == _PLACEHOLDER:
        what = f"{PurePath(plan.source).name}, a config" if plan.source else "a model in memory"
        yield (
            f"NOTE: the plan was made from {what}; {_PLACEHOLDER} is a placeholder for the "
            "directory or repository with the weights."
        )


def bits_notes(plan: Plan, tool: str) -> Iterator[str]:
    """Yield notes on KV cache and weight formats in which the tool differs from the plan."""
    if plan.workload.has_int8_cache:
        yield f"NOTE: the plan's KV cache is int8; {tool} uses 8-bit floats."
    if plan.workload.quantize != "none":
        yield (
            f"NOTE: the plan quantizes weights to {plan.workload.quantize} during loading; {tool} "
            "needs an already quantized checkpoint, or its own --quantization."
        )


def step_tokens(plan: Plan) -> int | None:
    """Return the prompt tokens per step over all sequences; None if prompts are not chunked."""
    workload = plan.workload
    if workload.cache == "paged":  # its chunk already counts the tokens of all requests
        return Capacity.of(workload).step_tokens
    chunk = workload.prefill_chunk_tokens
    return chunk * workload.batch if isinstance(chunk, int) else None


def cache_tokens(plan: Plan) -> int:
    """Return the capacity of the planned KV cache in tokens, over all sequences."""
    workload = plan.workload
    if workload.cache == "paged":
        capacity = Capacity.of(workload)
        return capacity.pages * capacity.page_tokens
    return workload.batch * workload.context_tokens


def layer_token_bytes(
    plan: Plan, profile: Profile | None, pipeline: LayerPipeline
) -> list[int] | None:
    """Return the KV cache bytes of each layer per token of one sequence.

    Measured as the bytes after a decode step at the planned context, divided by its tokens. None if
    unknown: without a profile, for training, and for other caches than "dynamic".
    """
    workload = plan.workload
    if profile is None or workload.training is not None or workload.cache != "dynamic":
        return None
    tokens = workload.context_tokens
    values = monomials(1, 1, tokens)
    steps = [
        index
        for index, regime in enumerate(profile.regimes)
        if regime.holds("decode", batch=1, query=1, keys=tokens)
    ]
    if not steps:
        return None
    layer_bytes = [0] * pipeline.num_layers
    for block in profile.blocks:
        trace = profile.kinds[block.kind].traces[steps[0]]
        cache_bytes = sum(evaluate(trace.sizes[number], values) for number in trace.retained)
        at = layer_of(block.modules[0]) if block.modules else None
        if at is not None and at[0] == pipeline.layers:
            layer_bytes[at[1]] += cache_bytes
    return [-(-size // tokens) for size in layer_bytes]
