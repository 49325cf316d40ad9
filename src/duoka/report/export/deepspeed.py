"""DeepSpeed: stages for its `PipelineModule`.

Source: deepspeed.readthedocs.io, "Pipeline Parallelism"; deepspeed 0.19.8,
``deepspeed/runtime/pipe/module.py`` (`PipelineModule._partition_layers`): boundaries can't be
given, only a method: "uniform", "parameters" or "type:…". Therefore each stage becomes one layer;
"uniform" then assigns one such layer to each rank (``deepspeed/runtime/utils.py``,
`partition_uniform`).
"""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan

from . import common
from .stages import LayerPipeline, to_layer_pipeline
from .text import Export, format_environment

NAME = "DeepSpeed"


def export(plan: Plan, _profile: Profile | None) -> Export:
    """Write the plan as a Python program."""
    pipeline = to_layer_pipeline(plan, NAME)
    environment = format_environment(common.visible_environment(NAME, pipeline.devices))
    text = f"""\
# {environment} torchrun --nproc-per-node {len(pipeline.stages)} THIS_FILE
from itertools import pairwise

from deepspeed.pipe import PipelineModule
from torch import nn

# `layers` is the model as a list: embedding, layers, norm and head; each
# takes the output of the previous one.
boundaries = {boundaries(pipeline)!r}
stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(boundaries)]
model = PipelineModule(
    layers=stages, num_stages={len(pipeline.stages)}, partition_method="uniform",
    loss_fn=loss_fn,
)"""
    return Export(tool=NAME, text=text, notes=tuple(_notes(plan, pipeline)))


def boundaries(pipeline: LayerPipeline) -> list[int]:
    """Return the stage boundaries in the list [embedding, layers, norm, head]."""
    inner = [1 + stage.start for stage in pipeline.stages[1:]]
    return [0, *inner, 1 + pipeline.num_layers + 2]


def _notes(plan: Plan, pipeline: LayerPipeline) -> Iterator[str]:
    """Yield the differences between the plan and DeepSpeed."""
    yield from common.common_notes(plan, pipeline)
    yield (
        "PipelineModule has no parameter for boundaries: each stage becomes one layer, assigned "
        "to one GPU. Activation checkpointing then applies to whole stages."
    )
    yield (
        "NOTE: DeepSpeed's pipelines are for training (with ZeRO 0 or 1). Its inference splits "
        "every layer evenly over GPUs (tensor_parallel) and can't follow this plan."
    )
    if pipeline.returning:
        yield "NOTE: tied weights need a TiedLayerSpec in both stages, outside of nn.Sequential."
    yield from common.training_note(plan)
