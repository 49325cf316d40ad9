"""Quantized weights of torchao (int8, int4) and bitsandbytes (nf4).

int8: one scale for each row. A product allocates a copy of the weight in the activations' dtype.

int4: one scale and one zero point for each group of a row. On GPUs the weight has the layout of
PyTorch's tensor-core kernel, which needs no copy, computes in bfloat16, and requires rows of a
multiple of 1024 elements; shorter rows are padded. The CPU kernel has another layout. Virtual GPUs
use the layout of CUDA.

nf4 (Dettmers et al., "QLoRA", 2023): two elements in a byte, and one float32 scale for each block
of 64. For one token the kernel reads the packed weight; for more tokens the weight is unpacked for
the duration of the product. bitsandbytes decides between the two by the GPU model; here all GPUs do
the same, so that the memory of a product is known.

Both packages are optional, and imported when a weight is quantized. Some of their functions used
here aren't public; `require` tries them before anything is quantized.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.base.quiet import quiet_libraries
from duoka.base.requirements import require_package
from duoka.errors import ModelError, UsageError

from .composed import Composed, empty_on

Scheme = Literal["int8", "int4", "nf4"]

BLOCK = 64
"""Number of elements of a row that share a scale in nf4."""
GROUPS = (128, 64, 32)
"""Sizes of int4's groups; the first size that divides a row is used."""
ROWS = 16
"""The CPU kernel for int4 requires a multiple of this number of rows."""
COLUMNS = 1024
"""The tensor-core kernel for int4 requires a multiple of this number of columns."""
TILES = 8
"""`inner_k_tiles` of the tensor-core layout for int4; torchao uses no other value."""
TILED, OPAQUE = "Int4TilePackedTo4dTensor", "Int4OpaqueTensor"
"""The names of torchao's classes of weights in int4, on GPUs and on the CPU."""
_GPU_LAYOUTS = frozenset({TILED, "Int4Tiles", "Int8Tiles"})
_CPU_LAYOUTS = frozenset({OPAQUE, "Int4Rows"})
_SCHEMES: dict[str, Scheme] = {"Int8Tensor": "int8", "Nf4Weight": "nf4"}
_SCHEMES |= {"Int8Tiles": "int8", "Int8Rows": "int8"}
INT4_CLASSES = frozenset({TILED, OPAQUE, "Int4Tiles", "Int4Rows"})
"""The names of the classes of weights in int4."""
_DTYPE_ATTRIBUTE = "_duoka_made_from"
_TESTED = {"torch": "2.11 and 2.13", "torchao": "0.18", "bitsandbytes": "0.50"}


def quantize(weight: Tensor, scheme: Scheme) -> Tensor:
    """Quantize a weight on its device, in the layout of the device's kernels."""
    if scheme == "int8":
        from torchao.quantization import Int8Tensor, PerRow

        result: Tensor = Int8Tensor.from_hp(weight, granularity=PerRow())
        return result
    if scheme == "nf4":
        return Nf4Weight.of(weight)
    if weight.device.type != "cpu":
        return _quantize_tiled(weight)
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    opaque: Tensor = Int4OpaqueTensor.from_hp(weight, [1, group_of(weight.shape[1])])
    return opaque


def _quantize_tiled(weight: Tensor) -> Tensor:
    """Quantize a weight to int4 in the tensor-core layout.

    torchao's own constructor does the same, but requires a CUDA device.
    """
    from torchao.quantization import Int4TilePackedTo4dTensor
    from torchao.quantization.utils import groupwise_affine_quantize_tensor

    rows, columns = weight.shape
    group = group_of(columns)
    padded = F.pad(weight.to(torch.bfloat16), (0, -columns % COLUMNS))
    numbers, scale_and_zero = groupwise_affine_quantize_tensor(padded, 4, group)
    packed = torch.ops.aten._convert_weight_to_int4pack(numbers, TILES)
    shape = torch.Size((rows, columns))
    result: Tensor = Int4TilePackedTo4dTensor(packed, scale_and_zero, [1, group], shape)
    return result


def empty_weight(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate a quantized weight like `tensor` on a device, in the layout of the device."""
    move = getattr(tensor, "empty_on", None)
    if move is not None:
        stack: Tensor = move(device)
        return stack
    if type(tensor).__name__ != TILED or device.type != "cpu":
        return empty_on(tensor, device)
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    rows, columns = tensor.shape
    group: int = cast(Any, tensor).block_size[1]
    numbers = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((columns // group, rows, 2), dtype=computes_in(tensor))
    result: Tensor = Int4OpaqueTensor(numbers, scales, [1, group], tensor.shape)
    return result


def move_weight(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a quantized weight to another device."""
    name = getattr(tensor, "weight_class", type(tensor)).__name__
    if name in (_GPU_LAYOUTS if device.type == "cpu" else _CPU_LAYOUTS):
        raise ModelError(
            f"a weight in {_scheme_of_class(name)} can't go from {tensor.device} to {device}: CPU "
            "and GPU kernels use different layouts",
            hint="load the model with a plan for that device",
        )
    return tensor.to(device)


def scheme_of(tensor: Tensor) -> Scheme:
    """Return the scheme of a quantized weight."""
    return _scheme_of_class(type(tensor).__name__)


def _scheme_of_class(name: str) -> Scheme:
    """Return the scheme of a class of quantized weights, by its name."""
    return "int4" if name in INT4_CLASSES else _SCHEMES[name]


def computes_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype from which a weight was quantized; its own dtype may differ (int4)."""
    dtype: torch.dtype = getattr(tensor, _DTYPE_ATTRIBUTE, tensor.dtype)
    return dtype


def let_compute_in(tensor: Tensor, dtype: torch.dtype) -> None:
    """Record the dtype from which a weight was quantized, as an attribute of the tensor."""
    setattr(tensor, _DTYPE_ATTRIBUTE, dtype)


def group_of(columns: int) -> int:
    """Return the size of int4's groups for rows of `columns` elements."""
    return next(group for group in GROUPS if columns % group == 0)


class Nf4Weight(Composed):
    """A weight of a linear layer in NF4.

    It holds `packed`, uint8 [rows x columns / 2, 1], and `absmax`, float32 [rows x columns / 64].
    """

    @staticmethod
    def tensor_shapes(
        rows: int, columns: int, _dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor of a weight [rows, columns]."""
        count = rows * columns
        return {
            "packed": ((count // 2, 1), torch.uint8),
            "absmax": ((count // BLOCK,), torch.float32),
        }

    @staticmethod
    def of(weight: Tensor) -> Composed:
        """Quantize a weight [rows, columns], with `columns` a multiple of `BLOCK`."""
        import_module("bitsandbytes")  # registers its operators with torch
        operators = torch.ops.bitsandbytes
        packed, absmax = operators.quantize_4bit(weight.contiguous(), BLOCK, "nf4", torch.uint8)
        return Nf4Weight({"packed": packed, "absmax": absmax}, weight.shape, weight.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [rows, columns]."""
        dequantize = torch.ops.bitsandbytes.dequantize_4bit
        weight: Tensor = dequantize(self.packed, self.absmax, BLOCK, "nf4", list(self.shape), dtype)
        return weight

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` with the packed weight for a single token, otherwise unpacked."""
        return _linear(*args, **kwargs)


def _linear(inputs: Tensor, weight: Nf4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`; for a single row of inputs by the kernel that reads the packed weight."""
    if inputs.numel() > inputs.shape[-1]:
        return F.linear(inputs, weight.unpacked(inputs.dtype), bias)
    product: Tensor = torch.ops.bitsandbytes.gemm_4bit(
        inputs, weight.packed, list(weight.shape), weight.absmax, BLOCK, "nf4", bias
    )
    return product


def require(scheme: Scheme) -> None:
    """Raise UsageError if the scheme's package is missing, or its functions have changed."""
    package = "bitsandbytes" if scheme == "nf4" else "torchao"
    require_package(package, f"{scheme} weights need")
    with quiet_libraries():
        import_module(package)  # bitsandbytes registers its operators with torch
    try:
        quantize(torch.empty((ROWS, COLUMNS), dtype=torch.bfloat16, device="meta"), scheme)
    except (ImportError, AttributeError) as error:
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", package))
        raise UsageError(
            f"{scheme} quantization fails with {versions}: {error}",
            hint=f"install tested versions: torch {_TESTED['torch']} with {package} "
            f"{_TESTED[package]}",
        ) from error
