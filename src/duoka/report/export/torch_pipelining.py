"""torch.distributed.pipelining and torchtitan: the modules of each stage by name.

Sources: docs.pytorch.org, "Pipeline Parallelism" (`pipeline`, `SplitPoint`, ``split_spec``);
torchtitan 0.3: ``torchtitan/config/configs.py`` (``module_fqns_per_model_part``) and
``torchtitan/distributed/pipeline_parallel.py`` (the names of its models' modules).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, export_error, format_environment

TORCH = "torch.distributed.pipelining"
TITAN = "torchtitan"
_SCHEDULES = {"sequential": "1F1B", "gpipe": "GPipe", "1f1b": "1F1B"}


def export_torch(plan: Plan, _profile: Profile | None) -> Export:
    """Write the plan as a Python program; a stage can begin at any module."""
    runs = _stage_modules(plan)
    splits = ", ".join(f"{names[0]!r}: SplitPoint.BEGINNING" for names in runs[1:])
    devices = [plan.fleet.device(plan.placement.device_of(names[0]) or "") for names in runs]
    environment = format_environment(common.visible_environment(TORCH, devices))
    text = f"""\
# {environment} torchrun --nproc-per-node {len(runs)} THIS_FILE
from torch.distributed.pipelining import SplitPoint, pipeline

split_spec = {{{splits}}}
num_stages = {len(runs)}

# `example` is one micro-batch, as the model's keyword arguments.
pipe = pipeline(model, mb_args=(), mb_kwargs=example, split_spec=split_spec)
assert pipe.num_stages == num_stages
stage = pipe.build_stage(rank, torch.device("cuda", rank))"""
    return Export(tool=TORCH, text=text, notes=tuple(_torch_notes(plan)))


def _stage_modules(plan: Plan) -> list[list[str]]:
    """Return the modules of each stage in execution order.

    A tied head on the first device joins the last stage, since a stage can't return to a device.
    """
    if plan.offloaded or "cpu" in plan.devices:
        to_layer_pipeline(plan, TORCH)  # raises the error
    runs = [
        (device, [name for name, _ in entries])
        for device, entries in groupby(plan.placement.entries, key=lambda entry: entry[1])
    ]
    devices = [device for device, _ in runs]
    if devices[0] in devices[1:-1] or len(set(devices[1:])) < len(devices) - 1:
        again = next(device for device in devices if devices.count(device) > 1)
        raise export_error(
            TORCH, f"{again} has modules in several places", "plan with one stage for each GPU"
        )
    if len(devices) > 1 and devices[-1] == devices[0]:
        runs[-2][1].extend(runs.pop()[1])
    return [names for _, names in runs]


def _torch_notes(plan: Plan) -> Iterator[str]:
    """Yield the differences between the plan and torch.distributed.pipelining."""
    yield from common.common_notes(plan)
    if plan.placement.entries[0][1] == plan.placement.entries[-1][1] and len(plan.devices) > 1:
        yield (
            f"NOTE: {plan.placement.entries[-1][0]} is tied and runs on the first GPU in the "
            "plan; here it runs in the last stage, with a copy of the weights that the plan "
            "doesn't include."
        )
    if any(name.endswith("rotary_emb") for name, _ in plan.placement.entries):
        yield (
            "NOTE: with torch 2.13, stages lose the arguments of transformers' rotary "
            "embeddings, which run under no_grad; split such a model by hand at the names below."
        )
    yield (
        "The model is traced with torch.export; where that fails (caches, data-dependent "
        "branches), split it by hand. The pipelines support training and scoring, not generation."
    )
    if plan.workload.training is None:
        yield "NOTE: the plan is for generation; memory differs without a KV cache and with a loss."


def export_titan(plan: Plan, _profile: Profile | None) -> Export:
    """Write the plan as a torchtitan configuration."""
    pipeline = to_layer_pipeline(plan, TITAN)
    parts = titan_names(pipeline)
    training = plan.workload.training
    schedule = _SCHEDULES[training.schedule] if training is not None else "1F1B"
    environment = format_environment(common.visible_environment(TITAN, pipeline.devices))
    lines = ",\n".join(f"    {json.dumps(part)}" for part in parts)
    text = f"""\
# {environment} torchrun --nproc-per-node {len(parts)} …
[parallelism]
pipeline_parallel_degree = {len(parts)}
pipeline_parallel_schedule = "{schedule}"
module_fqns_per_model_part = [
{lines}
]"""
    return Export(tool=TITAN, text=text, notes=tuple(_titan_notes(plan, pipeline)))


def titan_names(pipeline: LayerPipeline) -> list[list[str]]:
    """Return the modules of each stage under torchtitan's names."""
    if not pipeline.layers:
        raise export_error(TITAN, "it names no layers", "plan the model without a device map")
    tower = [name for name in pipeline.before if "vis" in name]
    parts = [
        [f"layers.{number}" for number in range(stage.start, stage.stop)]
        for stage in pipeline.stages
    ]
    parts[0][:0] = [*(["vision_encoder"] if tower else []), "tok_embeddings"]
    parts[-1] += ["norm", "lm_head"]
    return parts


def _titan_notes(plan: Plan, pipeline: LayerPipeline) -> Iterator[str]:
    """Yield the differences between the plan and torchtitan."""
    yield from common.common_notes(plan, pipeline)
    yield (
        "torchtitan trains its own models, with modules called tok_embeddings, layers.N, norm and "
        "lm_head (before 0.3 \"output\"); it doesn't read this checkpoint's names. From 0.3 its "
        "configuration is Python, with the same fields in ParallelismConfig."
    )
    if plan.workload.training is None:
        yield (
            "NOTE: the plan is for generation; training needs far more memory: plan it with "
            "--train."
        )
