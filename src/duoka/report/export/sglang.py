"""SGLang: a command line for ``sglang.launch_server`` in pipeline parallel.

Sources, of SGLang 0.5.23: the layers of each rank from ``SGLANG_PP_LAYER_PARTITION``
(``sglang/srt/distributed/utils.py``, `get_pp_indices`); options (docs.sglang.io, "Server
Arguments"; ``sglang/srt/arg_groups/fields``); ``--mem-fraction-static`` is the share of a GPU for
weights and KV cache together (``sglang/srt/arg_groups/memory_hook.py``); all requests of a step
share a prefill chunk (``sglang/srt/managers/schedule_policy.py``, `PrefillAdder`). `pipelines.json`
lists the classes that support pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, export_error, format_command

NAME = "SGLang"


def export(plan: Plan, profile: Profile | None) -> Export:
    """Write the plan as a shell command."""
    pipeline = to_layer_pipeline(plan, NAME)
    if common.is_glm4v(plan):
        raise export_error(NAME, "it has no class for GLM-4V", "export to vllm, or use duoka serve")
    foreign = common.class_notes(plan, pipeline, NAME)
    workload, num = plan.workload, len(pipeline.stages)
    environment = common.visible_environment(NAME, pipeline.devices)
    options = [("--dtype", workload.dtype), ("--context-length", str(workload.context_tokens))]
    if num > 1:
        counts = ",".join(map(str, pipeline.counts))
        environment.append(("SGLANG_PP_LAYER_PARTITION", counts))
        options.insert(0, ("--pp-size", str(num)))
    tokens = common.cache_tokens(plan)
    options.append(("--max-running-requests", str(workload.batch)))
    options.append(("--max-total-tokens", str(tokens)))
    revision, chunk = common.model_revision(plan), common.step_tokens(plan)
    if revision is not None:
        options.insert(0, ("--revision", revision))
    options.append(("--chunked-prefill-size", "-1" if chunk is None else str(chunk)))
    if workload.has_int8_cache:
        options.append(("--kv-cache-dtype", "fp8_e4m3"))
    sizes = common.layer_token_bytes(plan, profile, pipeline)
    if sizes is not None:
        options.append(("--mem-fraction-static", f"{max(_fractions(pipeline, sizes, tokens)):.2f}"))
    words = ["python", "-m", "sglang.launch_server", "--model-path", common.model_name(plan)]
    words += common.code_option(plan)
    return Export(
        tool=NAME,
        text=format_command(environment, words, options),
        notes=(*foreign, *_notes(plan, pipeline, sizes, tokens)),
    )


def _fractions(pipeline: LayerPipeline, sizes: Sequence[int], tokens: int) -> list[float]:
    """Return each stage's weights plus KV cache as a share of its GPU, rounded up to 1 %.

    `sizes` are the KV cache bytes per token of each layer.
    """
    fractions = []
    for stage in pipeline.stages:
        needed = stage.forecast.weight_bytes + tokens * sum(sizes[stage.start : stage.stop])
        percent = math.ceil(100 * needed / common.total_bytes(stage.device))
        fractions.append(min(percent / 100, 0.99))
    return fractions


def _notes(
    plan: Plan, pipeline: LayerPipeline, sizes: Sequence[int] | None, tokens: int
) -> Iterator[str]:
    """Yield the differences between the plan and SGLang; `sizes` as in `_fractions`."""
    yield from common.common_notes(plan, pipeline)
    yield from common.source_note(plan)
    yield from common.bits_notes(plan, NAME)
    if sizes is None:
        yield "NOTE: --mem-fraction-static is left to SGLang, which uses one fraction for all GPUs."
    elif len(pipeline.stages) > 1:
        fractions = zip(pipeline.devices, _fractions(pipeline, sizes, tokens), strict=True)
        shares = ", ".join(f"{device.name} {share:.0%}" for device, share in fractions)
        yield (
            f"SGLang uses one memory fraction for all GPUs. Weights and KV cache need {shares}; "
            "the largest is given, and --max-total-tokens limits the cache of the others to the "
            "plan's context."
        )
