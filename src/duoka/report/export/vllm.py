"""vLLM: a command line for ``vllm serve`` in pipeline parallel.

Sources, of vLLM 0.33: the layers of each rank from ``VLLM_PP_LAYER_PARTITION``, one number a rank
that add up to the model's layers (``vllm/distributed/utils.py``, `get_pp_indices`); options and
their meanings (``vllm/engine/arg_utils.py``, ``vllm/config/cache.py``; docs.vllm.ai, "Engine
Arguments"); that all ranks get as many cache blocks as the poorest one
(``vllm/v1/core/kv_cache_planning.py``, `get_kv_cache_configs`); that ``--max-num-batched-tokens``
counts the tokens of all sequences in a step (``vllm/config/scheduler.py``), and what it is without
(``vllm/engine/arg_utils.py``, `get_batch_defaults`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.base.units import format_bytes
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .stages import Pipeline, read_pipeline
from .text import Export, command_line

NAME = "vLLM"
BLOCK_TOKENS = 16
"""Tokens of a cache block, vLLM's default."""

# The share of a GPU that vLLM takes when it isn't told how large its cache shall be.
_UTILIZATION = 0.92


def export(plan: Plan, profile: Profile | None) -> Export:
    """The plan as a shell command."""
    pipeline = read_pipeline(plan, NAME)
    workload, num = plan.workload, len(pipeline.stages)
    environment = common.visible(NAME, [stage.device for stage in pipeline.stages])
    options = [("--dtype", workload.dtype), ("--max-model-len", str(workload.context_tokens))]
    options.append(("--max-num-seqs", str(workload.batch)))
    if num > 1:
        counts = ",".join(map(str, pipeline.counts))
        environment.append(("VLLM_PP_LAYER_PARTITION", counts))
        options.insert(0, ("--pipeline-parallel-size", str(num)))
    revision, tokens = common.revision_of(plan), common.step_tokens(plan)
    if revision is not None:
        options.insert(0, ("--revision", revision))
    if tokens is not None:
        options.append(("--max-num-batched-tokens", str(tokens)))
    if workload.has_int8_cache:
        options.append(("--kv-cache-dtype", "fp8"))
    sizes = common.layer_token_bytes(plan, profile, pipeline)
    if sizes is not None and any(sizes):
        options.append(("--kv-cache-memory-bytes", str(max(cache_bytes(plan, pipeline, sizes)))))
    return Export(
        tool=NAME,
        text=command_line(environment, ["vllm", "serve", common.name_of(plan)], options),
        notes=tuple(_notes(plan, pipeline, sizes)),
    )


def cache_bytes(plan: Plan, pipeline: Pipeline, sizes: Sequence[int]) -> list[int]:
    """What each rank's share of the cache takes, for the plan's batch and context in blocks."""
    workload = plan.workload
    # A block more than sequences need: vLLM keeps one that it never gives out.
    blocks = workload.batch * -(-workload.context_tokens // BLOCK_TOKENS) + 1
    return [
        blocks * BLOCK_TOKENS * sum(sizes[stage.start : stage.stop]) for stage in pipeline.stages
    ]


def _notes(plan: Plan, pipeline: Pipeline, sizes: Sequence[int] | None) -> Iterator[str]:
    yield from common.common_notes(plan, pipeline)
    yield from common.source_note(plan)
    yield from common.bits_notes(plan, NAME)
    if common.step_tokens(plan) is None:
        yield (
            "NOTE: the plan runs whole prompts at once; vLLM takes at most 2048 tokens a step by "
            "default, of all sequences together (8192 or 16384 on the largest GPUs). That needs no "
            "more memory; --max-num-batched-tokens changes it."
        )
    if sizes is None or not any(sizes):
        yield (
            f"NOTE: without --kv-cache-memory-bytes vLLM fills {_UTILIZATION:.0%} of every GPU, "
            "and gives all ranks as many cache blocks as the poorest can have."
        )
        return
    if len(pipeline.stages) > 1:
        shares = ", ".join(
            f"{stage.device.name} {format_bytes(size)}"
            for stage, size in zip(pipeline.stages, cache_bytes(plan, pipeline, sizes), strict=True)
        )
        yield (
            "vLLM gives all ranks equally many cache blocks, however unequal the GPUs are. With "
            f"the bytes below they take {shares}."
        )
    if len(set(filter(None, sizes))) > 1:
        yield (
            "NOTE: layers keep caches of different sizes (sliding windows, say); vLLM groups and "
            "pads them, so that its cache holds fewer tokens than the same bytes do here."
        )
