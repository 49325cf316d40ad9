"""Models in stages, all in one process, for tests that hold them against one device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoka import Placement, virtual
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.dispatch.place_tensors import parameter_bytes
from duoka.stages.channels import LocalChannel
from duoka.stages.execute import StagePipeline
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.route import Route, find_route
from duoka.stages.schedule import order_passes
from duoka.tracing import TraceSpec, trace_call
from duoka.tracing.blocks import find_groups

Batch = Mapping[str, Any]


def placement_of(model: nn.Module, batch: Batch, num_devices: int) -> Placement:
    """Duoka's blocks of a model, as many on each device; what is tied together stays so."""

    def trace(data: str) -> Profile:
        spec = TraceSpec(fingerprint="test", data=data)
        # Stages take no cut that only a move by the model's own code allows.
        module = sys.modules["duoka.tracing.trace_generation"]
        with patch.object(module, "find_groups", lambda model, run, **_: find_groups(model, run)):
            return trace_call(without_data(model), spec, _inputs(model, batch))

    profile = virtual.with_values(trace, partial(parameter_bytes, model))
    blocks = [block for block in profile.blocks if block.modules]
    untied = [index for index, block in enumerate(blocks) if block.tied_to is None]
    # The larger shares are the last ones, so that cuts fall between layers.
    devices = {
        index: num_devices - 1 - rest * num_devices // len(untied)
        for rest, index in enumerate(reversed(untied))
    }
    entries = tuple(
        (module, f"cuda:{devices[index if block.tied_to is None else block.tied_to]}")
        for index, block in enumerate(blocks)
        for module in block.modules
    )
    placement = Placement(entries=entries)
    assert len(placement.devices) == num_devices, "it is in stages"
    return placement


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """A batch without its labels, which are the last stage's own affair."""
    inputs = dict(batch)
    labels = inputs.pop("labels", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs.setdefault("decoder_input_ids", labels)
    return inputs


def route_of(model: nn.Module, placement: Placement, batch: Batch) -> Route:
    """What crosses between the stages of a model when it learns from a batch."""

    def run(copied: nn.Module, device: torch.device) -> object:
        return copied(**to_device(_inputs(model, batch), device))

    return find_route(model, placement, run)


@dataclass(frozen=True)
class Learnt:
    """Losses of the micro-batches, and the gradients of all together."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]


def learn_whole(model: PreTrainedModel, batches: Sequence[Batch]) -> Learnt:
    """Micro-batches on one device, one after another."""
    model = copy.deepcopy(model)
    losses = []
    for batch in batches:
        loss: Tensor = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    return Learnt(losses, _gradients(model))


def learn_in_stages(
    model: PreTrainedModel, placement: Placement, batches: Sequence[Batch], schedule: Any
) -> Learnt:
    """The same in the stages of a placement, whose devices only say what belongs together."""
    model = copy.deepcopy(model)
    routes = [route_of(model, placement, batch) for batch in batches]
    training = Training(method="full", micro_batches=len(batches), schedule=schedule)
    stages = [torch.device("cpu")] * routes[0].num_stages
    pipeline = StagePipeline(BlockInterceptor(model, placement), LocalChannel(stages), stages)
    passes = [timed.step for timed in order_passes(routes[0].devices, training)]
    losses = pipeline.run(routes, passes, lambda number, device: model(**batches[number]).loss)
    return Learnt(losses, _gradients(model))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differences(expected: Learnt, learnt: Learnt, *, tolerance: float = 1e-5) -> list[str]:
    """What differs by more than the tolerance, relative to the largest value."""
    pairs = list(zip(expected.losses, learnt.losses, strict=True))
    problems = [f"loss: {one} and {other}" for one, other in pairs if not one.isclose(other)]
    for name, value in expected.gradients.items():
        other = learnt.gradients[name]
        if (value is None) != (other is None):
            problems.append(f"{name}: one has a gradient")
        if value is not None and other is not None:
            worst = (value - other).abs().max().item()
            if worst > tolerance * max(1.0, value.abs().max().item()):
                problems.append(f"gradient of {name} by {worst:.1e}")
    return problems
