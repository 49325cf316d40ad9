"""Weights of which only the bytes are known: what a published quantized checkpoint stores.

Such a weight has the shape and the type that it stands for, and consists of the tensors that the
checkpoint's headers list. A model with these can be traced and proved, not computed with. A
product charges what the formats' own fallback kernels take: the weight, unpacked into its type, for
the time of the product; of a stack of experts, one expert. Fused kernels take less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .composed import Composed


class StoredWeight(Composed):
    """A weight without numbers; it holds what is stored."""

    products = frozenset(
        {
            F.linear,
            torch.matmul,
            torch.mm,
            torch.bmm,
            torch.addmm,
            torch.baddbmm,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.__rmatmul__,
            F.grouped_mm,
            getattr(torch, "_grouped_mm", F.grouped_mm),  # an older name of it
        }
    )

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply by what is unpacked for the time of the product."""
        args = tuple(_unpacked(each) for each in args)
        return func(*args, **{name: _unpacked(each) for name, each in kwargs.items()})

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """View it in another shape, or a part of it; it holds all the same."""
        weight = args[0]
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if not is_view or not isinstance(weight, StoredWeight):
            return super().viewed(func, args, kwargs)
        sketch = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        shown = func(sketch, *args[1:], **kwargs)
        return StoredWeight(weight.held, shown.shape, weight.dtype)


def _unpacked(value: Any) -> Any:
    """A weight in the type that it stands for; of a stack one expert, shown as often as needed."""
    if not isinstance(value, StoredWeight):
        return value
    *stack, rows, columns = value.shape
    # Made from what is stored, so that whoever traces sees whose weight it is.
    one = next(iter(value.held.values())).new_empty((rows, columns), dtype=value.dtype)
    return one.expand(*stack, rows, columns) if stack else one
