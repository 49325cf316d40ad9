"""Weights in fewer bits, as torchao and bitsandbytes make and multiply them.

int8: one scale for each row. A product takes a copy of the weight in the activations' type.
int4: one scale and one zero point for each group of a row. On GPUs the weight is laid out for
PyTorch's kernel for tensor cores, which takes no copy, computes in bfloat16, and wants rows of a
multiple of 1024 numbers: shorter ones are padded. The processor's kernel has a layout of its own.
Virtual GPUs have CUDA's. nf4 is in `nf4`.

Both packages are optional parts: they are imported when something is quantized.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.errors import ModelError, UsageError

from .nf4 import Nf4Weight
from .parts import empty_on

Scheme = Literal["int8", "int4", "nf4"]

GROUPS = (128, 64, 32)
"""Sizes of int4's groups: the first one is taken that divides a row."""
ROWS = 16
"""The processor's kernel for int4 takes a multiple of so many rows."""
_COLUMNS = 1024  # the tensor cores' kernel for int4 takes a multiple of so many
_TILES = 8  # of the tensor cores' layout; torchao has no other number
_TILED, _OPAQUE = "Int4TilePackedTo4dTensor", "Int4OpaqueTensor"
_SCHEMES: dict[str, Scheme] = {
    "Int8Tensor": "int8",
    _TILED: "int4",
    _OPAQUE: "int4",
    "Nf4Weight": "nf4",
}
MADE_FROM = "_duoka_made_from"
"""The attribute of a quantized parameter that names the type that it was made from."""


def require(scheme: Scheme) -> None:
    """Refuse to quantize where the package for it isn't installed.

    Raises
    ------
    UsageError
        With the command that installs it.
    """
    package, extra = ("bitsandbytes", "bnb") if scheme == "nf4" else ("torchao", "quantize")
    if find_spec(package) is None:
        raise UsageError(
            f"{scheme} weights need {package}, which isn't installed",
            hint=f'pip install "duoka[{extra}]"',
        )


def quantize(weight: Tensor, scheme: Scheme) -> Tensor:
    """A weight in fewer bits, on the same device; the original may be freed.

    Parameters
    ----------
    weight : Tensor
        [rows, columns] of a linear layer, floating.
    scheme : {"int8", "int4", "nf4"}
        For int4 the columns are a multiple of the last one of `GROUPS`, the rows one of `ROWS`; for
        nf4 the columns are a multiple of `nf4.BLOCK`.

    Returns
    -------
    Tensor
        One that `torch.nn.functional.linear` takes as a weight, of the same shape.
    """
    if scheme == "int8":
        ao = import_module("torchao.quantization")
        return _tensor(ao.Int8Tensor.from_hp(weight, granularity=ao.PerRow()))
    if scheme == "nf4":
        return Nf4Weight.of(weight)
    if weight.device.type == "cpu":
        opaque = import_module("torchao.prototype.quantization.int4").Int4OpaqueTensor
        return _tensor(opaque.from_hp(weight, [1, group_of(weight.shape[1])]))
    return _tiled(weight)


def _tiled(weight: Tensor) -> Tensor:
    """A weight in int4, laid out for tensor cores.

    torchao's own constructor does the same, and asks for a CUDA device first.
    """
    rows, columns = weight.shape
    group = group_of(columns)
    utils = import_module("torchao.quantization.utils")
    padded = F.pad(weight.to(torch.bfloat16), (0, -columns % _COLUMNS))
    numbers, scale_and_zero = utils.groupwise_affine_quantize_tensor(padded, 4, group)
    packed = torch.ops.aten._convert_weight_to_int4pack(numbers, _TILES)
    tiled = import_module("torchao.quantization").Int4TilePackedTo4dTensor
    return _tensor(tiled(packed, scale_and_zero, [1, group], torch.Size((rows, columns))))


def empty_weight(tensor: Tensor, device: torch.device) -> Tensor:
    """A quantized weight like another on a device, not filled, in the layout of its kernels."""
    if type(tensor).__name__ != _TILED or device.type != "cpu":
        return empty_on(tensor, device)
    opaque = import_module("torchao.prototype.quantization.int4").Int4OpaqueTensor
    rows, columns = tensor.shape
    group = group_of(columns)
    numbers = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((columns // group, rows, 2), dtype=computes_in(tensor))
    return _tensor(opaque(numbers, scales, [1, group], tensor.shape))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A quantized weight on another device.

    Raises
    ------
    ModelError
        If its layout is for the processor's kernels, or for those of GPUs, and the device is of
        the other kind.
    """
    is_tiled = type(tensor).__name__ == _TILED
    if type(tensor).__name__ in (_TILED, _OPAQUE) and is_tiled == (device.type == "cpu"):
        raise ModelError(
            f"a weight in int4 can't go from {tensor.device} to {device}: kernels of processors "
            "and of GPUs take different layouts",
            hint="load the model again, with a plan for the other device",
        )
    return tensor.to(device)


def scheme_of(tensor: Tensor) -> Scheme:
    """What a weight was quantized to."""
    return _SCHEMES[type(tensor).__name__]


def computes_in(tensor: Tensor) -> torch.dtype:
    """The type that a quantized weight was made from; some layouts have one of their own."""
    found: torch.dtype = getattr(tensor, MADE_FROM, tensor.dtype)
    return found


def group_of(columns: int) -> int:
    """The size of int4's groups in rows of so many numbers."""
    return next(group for group in GROUPS if columns % group == 0)


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
