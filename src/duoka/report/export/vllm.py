"""vLLM: a command line for ``vllm serve`` in pipeline parallel.

Sources, of vLLM 0.33:

- ``VLLM_PP_LAYER_PARTITION`` has the number of layers of each rank; the numbers add up to the
  model's layers (``vllm/distributed/utils.py``, `get_pp_indices`).
- Options: ``vllm/engine/arg_utils.py``, ``vllm/config/cache.py``; docs.vllm.ai, "Engine Arguments".
- All ranks get as many cache blocks as the rank with the fewest
  (``vllm/v1/core/kv_cache_planning.py``, `get_kv_cache_configs`).
- ``--max-num-batched-tokens`` counts the tokens of all sequences in a step
  (``vllm/config/scheduler.py``); its default: ``vllm/engine/arg_utils.py``, `get_batch_defaults`.
- vLLM refuses to start if less than ``--gpu-memory-utilization`` of a GPU is free, even if the
  cache's bytes are given (``vllm/v1/worker/utils.py``, `request_memory`).
- GLM-4V's config only names the text class (``vllm/model_executor/models/chatglm.py``).
- Classes that support pipelines: `pipelines.json`.
- ``--cpu-offload-gb`` is the size of the parameters in pinned host memory, for each rank: the first
  ones in the order of its layers, of which ``--cpu-offload-params`` selects those with a part of
  their name (``vllm/model_executor/offloader/uva.py``). The experts of a layer are in
  ``experts.routed_experts``, without shared experts
  (``vllm/model_executor/layers/fused_moe/runner/moe_runner.py``). GPUs read them in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from duoka.base.units import format_bytes
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.planner.plan import Plan

from . import common
from .host_experts import host_layers, layer_bytes, refuse_host_experts
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, format_command

NAME = "vLLM"
BLOCK_TOKENS = 16
"""Default number of tokens in a KV cache block of vLLM."""

# The share of a GPU that vLLM uses by default, and must find free at its start.
_UTILIZATION = 0.92


def export(plan: Plan, profile: Profile | None) -> Export:
    """Write the plan as a shell command; UsageError if vLLM can't express it."""
    pipeline = to_layer_pipeline(plan, NAME)
    foreign = common.class_notes(plan, pipeline, NAME)
    workload, num = plan.workload, len(pipeline.stages)
    environment = common.visible_environment(NAME, pipeline.devices)
    if common.is_on_modelscope(plan):
        environment.append(("VLLM_USE_MODELSCOPE", "True"))
    options = [("--dtype", workload.dtype), ("--max-model-len", str(workload.context_tokens))]
    options.append(("--max-num-seqs", str(workload.batch)))
    if common.is_glm4v(plan):
        options.insert(0, ("--hf-overrides", '{"architectures": ["GLM4VForCausalLM"]}'))
    if num > 1:
        counts = ",".join(map(str, pipeline.counts))
        environment.append(("VLLM_PP_LAYER_PARTITION", counts))
        options.insert(0, ("--pipeline-parallel-size", str(num)))
    revision, tokens = common.model_revision(plan), common.step_tokens(plan)
    if revision is not None:
        options.insert(0, ("--revision", revision))
    if tokens is not None:
        options.append(("--max-num-batched-tokens", str(tokens)))
    if workload.has_int8_cache:
        options.append(("--kv-cache-dtype", "fp8"))
    options += _host_options(plan, profile, pipeline)
    rank_bytes = _rank_bytes(plan, profile, pipeline)
    if rank_bytes is not None:
        options.append(("--kv-cache-memory-bytes", str(max(rank_bytes))))
        options += _utilization_option(pipeline)
    words = ["vllm", "serve", common.model_name(plan), *common.code_option(plan)]
    return Export(
        tool=NAME,
        text=format_command(environment, words, options),
        notes=(*foreign, *_notes(plan, pipeline, rank_bytes, profile)),
    )


def planned_blocks(workload: Workload) -> int:
    """Return the number of KV cache blocks of `BLOCK_TOKENS` tokens that the plan needs.

    Examples
    --------
    >>> planned_blocks(Workload(batch=2, prompt_tokens=20, new_tokens=12))
    5
    """
    if workload.cache == "paged":
        assert workload.pages is not None, "a plan's workload is resolved"
        blocks = -(-workload.pages * workload.page_tokens // BLOCK_TOKENS)
    else:
        blocks = workload.batch * -(-workload.context_tokens // BLOCK_TOKENS)
    return blocks + 1  # vLLM reserves one block that it never assigns


def _host_options(
    plan: Plan, profile: Profile | None, pipeline: LayerPipeline
) -> list[tuple[str, str]]:
    """Return the options for experts in host memory; UsageError if other experts would be there."""
    # Each rank puts parameters into host memory until their sum reaches the given size. The size is
    # that of the planned experts of the rank with most of them, less a part of the last parameter
    # (down_proj is a third of the experts of a layer). With layers of 6 GiB, of which rank 0 has
    # the experts of two in host memory, 11 GiB are given: rank 1 then has those of two as well.
    if not plan.host_experts:
        return []
    if plan.workload.quantize != "none":
        refuse_host_experts(plan, NAME, "the size of its own quantized experts is unknown")
    sizes, hosted = layer_bytes(plan, profile), set(host_layers(plan))
    stages = [range(stage.start, stage.stop) for stage in pipeline.stages]
    planned = [[layer for layer in stage if layer in hosted] for stage in stages]
    size = max(sum(sizes[layer] for layer in layers) for layers in planned)
    size -= min(sizes.values()) // 6
    for stage, layers in zip(stages, planned, strict=True):
        rest, offloaded = size, []
        for layer in stage:
            if layer in sizes and rest > 0:
                rest -= sizes[layer]
                offloaded.append(layer)
        if offloaded != layers:
            why = "it puts the same amount of the first experts of each GPU there"
            refuse_host_experts(plan, NAME, why)
    return [("--cpu-offload-gb", str(size / 2**30)), ("--cpu-offload-params", "routed_experts")]


def _rank_bytes(
    plan: Plan, profile: Profile | None, pipeline: LayerPipeline
) -> tuple[int, ...] | None:
    """Return the KV cache size of each rank; None if unknown or zero."""
    # vLLM gives every rank as many blocks as the rank with the fewest. If a layer needs 4096 B per
    # token, a block of 16 tokens needs 16 x 4096 B x layers: with 25 and 15 layers the planned 513
    # blocks need 801 and 481 MiB. If 801 MiB are given, rank 0 has 513 blocks; rank 1 could have
    # 855, but uses 513.
    if plan.workload.cache == "paged":
        # duoka allocates all pages at the start, including one that it never assigns either.
        sizes = [stage.forecast.kv_cache_bytes for stage in pipeline.stages]
        return tuple(sizes) if any(sizes) else None
    layer_bytes = common.layer_token_bytes(plan, profile, pipeline)
    if layer_bytes is None or not any(layer_bytes):
        return None
    tokens = planned_blocks(plan.workload) * BLOCK_TOKENS
    return tuple(tokens * sum(layer_bytes[stage.start : stage.stop]) for stage in pipeline.stages)


def _utilization_option(pipeline: LayerPipeline) -> list[tuple[str, str]]:
    """Return --gpu-memory-utilization if a GPU has less than vLLM's default share free."""
    shares = [
        (stage.device.budget_bytes + stage.device.reserve_bytes) / stage.device.memory_bytes
        for stage in pipeline.stages
        if stage.device.memory_bytes is not None
    ]
    share = math.floor(min(shares, default=1.0) * 100) / 100
    return [("--gpu-memory-utilization", f"{share:.2f}")] if 0 < share < _UTILIZATION else []


def _notes(
    plan: Plan, pipeline: LayerPipeline, rank_bytes: Sequence[int] | None, profile: Profile | None
) -> Iterator[str]:
    """Yield the differences between the plan and vLLM; `rank_bytes` as of `_rank_bytes`."""
    yield from common.common_notes(plan, pipeline)
    yield from common.source_note(plan)
    yield from common.bits_notes(plan, NAME)
    if plan.host_experts:
        yield (
            "NOTE: vLLM computes no experts on the CPU: the GPUs read the experts in host memory "
            "over PCIe at each step, which takes another time than the plan's."
        )
    if common.step_tokens(plan) is None:
        yield (
            "NOTE: the plan's prefill is a single pass; vLLM processes at most 2048 tokens per "
            "step by default, over all sequences (8192 or 16384 on the largest GPUs), which "
            "needs no more memory. --max-num-batched-tokens changes it."
        )
    if rank_bytes is None:
        yield (
            f"NOTE: without --kv-cache-memory-bytes vLLM fills {_UTILIZATION:.0%} of every GPU, "
            "and gives all ranks the number of cache blocks of the smallest."
        )
        return
    if len(pipeline.stages) > 1:
        sizes_by_rank = zip(pipeline.devices, rank_bytes, strict=True)
        shares = ", ".join(f"{device.name} {format_bytes(size)}" for device, size in sizes_by_rank)
        yield (
            "vLLM gives all ranks the same number of cache blocks. With --kv-cache-memory-bytes "
            f"of the largest share they use {shares}."
        )
    sizes: Sequence[int] = common.layer_token_bytes(plan, profile, pipeline) or ()
    if len(set(filter(None, sizes))) > 1:
        yield (
            "NOTE: layers have KV caches of different sizes (such as sliding windows); vLLM "
            "groups and pads them, so its cache holds fewer tokens in the same memory."
        )
