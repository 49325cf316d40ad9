"""Weights of which only the bytes are known: what a published quantized checkpoint stores.

Such a weight has the shape and the type that it stands for, and consists of the tensors that the
checkpoint's headers list. A model with these can be traced and proved, not computed with. A
product charges what the formats' own fallback kernels take: the weight, unpacked into its type, for
the time of the product; of a stack of experts, one expert. Fused kernels take less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_PRODUCTS = frozenset(
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
        torch._grouped_mm,
    }
)


class StoredWeight(Tensor):
    """A weight without numbers.

    Parameters
    ----------
    held : mapping of str to Tensor
        What is stored, by names that are identifiers; all on one device.
    shape : torch.Size
        Of the weight.
    dtype : torch.dtype
        What it is unpacked to.
    """

    held: dict[str, Tensor]

    @staticmethod
    def __new__(
        cls: type[StoredWeight],
        held: Mapping[str, Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> StoredWeight:
        """Make one; see the class."""
        device = next(iter(held.values())).device
        made: StoredWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        made.held = dict(held)
        return made

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["held"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.held), self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> StoredWeight:
        return StoredWeight(inner, size, context)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args = tuple(_unpacked(each) for each in args)
            kwargs = {name: _unpacked(each) for name, each in kwargs.items()}
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        weight = args[0]
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if not is_view or not isinstance(weight, StoredWeight):
            raise NotImplementedError(f"{func} of a weight that is stored quantized")
        sketch = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        shown = func(sketch, *args[1:], **(kwargs or {}))
        return StoredWeight(weight.held, shown.shape, weight.dtype)


def _unpacked(value: Any) -> Any:
    """A weight in the type that it stands for; of a stack one expert, shown as often as needed."""
    if not isinstance(value, StoredWeight):
        return value
    *stack, rows, columns = value.shape
    # Made from what is stored, so that whoever traces sees whose weight it is.
    one = next(iter(value.held.values())).new_empty((rows, columns), dtype=value.dtype)
    return one.expand(*stack, rows, columns) if stack else one
