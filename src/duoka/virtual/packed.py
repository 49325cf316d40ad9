"""CUDA's kernels for weights of 4 bit, on virtual GPUs.

The layout for tensor cores has the shape and the bytes that CUDA gives it; what stands in it is in
an order of our own, which only the product below reads. The product charges its result alone, as
CUDA's kernel does, which reads the weight in 4 bit; what the host holds to compute the numbers is
no memory of the GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from . import calls
from .operators import handlers
from .tensor import place

_aten = torch.ops.aten
_ROWS, _COLUMNS, _LANES = 8, 16, 32
_MIDDLE = 8  # numbers are 0 to 15


def _pack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out a weight [rows, columns / 2] of two numbers in a byte."""
    plain, gpu = calls.unwrap(func, args, kwargs)
    numbers, tiles = plain.args
    if numbers.is_cuda:
        return place(func(numbers, tiles), gpu)
    rows, columns = numbers.shape[0], 2 * numbers.shape[1]
    shape = (rows // _ROWS, columns // (_COLUMNS * tiles), _LANES, tiles // 2)
    if gpu.meta:
        return place(torch.empty(shape, dtype=torch.int32, device="meta"), gpu)
    return place(numbers.clone().view(torch.int32).reshape(shape), gpu)


def _multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply activations [tokens, columns] with a packed weight."""
    plain, gpu = calls.unwrap(func, args, kwargs)
    left, packed, group, scale_and_zero = plain.args
    if packed.is_cuda:
        return place(func(left, packed, group, scale_and_zero), gpu)
    if gpu.meta:
        # PyTorch's own rule for the shape takes no plain meta tensors.
        shape = (left.shape[0], _ROWS * packed.shape[0])
        return place(torch.empty(shape, dtype=left.dtype, device="meta"), gpu)
    weight = _unpacked(packed, group, scale_and_zero)
    return place(left @ weight.to(left.dtype).t(), gpu)


def _unpacked(packed: torch.Tensor, group: int, scale_and_zero: torch.Tensor) -> torch.Tensor:
    """The weight [rows, columns] in floating point; scale_and_zero [columns / group, rows, 2]."""
    rows = _ROWS * packed.shape[0]
    pairs = packed.reshape(rows, -1).view(torch.uint8)
    numbers = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).reshape(rows, -1, group)
    scale, zero = (each.t().unsqueeze(-1) for each in scale_and_zero.float().unbind(-1))
    return ((numbers.float() - _MIDDLE) * scale + zero).reshape(rows, -1)


def install() -> None:
    """Register the handlers of this module."""
    handlers[_aten._convert_weight_to_int4pack.default] = _pack
    handlers[_aten._weight_int4pack_mm.default] = _multiply
