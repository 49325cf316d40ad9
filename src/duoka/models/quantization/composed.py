"""Composed weights: tensors made of several plain tensors, by PyTorch's wrapper-subclass protocol.

Subclasses of `Composed` define products. torchao has composed tensors of its own; `parts` reads all
of them by ``__tensor_flatten__``.

A `StoredWeight` has the shape and dtype of the original weight, and the tensors listed in the
headers of a quantized checkpoint; their values are unknown. A model with such weights can be traced
and proved, but not run. A product allocates the memory that fallback kernels of these formats need:
the weight, unpacked into its dtype, for the duration of the product. For a stack of experts that is
a single expert.
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


# PyTorch calls a tensor subclass at two levels. `__torch_function__` gets `F.linear` before it is
# decomposed, and passes it to `product`. `__torch_dispatch__` gets ATen operators: detach, clone
# and copies to a device are applied to each inner tensor; any other operator is passed to `viewed`,
# because it would need the values.
class Composed(Tensor):
    """A weight made of several plain tensors, by name, on the same device.

    Shape and dtype are those of the original weight.
    """

    tensors: dict[str, Tensor]
    products: ClassVar[frozenset[Any]] = frozenset({F.linear})
    """The functions that `product` computes."""

    @staticmethod
    def __new__(
        cls: type[Composed], tensors: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Composed:
        """Create a weight; see the class."""
        device = next(iter(tensors.values())).device
        weight: Composed = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        weight.tensors = dict(tensors)
        return weight

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function of `products` with composed weights among the arguments."""
        raise NotImplementedError

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply an operator other than products and copies."""
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a weight with a function applied to each of its tensors."""
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.products:
            return cls.product(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        weight, device = args[0], (kwargs or {}).get("device")
        if isinstance(weight, Composed):
            if func in _COPIES:
                return weight.map(func)
            if func is torch.ops.aten._to_copy.default and device is not None:
                return weight.map(lambda tensor: tensor.to(device))
        return cls.viewed(func, args, kwargs or {})


def is_composed(tensor: Tensor) -> bool:
    """Return True if a tensor is made of several; tensors on virtual GPUs count as plain."""
    return not isinstance(tensor, VirtualTensor) and is_traceable_wrapper_subclass(tensor)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors inside a tensor, by name; for a plain tensor {"": tensor}."""
    if not is_composed(tensor):
        return {"": tensor}
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return {
        f"{name}.{inner}".rstrip("."): part
        for name in names
        for inner, part in parts(getattr(tensor, name)).items()
    }


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in memory."""
    return sum(part.nbytes for part in parts(tensor).values())


def empty_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor of the same class and shape on a device."""
    if not is_composed(tensor):
        return torch.empty_like(tensor, device=device)
    names, context = cast(Any, tensor).__tensor_flatten__()
    inner = {name: empty_on(getattr(tensor, name), device) for name in names}
    unflatten = cast(Any, type(tensor)).__tensor_unflatten__
    result: Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
    return result


class StoredWeight(Composed):
    """A weight made of a quantized checkpoint's stored tensors, without values."""

    products = frozenset({F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm})
    products |= {Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__}
    # `torch._grouped_mm` is an older name of `F.grouped_mm`.
    products |= {F.grouped_mm, getattr(torch, "_grouped_mm", F.grouped_mm)}

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a product, with weights unpacked for its duration."""
        args = tuple(_unpack(arg) for arg in args)
        return func(*args, **{name: _unpack(arg) for name, arg in kwargs.items()})

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """View or index the weight; the view holds all stored tensors. Other operators fail."""
        weight = args[0]
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if not is_view or not isinstance(weight, StoredWeight):
            return super().viewed(func, args, kwargs)
        sketch = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        shown = func(sketch, *args[1:], **kwargs)
        return StoredWeight(weight.tensors, shown.shape, weight.dtype)


def _unpack(value: Any) -> Any:
    """Allocate the unpacked weight in its dtype; for a stack, a single expert, expanded."""
    if not isinstance(value, StoredWeight):
        return value
    *stack, rows, columns = value.shape
    # Created from a stored tensor, so that tracing finds the module that owns the weight.
    expert = next(iter(value.tensors.values())).new_empty((rows, columns), dtype=value.dtype)
    return expert.expand(*stack, rows, columns) if stack else expert
