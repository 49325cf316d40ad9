"""Parts: the plain tensors that a tensor consists of.

A quantized weight is one tensor to the model, of the shape and type that it stands for, and
several in memory: numbers, scales, zero points. PyTorch's protocol for such tensors
(``__tensor_flatten__``) names them. Nothing here knows how numbers are quantized.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from duoka.virtual import VirtualTensor


def is_composed(tensor: Tensor) -> bool:
    """Whether a tensor consists of others; one on a virtual GPU is as plain as one on CUDA."""
    return not isinstance(tensor, VirtualTensor) and is_traceable_wrapper_subclass(tensor)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold a tensor's bytes, by their names in it; itself, if it is one."""
    if not is_composed(tensor):
        return {"": tensor}
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return {
        f"{name}.{inner}".rstrip("."): part
        for name in names
        for inner, part in parts(getattr(tensor, name)).items()
    }


def num_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor takes in memory."""
    return sum(part.nbytes for part in parts(tensor).values())


def empty_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same make on a device, not filled."""
    if not is_composed(tensor):
        return torch.empty_like(tensor, device=device)
    names, context = cast(Any, tensor).__tensor_flatten__()
    inner = {name: empty_on(getattr(tensor, name), device) for name in names}
    return rebuilt(tensor, inner, context)


def rebuilt(tensor: Tensor, inner: dict[str, Tensor], context: Any) -> Tensor:
    """A tensor of the same class and shape as another, of other parts."""
    unflatten = cast(Any, type(tensor)).__tensor_unflatten__
    made: Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
    return made
