"""Weights in NF4 (Dettmers et al., "QLoRA", 2023), packed and multiplied by bitsandbytes.

Two numbers to a byte, and one scale in float32 for each block of 64. For one token the kernel reads
the weight packed; for more it is unpacked for the time of the product. bitsandbytes decides between
the two by the card; here it is the same on all of them, so that what a product takes is known.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .composed import Composed

BLOCK = 64
_KIND = "nf4"


class Nf4Weight(Composed):
    """A weight of a linear layer in NF4.

    It holds `packed`, uint8 [rows x columns / 2, 1], and `absmax`, float32 [rows x columns / 64].
    """

    @staticmethod
    def of(weight: Tensor) -> Composed:
        """Quantize a weight [rows, columns]; the columns are a multiple of `BLOCK`."""
        import_module("bitsandbytes")  # which gives torch its operators
        operators = torch.ops.bitsandbytes
        packed, absmax = operators.quantize_4bit(weight.contiguous(), BLOCK, _KIND, torch.uint8)
        return Nf4Weight({"packed": packed, "absmax": absmax}, weight.shape, weight.dtype)

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply by the kernel for one token, or unpack."""
        return _linear(*args, **kwargs)


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
