"""SGLang: a command line for ``sglang.launch_server`` in pipeline parallel.

Sources, of SGLang 0.5.23: the layers of each rank from ``SGLANG_PP_LAYER_PARTITION``
(``sglang/srt/distributed/utils.py``, `get_pp_indices`); options (docs.sglang.io, "Server
Arguments"; ``sglang/srt/arg_groups/fields``); ``--mem-fraction-static`` is the share of a GPU for
weights and KV cache together (``sglang/srt/arg_groups/memory_hook.py``); all requests of a step
share a prefill chunk (``sglang/srt/managers/schedule_policy.py``, `PrefillAdder`). `pipelines.json`
lists the classes that support pipelines.

Experts in host memory need KTransformers, of sglang-kt 0.7.2 with kt-kernel 0.7.2: SGLang 0.5.23
itself calls `KTMoEWrapper` with arguments of kt-kernel before 0.5. Options:
``sglang/srt/server_args.py`` (``--kt-…``). ``--kt-num-gpu-experts`` is the number of experts on the
GPU in each layer, the same in all layers; with 0 the GPU's experts are skipped
(``sglang/srt/layers/moe/kt_ep_wrapper.py``). The staging buffer has as many tokens as
``--chunked-prefill-size``, so it can't be -1. Methods: ``kt_kernel/experts.py``; only "BF16" reads
the checkpoint's own weights of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .host_experts import format_layers, host_layers, layer_bytes, refuse_host_experts
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, export_error, format_command

NAME = "SGLang"
_KT_WEIGHTS = "KT_WEIGHTS"
_KT_METHODS = {"bfloat16": "BF16", "int8": "AMXINT8", "int4": "AMXINT4"}


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
    if common.is_on_modelscope(plan):
        environment.append(("SGLANG_USE_MODELSCOPE", "true"))
    if revision is not None:
        options.insert(0, ("--revision", revision))
    host_options = _host_options(plan, profile, pipeline)
    if chunk is None:
        chunk = tokens if host_options else -1
    options.append(("--chunked-prefill-size", str(chunk)))
    if workload.has_int8_cache:
        options.append(("--kv-cache-dtype", "fp8_e4m3"))
    sizes = common.layer_token_bytes(plan, profile, pipeline)
    if sizes is not None:
        options.append(("--mem-fraction-static", f"{max(_fractions(pipeline, sizes, tokens)):.2f}"))
    options += host_options
    words = ["python", "-m", "sglang.launch_server", "--model-path", common.model_name(plan)]
    words += common.code_option(plan)
    return Export(
        tool=NAME,
        text=format_command(environment, words, options),
        notes=(*foreign, *_notes(plan, pipeline, sizes, tokens), *_host_notes(host_options)),
    )


def _host_options(
    plan: Plan, profile: Profile | None, pipeline: LayerPipeline
) -> list[tuple[str, str]]:
    """Return KTransformers' options for experts in host memory; UsageError if inexact."""
    if not plan.host_experts:
        return []
    workload = plan.workload
    form = workload.dtype if workload.quantize == "none" else workload.quantize
    method = _KT_METHODS.get(form)
    on_gpu = set(layer_bytes(plan, profile)) - set(host_layers(plan))
    why = f"KTransformers has no experts in {form}"
    if on_gpu:
        why = "it keeps the same number of experts of every layer in host memory; the plan has "
        why += f"those of layer {format_layers(sorted(on_gpu))} on GPUs"
    elif len(pipeline.stages) > 1:
        why = "each of its pipeline stages starts all CPU threads of KTransformers"
    if on_gpu or len(pipeline.stages) > 1 or method is None:
        refuse_host_experts(plan, NAME, why)
    is_local = common.model_name(plan) == plan.source
    weights = common.model_name(plan) if method == "BF16" and is_local else _KT_WEIGHTS
    return [
        ("--kt-weight-path", weights),
        ("--kt-method", method),
        ("--kt-cpuinfer", "CORES"),
        ("--kt-threadpool-count", "NUMA_NODES"),
        ("--kt-num-gpu-experts", "0"),
    ]


def _host_notes(options: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the conditions of KTransformers' options."""
    if options:
        yield (
            "NOTE: experts in host memory need KTransformers' build of SGLang (sglang-kt and "
            "kt-kernel, both 0.7.2). Replace CORES by the number of physical cores and NUMA_NODES "
            "by the number of NUMA nodes, as lscpu prints them."
        )
    if ("--kt-weight-path", _KT_WEIGHTS) in options:
        yield (
            f"NOTE: {_KT_WEIGHTS} is a placeholder for a local folder with the weights of the "
            f"experts in the form of the method {dict(options)['--kt-method']}."
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
