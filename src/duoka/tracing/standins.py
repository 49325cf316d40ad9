"""Stand-ins: blocks that would do in training what an earlier one did, run as next to nothing.

A stand-in makes the block's outputs in the forward pass, and the gradients of its arguments in the
backward pass, so that its neighbours find what they would. It keeps nothing for the backward pass:
what it does itself is known from the block that it is like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import virtual
from .grouping import Group, tensors_in
from .recording import Recorder, Skipper, picture_made


def placeholder(position: int) -> int:
    """The number of a stand-in's gradient of an argument, until the real one is known."""
    return -1 - position


class TrainingSkipper(Skipper):
    """Recognises blocks that are alike and between alike ones, and stands in for them."""

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        super().__init__(model, groups)
        # In the backward pass the block after one comes before it.
        after = [*self._signatures[1:], None]
        self._signatures = [
            None if own is None else (own, following)
            for own, following in zip(self._signatures, after, strict=True)
        ]

    def stand_in(self, picture: Any, recorder: Recorder, block: int, call: Any) -> Any:
        """Make a block's outputs, with a way back to its arguments."""
        wanted: list[tuple[Any, torch.dtype, int]] = []

        def want(shape: Any, dtype: torch.dtype, number: int) -> torch.Tensor:
            wanted.append((shape, dtype, number))
            return torch.empty(0)

        picture_made(picture, call, want)
        stand_in: Any = _StandIn
        made = iter(stand_in.apply((recorder, block, wanted), *tensors_in(call)))
        return picture_made(picture, call, lambda *_: next(made))


class _StandIn(torch.autograd.Function):
    """Tensors out of nothing, and gradients out of nothing."""

    @staticmethod
    def forward(ctx: Any, task: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorder, block, wanted = task
        ctx.task = recorder, block
        ctx.pictures = [(each.shape, each.dtype, each.device) for each in arguments]
        device = next(each.device for each in arguments if isinstance(each, virtual.VirtualTensor))
        made = []
        for shape, dtype, number in wanted:
            tensor: Any = torch.empty(shape, dtype=dtype, device=device)
            recorder.adopt(tensor, block, number)
            made.append(tensor)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        recorder, block = ctx.task
        gradients: list[torch.Tensor | None] = []
        for position, (shape, dtype, device) in enumerate(ctx.pictures):
            gradient: Any = None
            if ctx.needs_input_grad[1 + position]:
                gradient = torch.empty(shape, dtype=dtype, device=device)
                recorder.adopt(gradient, block, placeholder(position))
            gradients.append(gradient)
        return None, *gradients
