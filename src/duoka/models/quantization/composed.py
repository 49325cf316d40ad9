"""Composed weights: tensors of several plain tensors, by PyTorch's protocol for such classes.

Subclasses define products. Other classes that PyTorch knows (torchao's) have their own; `parts`
reads all of them, by ``__tensor_flatten__``.

Of a `StoredWeight` only the bytes are known: it has the shape and type of the original weight, and
consists of the tensors that a quantized checkpoint's headers list. A model with such weights can be
traced and proved, not computed with. A product allocates what the formats' own fallback kernels
allocate: the weight, unpacked into its type, for the time of the product; of a stack of experts, a
single expert.
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


# PyTorch calls a tensor subclass at two levels. `__torch_function__` sees `F.linear` before it is
# decomposed: the products with their own kernels end there. What reaches `__torch_dispatch__` is an
# ATen operator: detach, clone and copies to a device are applied to each inner tensor; any other
# operator would need the numbers, and is left to the subclass (`viewed`).
class Composed(Tensor):
    """A weight of several plain tensors on a device, by name.

    Shape and dtype are those of the original weight.
    """

    tensors: dict[str, Tensor]
    products: ClassVar[frozenset[Any]] = frozenset({F.linear})
    """The functions that `product` computes."""

    @staticmethod
    def __new__(
        cls: type[Composed], tensors: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Composed:
        """Make a weight; see the class."""
        device = next(iter(tensors.values())).device
        weight: Composed = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        weight.tensors = dict(tensors)
        return weight

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a product with such weights."""
        raise NotImplementedError

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply any other operator to such a weight."""
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with each of its tensors changed."""
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
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
    """Return True if a tensor consists of others; tensors on virtual GPUs count as plain."""
    return not isinstance(tensor, VirtualTensor) and is_traceable_wrapper_subclass(tensor)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors with a tensor's bytes, by name; a plain tensor has the name ""."""
    if not is_composed(tensor):
        return {"": tensor}
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return {
        f"{name}.{inner}".rstrip("."): part
        for name in names
        for inner, part in parts(getattr(tensor, name)).items()
    }


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory."""
    return sum(part.nbytes for part in parts(tensor).values())


def empty_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor of the same class and shape on a device."""
    if not is_composed(tensor):
        return torch.empty_like(tensor, device=device)
    names, context = cast(Any, tensor).__tensor_flatten__()
    inner = {name: empty_on(getattr(tensor, name), device) for name in names}
    unflatten = cast(Any, type(tensor)).__tensor_unflatten__
    result: Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
    return result


class StoredWeight(Composed):
    """A weight without numbers, made of the stored tensors."""

    products = frozenset({F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm})
    products |= {Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__}
    # The second one is an older name of the first.
    products |= {F.grouped_mm, getattr(torch, "_grouped_mm", F.grouped_mm)}

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply by a weight that is unpacked for the time of the product."""
        args = tuple(_unpacked(arg) for arg in args)
        return func(*args, **{name: _unpacked(arg) for name, arg in kwargs.items()})

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """View the weight in another shape, or a part of it; the view holds all stored tensors."""
        weight = args[0]
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if not is_view or not isinstance(weight, StoredWeight):
            return super().viewed(func, args, kwargs)
        sketch = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        shown = func(sketch, *args[1:], **kwargs)
        return StoredWeight(weight.tensors, shown.shape, weight.dtype)


def _unpacked(value: Any) -> Any:
    """Unpack a weight into its type; of a stack a single expert, expanded."""
    if not isinstance(value, StoredWeight):
        return value
    *stack, rows, columns = value.shape
    # Made from a stored tensor, so that a tracer sees the owner of the weight.
    expert = next(iter(value.tensors.values())).new_empty((rows, columns), dtype=value.dtype)
    return expert.expand(*stack, rows, columns) if stack else expert
