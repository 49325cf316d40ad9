"""Composed weights: tensors that consist of plain ones, and what PyTorch asks of their classes.

Here is all but how such a weight is multiplied. Others that PyTorch knows (torchao's) bring their
own; `parts` reads them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Composed(Tensor):
    """A weight of several plain tensors.

    Parameters
    ----------
    held : mapping of str to Tensor
        What it consists of, by names that are identifiers; all on one device.
    shape : torch.Size
        Of the weight.
    dtype : torch.dtype
        What it stands for.
    """

    held: dict[str, Tensor]
    products: ClassVar[frozenset[Any]] = frozenset({F.linear})
    """The functions that `product` computes."""

    @staticmethod
    def __new__(
        cls: type[Composed], held: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Composed:
        """Make one; see the class."""
        device = next(iter(held.values())).device
        made: Composed = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.held = dict(held)
        return made

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a product of such weights is."""
        raise NotImplementedError

    @classmethod
    def viewed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What any other operator makes of such a weight."""
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same weight of other tensors."""
        held = {name: change(tensor) for name, tensor in self.held.items()}
        return type(self)(held, self.shape, self.dtype)

    def __getattr__(self, name: str) -> Tensor:
        held: dict[str, Tensor] = object.__getattribute__(self, "held")
        try:
            return held[name]
        except KeyError:
            raise AttributeError(name) from None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.held), self.dtype

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
                return weight.each(func)
            if func is torch.ops.aten._to_copy.default and device is not None:
                return weight.each(lambda tensor: tensor.to(device))
        return cls.viewed(func, args, kwargs or {})
