"""Frozen quantized weights in training: gradients pass through them to the inputs.

torchao's products, and products that unpack a weight, save the unpacked copy for the backward pass:
together, a whole unquantized model. Here the weight is unpacked again for the duration of the
backward product instead, as in bitsandbytes' own layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.errors import ModelError

from .composed import is_composed
from .stacked import ExpertStack
from .weights import Nf4Weight

_PASSABLE = ("Int8Tensor", "Nf4Weight")


def freeze_quantized(model: nn.Module) -> None:
    """Replace the class of a model's quantized linear layers by `FrozenLinear`.

    Raises
    ------
    ModelError
        If a quantized layer isn't a plain `nn.Linear`, or its weight has no known gradient.
    """
    for name, module in model.named_modules():
        for stack in module.parameters(recurse=False):
            if isinstance(stack, ExpertStack) and not hasattr(stack.weight_class, "unpacked"):
                raise _no_gradient(name, stack.weight_class)
        weight = module._parameters.get("weight")
        if weight is not None and is_composed(weight):
            if type(module) is not nn.Linear or type(weight).__name__ not in _PASSABLE:
                raise _no_gradient(f"{name}, {type(module).__name__}", type(weight))
            module.__class__ = FrozenLinear


def _no_gradient(name: str, weight_class: type[Any]) -> ModelError:
    """Return the error for a quantized weight without a gradient for its inputs."""
    return ModelError(
        f"{name} has no backward: its weight is {weight_class.__name__}",
        hint="train the model with --quantize nf4, or without --quantize",
    )


class FrozenLinear(nn.Linear):
    """A linear layer with a quantized weight that keeps no copy for the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs by the weight, under autocast in autocast's dtype."""
        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        product: Any = _Product
        result: Tensor = product.apply(inputs, self.weight, self.bias)
        return result


# int8 has W = diag(s) Q, with a scale for each output, so dX = dY W = (dY · s) Q. Scaling dY costs
# less than scaling Q; a copy of Q in the gradient's dtype is the only temporary of W's size.
class _Product(torch.autograd.Function):
    """`F.linear` with a gradient for its input only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # not by save_for_backward: hooks on saved tensors needn't see it
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:
        (gradient,), weight = gradients, ctx.weight
        if isinstance(weight, Nf4Weight):
            return gradient @ weight.unpacked(gradient.dtype), None, None
        scaled = gradient * weight.scale.to(gradient.dtype).flatten()
        return scaled @ weight.qdata.to(gradient.dtype), None, None
