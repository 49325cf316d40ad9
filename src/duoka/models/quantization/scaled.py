"""Weights of 8-bit numbers, or MXFP4's of 4 bits, with scales that are applied in a product.

A product makes a copy of the weight in the activations' dtype, so these weights need no kernels and
run on every device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .composed import Composed

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ScaledWeight(Composed):
    """A weight in int8 or FP8 with a scale for each group of a row.

    It holds `numbers` [rows, columns] and `scale`, float32 [rows, groups].
    """

    scratch_bytes: ClassVar[int] = 0
    """Upper bound of the temporary memory of `unpacked` for each element, besides the result."""

    @staticmethod
    def tensor_shapes(rows: int, columns: int, _dtype: torch.dtype) -> Layout:
        """Return the shape and dtype of each tensor of a weight in int8 with scales by row."""
        return {"numbers": ((rows, columns), torch.int8), "scale": ((rows, 1), torch.float32)}

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [rows, columns]."""
        weight = self.numbers.to(dtype)
        weight.view(*self.scale.shape, -1).mul_(self.scale[..., None])
        return weight

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` with the dequantized weight."""
        inputs, weight, *bias = args
        return F.linear(inputs, weight.unpacked(inputs.dtype), *bias, **kwargs)


# A number of MXFP4 is sign, two bits of exponent, and one of mantissa. Shifted to the place of
# FP8's lowest exponent and highest mantissa bits, it is the FP8 number of 1/64 of its value, also
# for the subnormal 0.5: both formats have the same steps there.
class Mxfp4Weight(ScaledWeight):
    """A weight in MXFP4 of OCP's Microscaling specification 1.0, in blocks of 32 of a row.

    It holds `numbers`, uint8 [rows, columns / 2], the first number of two in the low bits, and
    `scale`, uint8 [rows, columns / 32], exponents of 2 with a bias of 127.
    """

    scratch_bytes = 2

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [rows, columns]."""
        packed, exponents = self.numbers, self.scale.view(torch.float8_e8m0fnu)
        numbers = torch.stack(
            [(packed & 0x8) << 4 | (packed & 0x7) << 2, packed & 0x80 | (packed & 0x70) >> 2], -1
        )
        numbers = numbers.flatten(-2).view(torch.float8_e4m3fn)
        tensors = {"numbers": numbers, "scale": exponents.float().mul_(64)}
        return ScaledWeight(tensors, self.shape, self.dtype).unpacked(dtype)
