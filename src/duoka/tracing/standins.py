"""Stand-ins: blocks that would do in training what an earlier one did, run as next to nothing.

A stand-in makes the block's outputs in the forward pass, and the gradients of its arguments in the
backward pass, so that its neighbours find what they would. It keeps nothing for the backward pass:
what it does itself is known from the block that it is like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from duoka import virtual

from .blocks import Group, tensors_in
from .record import Home, Recorder, Skipper, picture_made


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
        self._given: dict[int, set[Home]] = {}

    def call(
        self,
        recorder: Recorder,
        place: tuple[int, Any],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a block, or make its outputs only where one that is like it has run."""
        given = self._given[place[0]] = set()
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, virtual.VirtualTensor) and tensor.requires_grad:
                home = recorder.home_of(tensor)
                if home is not None:
                    given.add(home)
        return super().call(recorder, place, forward, args, kwargs)

    def speaks_for_others(self, recorder: Recorder, first: int) -> bool:
        """Whether what a block does tells what others do that are like it.

        One whose argument others were given as well (a residual that is a block's argument) keeps
        it alive for its backward pass, which a stand-in doesn't, and adds up the gradients that all
        of them make, which lie elsewhere for another block.
        """
        if any(recorder.gives_others(first, home) for home in self._given[first]):
            return False
        return super().speaks_for_others(recorder, first)

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
