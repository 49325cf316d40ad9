"""Models in stages, all in one process, for tests that hold them against one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoka import Placement
from duoka.forecast.workload import Training
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.dispatch.dispatch import without_data
from duoka.stages.channels import LocalChannel
from duoka.stages.execute import Pipeline
from duoka.stages.interceptor import Interceptor
from duoka.stages.route import Route, find_route
from duoka.stages.schedule import order_passes
from duoka.tracing import TraceSpec, trace_call

Batch = Mapping[str, Any]


def placement_of(model: nn.Module, inputs: Batch, num_devices: int) -> Placement:
    """Duoka's blocks of a model, as many on each device; what is tied together stays so."""
    profile = trace_call(without_data(model), TraceSpec(fingerprint="test"), dict(inputs))
    blocks = [block for block in profile.blocks if block.modules]
    devices = [index * num_devices // len(blocks) for index in range(len(blocks))]
    entries = []
    for index, block in enumerate(blocks):
        if block.tied_to is not None:
            devices[index] = devices[block.tied_to]
        entries += [(module, f"cuda:{devices[index]}") for module in block.modules]
    return Placement(entries=tuple(entries))


def route_of(model: nn.Module, placement: Placement, batch: Batch) -> Route:
    """What crosses between the stages of a model when it learns from a batch."""

    def run(copied: nn.Module, device: torch.device) -> object:
        return copied(**to_device(dict(batch), device))

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
    pipeline = Pipeline(Interceptor(model, placement), LocalChannel(stages), stages)
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
