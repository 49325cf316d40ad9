"""Composed weights: tensors that consist of plain ones, and what PyTorch asks of their classes.

Here is all but how such a weight is multiplied. Others that PyTorch knows (torchao's) bring their
own; `parts` reads them all, by PyTorch's protocol for such tensors (``__tensor_flatten__``).

Of a `StoredWeight` only the bytes are known: it has the shape and the type that it stands for, and
consists of the tensors that a quantized checkpoint's headers list. A model with these can be traced
and proved, not computed with. A product charges what the formats' own fallback kernels take: the
weight, unpacked into its type, for the time of the product; of a stack of experts, one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from duoka.virtual import VirtualTensor

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Composed(Tensor):
    """A weight of several plain tensors, all on one device, by names that are identifiers.

    Shape and dtype are those that it stands for.
    """

    tensors: dict[str, Tensor]
    products: ClassVar[frozenset[Any]] = frozenset({F.linear})
    """The functions that `product` computes."""

    @staticmethod
    def __new__(
        cls: type[Composed], tensors: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Composed:
        """Make one; see the class."""
        device = next(iter(tensors.values())).device
        weight: Composed = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        weight.tensors = dict(tensors)
        return weight

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a product of such weights is."""
        raise NotImplementedError

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What any other operator makes of such a weight."""
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same weight of other tensors."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return type(self)(tensors, self.shape, self.dtype)

    def __getattr__(self, name: str) -> Tensor:
        tensors: dict[str, Tensor] = object.__getattribute__(self, "tensors")
        try:
            return tensors[name]
        except KeyError:
            raise AttributeError(name) from None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.tensors), self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Composed:
        return cls(inner, size, context)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in cls.products:
            return cls.product(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        weight, device = args[0], (kwargs or {}).get("device")
        if isinstance(weight, Composed):
            if func in _COPIES:
                return weight.map(func)
            if func is torch.ops.aten._to_copy.default and device is not None:
                return weight.map(lambda tensor: tensor.to(device))
        return cls.viewed(func, args, kwargs or {})


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
    result: Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
    return result


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
        args = tuple(_unpacked(arg) for arg in args)
        return func(*args, **{name: _unpacked(arg) for name, arg in kwargs.items()})

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """View it in another shape, or a part of it; it holds all the same."""
        weight = args[0]
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if not is_view or not isinstance(weight, StoredWeight):
            return super().viewed(func, args, kwargs)
        sketch = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        shown = func(sketch, *args[1:], **kwargs)
        return StoredWeight(weight.tensors, shown.shape, weight.dtype)


def _unpacked(value: Any) -> Any:
    """A weight in the type that it stands for; of a stack one expert, shown as often as needed."""
    if not isinstance(value, StoredWeight):
        return value
    *stack, rows, columns = value.shape
    # Made from what is stored, so that whoever traces sees whose weight it is.
    one = next(iter(value.tensors.values())).new_empty((rows, columns), dtype=value.dtype)
    return one.expand(*stack, rows, columns) if stack else one
