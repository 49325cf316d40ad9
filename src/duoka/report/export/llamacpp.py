"""llama.cpp: a command line for ``llama-server`` with layers split over GPUs.

Sources: options and the order of proportions (ggml-org/llama.cpp, docs/multi-gpu.md; common/arg.cpp
as in llama-cpp-python 0.3.36); which layer goes where (src/llama-model.cpp, `load_tensors`): of n
layers and one output after them, the last ``-ngl`` are dealt; the k-th of m goes to the first
device whose running share of the proportions is larger than k / m. A file may have one more layer
than the model, behind the others, which predicts the token after the next (conversion/*.py,
``num_nextn_predict_layers``). With the numbers of layers as proportions, and two more on the last
device, the shares are multiples of 1 / (n + 2), rounded as k / m is, so that each device gets just
its layers where the file has that layer, m = n + 2. Where it has none, m = n + 1, they are the same
ones: for each b up to n, (b - 1) / (n + 1) < b / (n + 2) < b / (n + 1).

A tied head is the input embedding's tensor under the same name, duplicated where the output is
(src/models, ``TENSOR_DUPLICATED``), unless an override by that name has put both into one buffer
(src/llama-model-loader.cpp, `create_tensor`).
"""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .stages import LayerPipeline, read_pipeline
from .text import Export, format_command

NAME = "llama.cpp"
_FILE = "MODEL.gguf"
_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def export(plan: Plan, _profile: Profile | None) -> Export:
    """Write the plan as a shell command."""
    pipeline = read_pipeline(plan, NAME)
    workload, stages = plan.workload, pipeline.stages
    environment = common.visible_environment(NAME, pipeline.devices)
    names = ",".join(f"CUDA{number}" for number in range(len(stages)))
    options = [("--model", _FILE), ("--device", names)]
    if len(stages) > 1:
        *first_counts, last_count = pipeline.counts
        options += [
            ("--split-mode", "layer"),
            ("--tensor-split", ",".join(map(str, [*first_counts, last_count + 2]))),
            ("--n-gpu-layers", str(pipeline.num_layers + 2)),
        ]
    else:
        options += [("--split-mode", "none"), ("--main-gpu", "0"), ("--n-gpu-layers", "all")]
    # The context is dealt to the slots of the server.
    options.append(("--ctx-size", str(workload.batch * workload.context_tokens)))
    options.append(("--parallel", str(workload.batch)))
    if isinstance(workload.prefill_chunk_tokens, int):
        chunk = str(workload.prefill_chunk_tokens)
        options += [("--batch-size", chunk), ("--ubatch-size", chunk)]
    kind = "q8_0" if workload.has_int8_cache else _TYPES.get(workload.dtype, "f16")
    options += [("--cache-type-k", kind), ("--cache-type-v", kind), ("--fit", "off")]
    return Export(
        tool=NAME,
        text=format_command(environment, ["llama-server"], options),
        notes=tuple(_notes(plan, pipeline)),
    )


def _notes(plan: Plan, pipeline: LayerPipeline) -> Iterator[str]:
    yield from common.common_notes(plan, pipeline)
    yield (
        f"NOTE: {_FILE} is a placeholder for the model in GGUF format; the plan's sizes are for "
        f"weights in {plan.workload.dtype}, a quantized file needs less."
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
