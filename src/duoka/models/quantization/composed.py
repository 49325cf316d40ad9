"""Composed weights: tensors made of several plain tensors, by PyTorch's wrapper-subclass protocol.

Subclasses of `Composed` define products. torchao has composed tensors of its own; `parts` reads all
of them by ``__tensor_flatten__``.
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
