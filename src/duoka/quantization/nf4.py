"""Weights in NF4 (Dettmers et al., "QLoRA", 2023), packed and multiplied by bitsandbytes.

Two numbers to a byte, and one scale in float32 for each block of 64. For one token the kernel reads
the weight packed; for more it is unpacked for the time of the product. bitsandbytes decides between
the two by the card; here it is the same on all of them, so that what a product takes is known.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
_KIND = "nf4"


class Nf4Weight(Tensor):
    """A weight of a linear layer in NF4.

    Parameters
    ----------
    packed : Tensor
        uint8 [rows x columns / 2, 1].
    absmax : Tensor
        float32 [rows x columns / 64].
    shape : torch.Size
        [rows, columns].
    dtype : torch.dtype
        What it was made from.
    """

    packed: Tensor
    absmax: Tensor

    @staticmethod
    def __new__(
        cls: type[Nf4Weight],
        packed: Tensor,
        absmax: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Nf4Weight:
        """Make one; see the class."""
        made: Nf4Weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=packed.device
        )
        made.packed = packed
        made.absmax = absmax
        return made

    @staticmethod
    def of(weight: Tensor) -> Nf4Weight:
        """Quantize a weight [rows, columns]; the columns are a multiple of `BLOCK`."""
        import_module("bitsandbytes")
        operators = torch.ops.bitsandbytes
        packed, absmax = operators.quantize_4bit(weight.contiguous(), BLOCK, _KIND, torch.uint8)
        return Nf4Weight(packed, absmax, weight.shape, weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "absmax"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Nf4Weight:
        return Nf4Weight(inner["packed"], inner["absmax"], size, context)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
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
        if func is torch.ops.aten.detach.default:
            return Nf4Weight(weight.packed, weight.absmax, weight.shape, weight.dtype)
        if func is torch.ops.aten._to_copy.default and device is not None:
            packed, absmax = weight.packed.to(device), weight.absmax.to(device)
            return Nf4Weight(packed, absmax, weight.shape, weight.dtype)
        raise NotImplementedError(f"{func} of a weight in NF4")


def _linear(given: Tensor, weight: Nf4Weight, bias: Tensor | None = None) -> Tensor:
    operators = torch.ops.bitsandbytes
    shape = list(weight.shape)
    if given.numel() == given.shape[-1]:
        found: Tensor = operators.gemm_4bit(
            given, weight.packed, shape, weight.absmax, BLOCK, _KIND, bias
        )
        return found
    unpacked: Tensor = operators.dequantize_4bit(
        weight.packed, weight.absmax, BLOCK, _KIND, shape, given.dtype
    )
    return F.linear(given, unpacked, bias)
