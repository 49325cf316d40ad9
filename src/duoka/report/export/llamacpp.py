"""llama.cpp: a command line for ``llama-server`` with layers split over GPUs.

Sources: options and the order of proportions (ggml-org/llama.cpp, docs/multi-gpu.md; common/arg.cpp
as in llama-cpp-python 0.3.36); assignment of layers (src/llama-model.cpp, `load_tensors`).

llama.cpp assigns the last ``-ngl`` of the n layers and the output after them. The k-th of m (from
0) goes to the first device whose cumulative share of the proportions is larger than k / m. A file
may have one more layer after the model's layers, for multi-token prediction (conversion/*.py,
``num_nextn_predict_layers``). The proportions given here are the numbers of layers, plus two on the
last device, so that the cumulative shares are multiples b / (n + 2), rounded as k / m is. With the
additional layer, m = n + 2, each device gets exactly its layers. Without it, m = n + 1, each device
gets the same layers, because (b - 1) / (n + 1) < b / (n + 2) < b / (n + 1) for each b up to n.

A tied head uses the tensor of the input embedding under its name. llama.cpp duplicates the tensor
on the device of the output (src/models, ``TENSOR_DUPLICATED``), unless an override of that name
puts both into one buffer (src/llama-model-loader.cpp, `create_tensor`).

Experts in host memory: ``--n-cpu-moe N`` places the tensors `gguf_file.EXPERTS` of layers 0 to
N - 1 in the buffer type "CPU", dense layers included, which have none (common/common.h,
`llm_add_n_cpu_ffn_overrides`). ``--override-tensor PATTERN=CPU`` does so for any layers; a comma
separates overrides and "=" ends the pattern, which is searched for in the tensor's name
(common/arg.cpp, `parse_tensor_buffer_overrides`; src/llama-model-loader.cpp). The names of shared
experts end in ``_shexp`` and don't match. The device of a layer, and so ``--tensor-split`` and
``--n-gpu-layers``, are independent of overrides. For at least 32 tokens the GPU of the layer
multiplies host weights after a copy (ggml-cuda.cu, `ggml_backend_cuda_device_offload_op`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .gguf_file import EXPERTS, LLAMA_CPP, GgufFile, refuse_other_model, weight_notes
from .host_experts import format_layers, host_layers, layer_bytes
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, format_command

NAME = LLAMA_CPP
_FILE = "MODEL.gguf"
_CACHE_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def export(plan: Plan, profile: Profile | None, file: GgufFile | None = None) -> Export:
    """Write the plan as a shell command, for a GGUF file if given."""
    pipeline = to_layer_pipeline(plan, NAME)
    if file is not None:
        refuse_other_model(file, plan, pipeline)
    workload, stages = plan.workload, pipeline.stages
    environment = common.visible_environment(NAME, pipeline.devices)
    names = ",".join(f"CUDA{number}" for number in range(len(stages)))
    options = [("--model", _FILE if file is None else str(file.path)), ("--device", names)]
    if len(stages) > 1:
        *first_counts, last_count = pipeline.counts
        options += [
            ("--split-mode", "layer"),
            ("--tensor-split", ",".join(map(str, [*first_counts, last_count + 2]))),
            ("--n-gpu-layers", str(pipeline.num_layers + 2)),
        ]
    else:
        options += [("--split-mode", "none"), ("--main-gpu", "0"), ("--n-gpu-layers", "all")]
    options += _host_options(plan, profile, file)
    # llama-server divides the context among its slots, so it gets the sum.
    options.append(("--ctx-size", str(workload.batch * workload.context_tokens)))
    options.append(("--parallel", str(workload.batch)))
    if isinstance(workload.prefill_chunk_tokens, int):
        chunk = str(workload.prefill_chunk_tokens)
        options += [("--batch-size", chunk), ("--ubatch-size", chunk)]
    kind = "q8_0" if workload.has_int8_cache else _CACHE_TYPES.get(workload.dtype, "f16")
    options += [("--cache-type-k", kind), ("--cache-type-v", kind), ("--fit", "off")]
    return Export(
        tool=NAME,
        text=format_command(environment, ["llama-server"], options),
        notes=tuple(_notes(plan, pipeline, file)),
    )


def _host_options(
    plan: Plan, profile: Profile | None, file: GgufFile | None
) -> list[tuple[str, str]]:
    """Return the option that keeps the planned experts in host memory."""
    hosted = host_layers(plan)
    if not hosted:
        return []
    expert_layers: Iterable[int] = range(hosted[-1] + 1)
    if file is not None:
        expert_layers = file.expert_layers
    elif profile is not None:
        expert_layers = layer_bytes(plan, profile)
    if hosted == [number for number in expert_layers if number <= hosted[-1]]:
        return [("--n-cpu-moe", str(hosted[-1] + 1))]
    numbers = "|".join(map(str, hosted))
    return [("--override-tensor", rf"blk\.({numbers}){EXPERTS}=CPU")]


def _notes(plan: Plan, pipeline: LayerPipeline, file: GgufFile | None) -> Iterator[str]:
    """Yield the differences between the plan and llama.cpp."""
    yield from common.common_notes(plan, pipeline)
    if file is not None:
        yield from weight_notes(file, plan, pipeline)
    else:
        yield (
            f"NOTE: {_FILE} is a placeholder for the model in GGUF format; the plan's sizes are "
            f"for weights in {plan.workload.dtype}, a quantized file needs less."
        )
    if plan.host_experts:
        hosted = host_layers(plan)
        yield (
            f"NOTE: the experts of {len(hosted)} layers ({format_layers(hosted)}) are in host "
            "memory. The CPU computes them in steps of fewer than 32 tokens; for more tokens "
            "llama.cpp copies the experts of one layer to the GPU, memory that the plan doesn't "
            "include. --no-op-offload keeps them on the CPU; --load-mode none reads them into "
            "memory instead of mapping the file."
        )
    head_gpu = pipeline.stages[0].device.name
    yield (
        r"llama.cpp keeps the input embedding in CPU memory; --override-tensor "
        rf"'token_embd\.weight=CUDA0' places it, and a tied head, on {head_gpu} as in the plan."
    )
    if plan.workload.prefill_chunk_tokens is None:
        yield (
            "Prefill runs in chunks of 512 tokens, llama.cpp's default, which needs less memory "
            "than the single pass of the plan."
        )
    if plan.workload.images:
        yield "NOTE: the vision tower is a separate file in llama.cpp (--mmproj), on the first GPU."
    if len(pipeline.stages) > 1:
        yield (
            "--tensor-split sets the layers of each GPU; --fit off keeps llama.cpp from changing "
            "them."
        )
