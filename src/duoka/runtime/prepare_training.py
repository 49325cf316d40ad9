"""Prepares a model for training: freezes parameters that get no gradient, and adds adapters.

A vision tower is frozen if the sequences have no images, for example, and by default even if they
have. The parameters that get gradients are found in autograd's graph of a short forward pass, on a
virtual GPU without data, before any weight is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.forecast.workload import Training, Workload
from duoka.models import make_trainable
from duoka.models.quantization import freeze_quantized
from duoka.planner.placement import Placement

from .call.learner import Learner
from .dispatch.dispatch import without_data
from .dispatch.place_tensors import invent_values, parameter_bytes, place
from .image_inputs import ImagePrompts, prompts_for

_TOKENS = 8
_LEAF = "AccumulateGrad"


def prepare_for_training(
    model: nn.Module, workload: Workload, *, has_adapters: bool = True
) -> ImagePrompts | None:
    """Change a model in place so that training steps can run on it.

    Return the prompts with the workload's images; None for a workload without images.
    """
    assert workload.training is not None, "the workload is to train"
    prompts = prompts_for(model, workload.conditions)
    dtype = getattr(torch, workload.dtype)
    frozen = find_unreached(model, prompts if workload.training.train_vision else None)
    make_trainable(model, workload.training, dtype, frozen, has_adapters=has_adapters)
    return prompts


def find_unreached(model: nn.Module, prompts: ImagePrompts | None = None) -> list[str]:
    """Return the names of the outermost modules and parameters that get no gradient from the loss.

    Experts count as reached, since other tokens may choose them.
    """
    bare: Any = without_data(model)
    freeze_quantized(bare)
    for parameter in bare.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    bare.eval()  # training mode may drop layers at random

    def trace(data: str) -> list[str]:
        copied = copy.deepcopy(bare)
        tokens = _TOKENS if prompts is None else prompts.least_tokens
        workload = Workload(
            prompt_tokens=tokens, new_tokens=0, dtype="float32", training=Training(method="full")
        )
        with virtual.unnamed_gpus([None], data=data):
            device = virtual.virtual_device(0)
            place(copied, Placement(entries=(("", str(device)),)))
            if data == "cpu":
                invent_values(copied)
            reached = _reached_parameters(Learner(copied, workload, device, prompts).forward())
            return list(_outermost_unreached(copied, reached))

    return virtual.with_values(trace, partial(parameter_bytes, bare))


def _reached_parameters(loss: torch.Tensor) -> set[int]:
    """Return the ids of the parameters that get gradients from a loss."""
    # Breadth first over autograd's graph, from the loss to its leaves: the nodes that accumulate
    # gradients into parameters. Other parameters get no gradient, whatever the batch contains.
    nodes: list[Any] = [loss.grad_fn]
    visited = set(nodes)
    for node in nodes:  # which grows during the loop
        successors = {function for function, _ in getattr(node, "next_functions", ())}
        following = successors - visited - {None}
        visited |= following
        nodes += following
    return {id(node.variable) for node in nodes if type(node).__name__ == _LEAF}


def _outermost_unreached(module: nn.Module, reached: set[int], path: str = "") -> Iterator[str]:
    """Yield the outermost modules and parameters without a reached parameter inside."""
    if "expert" in path.rpartition(".")[2]:
        return
    prefix = f"{path}." if path else ""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in reached:
            yield f"{prefix}{name}"
    for name, child in module.named_children():
        inside = {id(parameter) for parameter in child.parameters() if parameter.requires_grad}
        if inside & reached:
            yield from _outermost_unreached(child, reached, f"{prefix}{name}")
        elif inside:
            yield f"{prefix}{name}"
