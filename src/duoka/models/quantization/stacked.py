"""Stacked experts: the weights of a layer's experts as one quantized parameter.

transformers keeps the experts of a layer in one parameter [experts, rows, columns]. Here it is an
`ExpertStack`, which holds the tensors of all experts' quantized weights, stacked. The class of one
expert's weight depends on the device and the scheme:

========  =========================================  =================================
scheme    on a GPU                                   on the CPU
========  =========================================  =================================
int4      `Int4Tiles`, for tensor cores              `Int4Rows`
int8      `Int8Tiles`; in training `Int8Rows`        `Int8Rows`
nf4       `Nf4Weight`                                `Nf4Weight`
========  =========================================  =================================

`Int8Tiles` splits numbers of 8 bits into two of 4 bits, because PyTorch's kernel for tensor cores
reads only those: with q = 16 high + low, a product is one of twice the columns,
``[x, x] [16 s high, s low]ᵀ``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.virtual import multiply_int4

from .composed import Composed
from .weights import BLOCK, GROUPS, TILES, Nf4Weight, Scheme, group_of

Layout: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor of a weight, by name."""

_ATEN = torch.ops.aten
TILE_COLUMNS = 16 * TILES
"""The kernel for tensor cores requires a multiple of this number of columns in stacks."""
_LARGEST_GROUP = 256
MIDDLE = 8
"""The kernels for int4 compute (number - 8) * scale + zero, with numbers from 0 to 15."""
ROWS = 16
"""Weights of stacks have a multiple of this number of rows: the kernels for int4 require it."""


class _Tiles(Composed):
    """A weight in the layout of PyTorch's kernel for tensor cores, which computes in bfloat16.

    It holds `packed`, int32 [rows / 8, columns / 128, 32, 4], and `scale_and_zero`, bfloat16
    [groups, rows, 2]. Columns are padded to a multiple of 128.
    """

    copies: ClassVar[int] = 1
    """How often the packed weight has each column."""

    @classmethod
    def of(cls, weight: Tensor) -> Composed:
        """Quantize a weight [rows, columns]."""
        padded = F.pad(weight.to(torch.bfloat16), (0, -weight.shape[1] % TILE_COLUMNS))
        group = cls._group(padded.shape[1], weight.shape[1])
        numbers, scale_and_zero = cls._numbers(padded, group)
        packed = _ATEN._convert_weight_to_int4pack(numbers, TILES)
        tensors = {"packed": packed, "scale_and_zero": scale_and_zero}
        return cls(tensors, weight.shape, weight.dtype)

    @classmethod
    def tensor_shapes(cls, rows: int, columns: int, _dtype: torch.dtype) -> Layout:
        """Return the shape and dtype of each tensor of a weight [rows, columns]."""
        padded = columns + -columns % TILE_COLUMNS
        groups = cls.copies * padded // cls._group(padded, columns)
        packed = rows // 8, cls.copies * padded // TILE_COLUMNS, 32, TILES // 2
        return {
            "packed": (packed, torch.int32),
            "scale_and_zero": ((groups, rows, 2), torch.bfloat16),
        }

    @classmethod
    def _group(cls, padded: int, columns: int) -> int:
        """Return the number of columns that share a scale."""
        raise NotImplementedError

    @classmethod
    def _numbers(cls, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the numbers, two in a byte, and scales and zeros [groups, rows, 2]."""
        raise NotImplementedError

    @classmethod
    def multiply_packed(cls, inputs: Tensor, packed: Tensor, scale_and_zero: Tensor) -> Tensor:
        """Multiply [tokens, columns] by the tensors of a weight, to bfloat16 [tokens, rows]."""
        columns = packed.shape[1] * TILE_COLUMNS
        missing = columns // cls.copies - inputs.shape[1]
        inputs = inputs.to(torch.bfloat16)
        inputs = F.pad(inputs, (0, missing)) if missing else inputs
        if cls.copies > 1:
            inputs = torch.cat([inputs] * cls.copies, dim=1)
        group = columns // len(scale_and_zero)
        # A CPU tensor here is the data behind a virtual GPU's.
        kernel = multiply_int4 if inputs.device.type == "cpu" else _ATEN._weight_int4pack_mm
        product: Tensor = kernel(inputs.contiguous(), packed, group, scale_and_zero)
        return product

    @classmethod
    def input_bytes(cls, tokens: int, inputs: Tensor) -> list[int]:
        """Return the sizes of the copies of [tokens, columns] that `multiply_packed` makes."""
        columns = inputs.shape[1]
        padded = 2 * tokens * (columns + -columns % TILE_COLUMNS)
        casts = [] if inputs.dtype == torch.bfloat16 else [2 * tokens * columns]
        pads = [padded] if columns % TILE_COLUMNS else []
        return [*casts, *pads, *([] if cls.copies == 1 else [cls.copies * padded])]

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` of [tokens, columns], without bias."""
        inputs, weight = args
        return cls.multiply_packed(inputs, weight.packed, weight.scale_and_zero).to(inputs.dtype)


class Int4Tiles(_Tiles):
    """A weight in int4 with a scale and a zero for each group of a row."""

    @classmethod
    def _group(cls, padded: int, columns: int) -> int:
        return group_of(columns)

    @classmethod
    def _numbers(cls, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        from torchao.quantization.utils import groupwise_affine_quantize_tensor

        numbers, scale_and_zero = groupwise_affine_quantize_tensor(weight, 4, group)
        return numbers, scale_and_zero


class Int8Tiles(_Tiles):
    """A weight in int8 with a scale for each row, split into high and low halves of 4 bits."""

    copies = 2

    @classmethod
    def _group(cls, padded: int, columns: int) -> int:
        return _LARGEST_GROUP if padded % _LARGEST_GROUP == 0 else TILE_COLUMNS

    @classmethod
    def _numbers(cls, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
        numbers, scale = _round_to_int8(weight)
        high, low = (numbers >> 4) + MIDDLE, numbers & 0xF
        halves = torch.cat([high, low], dim=1).to(torch.uint8)
        groups = weight.shape[1] // group
        # The high half is (number - 8) * 16 s, the low half number * s = (number - 8) * s + 8 s.
        scales = torch.stack([16 * scale, scale]).repeat_interleave(groups, 0)
        zeros = torch.stack([torch.zeros_like(scale), MIDDLE * scale]).repeat_interleave(groups, 0)
        return halves[:, ::2] << 4 | halves[:, 1::2], torch.stack([scales, zeros], dim=-1)


class Int8Rows(Composed):
    """A weight in int8 with a scale for each row: `numbers` [rows, columns], `scale` [rows]."""

    @staticmethod
    def tensor_shapes(rows: int, columns: int, _dtype: torch.dtype) -> Layout:
        """Return the shape and dtype of each tensor of a weight [rows, columns]."""
        return {"numbers": ((rows, columns), torch.int8), "scale": ((rows,), torch.bfloat16)}

    @staticmethod
    def of(weight: Tensor) -> Composed:
        """Quantize a weight [rows, columns]."""
        numbers, scale = _round_to_int8(weight)
        return Int8Rows({"numbers": numbers, "scale": scale}, weight.shape, weight.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [rows, columns]."""
        return self.numbers.to(dtype).mul_(self.scale[:, None])

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` of [tokens, columns], without bias."""
        inputs, weight = args
        if inputs.device.type == "cpu" and inputs.dtype == torch.bfloat16:
            return cls.multiply_tensors(inputs, weight.numbers, weight.scale)
        return inputs @ weight.unpacked(inputs.dtype).t()

    @staticmethod
    def multiply_tensors(inputs: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
        """Multiply [tokens, columns] in bfloat16 by the tensors of a weight, on the CPU."""
        product: Tensor = _ATEN._weight_int8pack_mm(inputs, numbers, scale)
        return product


class Int4Rows(Composed):
    """A weight in int4 in the layout of PyTorch's CPU kernel.

    It holds `packed`, uint8 [rows, columns / 2], and `scale_and_zero` [groups, rows, 2]. The layout
    has blocks of some rows, [columns, rows / 2]: a byte has the numbers of two rows, which are half
    a block apart, or adjacent in a last block of fewer rows.
    """

    scratch_bytes: ClassVar[int] = 3
    """See `ScaledWeight.scratch_bytes`."""

    @staticmethod
    def tensor_shapes(rows: int, columns: int, dtype: torch.dtype) -> Layout:
        """Return the shape and dtype of each tensor of a weight [rows, columns]."""
        return {
            "packed": ((rows, columns // 2), torch.uint8),
            "scale_and_zero": ((columns // group_of(columns), rows, 2), dtype),
        }

    @staticmethod
    def of(weight: Tensor) -> Composed:
        """Quantize a weight [rows, columns], on any device."""
        from torchao.quantization.utils import groupwise_affine_quantize_tensor

        columns = weight.shape[1]
        numbers, scale_and_zero = groupwise_affine_quantize_tensor(
            weight, 4, group_of(columns), dtype=weight.dtype
        )
        if numbers.shape[1] < columns:  # on a GPU, two in a byte
            numbers = torch.stack([numbers >> 4, numbers & 0xF], 2).flatten(1)
        blocks = _blocks_of(numbers.to(torch.uint8))
        packed = torch.cat([_pack_block(*part) for part in blocks])
        tensors = {"packed": packed, "scale_and_zero": scale_and_zero}
        return Int4Rows(tensors, weight.shape, weight.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [rows, columns]."""
        blocks = _blocks_of(self.packed)
        numbers = torch.cat([_unpack_block(*part) for part in blocks])
        values = numbers.to(dtype).view(len(numbers), len(self.scale_and_zero), -1)
        scale, zero = self.scale_and_zero.permute(2, 1, 0)[..., None].to(dtype)
        return values.sub_(MIDDLE).mul_(scale).add_(zero).flatten(1)

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` of [tokens, columns], without bias."""
        inputs, weight = args
        scales = weight.scale_and_zero
        return cls.multiply_tensors(inputs.to(scales.dtype), weight.packed, scales).to(inputs.dtype)

    @staticmethod
    def multiply_tensors(inputs: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        """Multiply [tokens, columns] in the scales' dtype by the tensors of a weight."""
        group = inputs.shape[1] // len(scales)
        product: Tensor = _ATEN._weight_int4pack_mm_for_cpu(inputs, packed, group, scales)
        return product


_BLOCK_ROWS = {"AVX512": 64, "AVX2": 32}
"""Rows of a block of `Int4Rows`, whose halves share bytes, by the CPU's capability."""


def _blocks_of(rows: Tensor) -> list[tuple[Tensor, int, bool]]:
    """Split rows of an `Int4Rows` into whole blocks and the rest.

    Each part has the rows of a block, and True if its halves share bytes instead of adjacent rows.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    block = _BLOCK_ROWS.get(capability, 32)
    whole = len(rows) // block * block
    parts = (
        (rows[:whole], block, capability in _BLOCK_ROWS),
        (rows[whole:], len(rows) - whole, False),
    )
    return [part for part in parts if len(part[0])]


def _pack_block(numbers: Tensor, block: int, is_split: bool) -> Tensor:
    """Return the bytes [rows, columns / 2] of numbers [rows, columns] of blocks."""
    pairs = numbers.view(-1, *((2, block // 2) if is_split else (block // 2, 2)), numbers.shape[1])
    low, high = pairs.unbind(1 if is_split else 2)
    return (high << 4 | low).mT.reshape(len(numbers), -1)


def _unpack_block(packed: Tensor, block: int, is_split: bool) -> Tensor:
    """Return the numbers [rows, columns] of the bytes of blocks."""
    pairs = packed.reshape(-1, 2 * packed.shape[1], block // 2)
    halves = [pairs & 0xF, pairs >> 4]
    numbers = torch.cat(halves, 2) if is_split else torch.stack(halves, 3).flatten(2)
    return numbers.mT.reshape(len(packed), -1)


class Unquantized(Composed):
    """A weight in its own dtype; stacks of such weights are multiplied on the host."""

    @staticmethod
    def tensor_shapes(rows: int, columns: int, dtype: torch.dtype) -> Layout:
        """Return the shape and dtype of each tensor of a weight [rows, columns]."""
        return {"weight": ((rows, columns), dtype)}

    @staticmethod
    def of(weight: Tensor) -> Composed:
        """Hold a weight [rows, columns]."""
        return Unquantized({"weight": weight}, weight.shape, weight.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [rows, columns] in a dtype."""
        return self.weight.to(dtype)

    @classmethod
    def product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute `F.linear` of [tokens, columns], without bias."""
        inputs, weight = args
        return F.linear(inputs, weight.weight.to(inputs.dtype))

    @staticmethod
    def multiply_tensors(inputs: Tensor, weight: Tensor) -> Tensor:
        """Multiply [tokens, columns] by a weight of the same dtype."""
        return F.linear(inputs, weight)


_ON_CPU: dict[Any, Any] = {Int4Tiles: Int4Rows, Int8Tiles: Int8Rows}
"""The classes that have another layout on the CPU, with that layout."""


def _round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers [rows, columns] and a scale for each row, in bfloat16."""
    # The scale is rounded before it is used, so that its rounding adds no error.
    scale = (weight.abs().amax(1).float() / 127).clamp(min=1e-12).to(torch.bfloat16)
    numbers = (weight / scale[:, None]).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scale


def weight_class(scheme: Scheme, device: torch.device, *, trains: bool = False) -> type[Any]:
    """Return the class of one expert's weight on a device; the meta device counts as a GPU."""
    kind: type[Any] = {"int4": Int4Tiles, "int8": Int8Tiles, "nf4": Nf4Weight}[scheme]
    if scheme == "int8" and trains:
        return Int8Rows
    return _ON_CPU.get(kind, kind) if device.type == "cpu" else kind


def refused_shape(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Return the reason if a stack of weights [rows, columns] can't be quantized."""
    multiple = {"int4": GROUPS[-1], "int8": 1, "nf4": BLOCK}[scheme]
    if rows % ROWS == 0 and columns % multiple == 0:
        return None
    columns_limit = f", columns in {multiple}s" if multiple > 1 else ""
    return f"experts of a shape unsupported by {scheme} (rows in {ROWS}s{columns_limit})"


def quantize_stack(
    stack: Tensor, scheme: Scheme, *, trains: bool = False, is_transposed: bool = False
) -> ExpertStack:
    """Quantize a stack [experts, rows, columns] on its device, expert by expert."""
    kind = weight_class(scheme, stack.device, trains=trains)
    result = ExpertStack.empty(stack, stack.device, kind, is_transposed=is_transposed)
    if not stack.is_meta:
        for number, expert in enumerate(stack.mT if is_transposed else stack):
            for name, part in kind.of(expert.contiguous()).tensors.items():
                result.tensors[name][number] = part
    return result


class ExpertStack(Composed):
    """The quantized weights of a layer's experts, [experts, rows, columns].

    A layer that stores transposed weights sees [experts, columns, rows]. The first dimension of
    each tensor are the experts; `weight_class` is the class of one expert's weight.
    """

    weight_class: type[Any]
    is_transposed: bool

    @classmethod
    def empty(
        cls, like: Tensor, device: torch.device, weight_class: type[Any], *, is_transposed: bool
    ) -> Self:
        """Allocate a stack of the shape and dtype of a tensor."""
        rows, columns = like.shape[:0:-1] if is_transposed else like.shape[1:]
        layout: Layout = weight_class.tensor_shapes(rows, columns, like.dtype)
        tensors = {
            name: torch.empty((len(like), *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in layout.items()
        }
        return cls.make(tensors, like.shape, like.dtype, weight_class, is_transposed)

    @classmethod
    def make(
        cls,
        tensors: Mapping[str, Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        weight_class: type[Any],
        is_transposed: bool,
    ) -> Self:
        """Make a stack of its tensors."""
        stack: Self = cls(tensors, shape, dtype)
        stack.weight_class, stack.is_transposed = weight_class, is_transposed
        return stack

    def for_cpu(self, device: torch.device | None = None) -> Self:
        """Allocate a stack of this shape in the layout of the CPU, by default on its own device."""
        kind, device = _ON_CPU.get(self.weight_class), device or self.device
        if kind is None:
            return self.empty_on(device)
        stack = self.empty(self, device, kind, is_transposed=self.is_transposed)
        if kind is Int4Rows:  # groups of a published checkpoint may be smaller
            scales, padded = self.scale_and_zero, self.packed.shape[2] * TILE_COLUMNS
            groups = scales.shape[1] * self.sizes[1] // padded
            shape = len(self), groups, *scales.shape[2:]
            stack.tensors["scale_and_zero"] = stack.scale_and_zero.new_empty(shape)
        return stack

    def empty_on(self, device: torch.device) -> Self:
        """Allocate a stack of this shape on a device, in the layout of the device."""
        if device.type == "cpu" and self.weight_class in _ON_CPU:
            return self.for_cpu(device)
        return self.map(lambda tensor: torch.empty_like(tensor, device=device))

    def to_fetch(self) -> FetchedStack:
        """Return the same stack in the class for experts that GPUs fetch."""
        return FetchedStack.make(
            *(self.tensors, self.shape, self.dtype, self.weight_class, self.is_transposed)
        )

    def expert(self, number: int) -> Composed:
        """Return the weight [rows, columns] of one expert; a view."""
        tensors = {name: tensor[number] for name, tensor in self.tensors.items()}
        weight: Composed = self.weight_class(tensors, torch.Size(self.sizes), self.dtype)
        return weight

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of one expert's weight."""
        first, last = self.shape[1:]
        return (last, first) if self.is_transposed else (first, last)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a stack with a function applied to each of its tensors."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return self.make(tensors, self.shape, self.dtype, self.weight_class, self.is_transposed)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.tensors), (self.dtype, self.weight_class, self.is_transposed)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Self:
        return cls.make(inner, size, *context)


class FetchedStack(ExpertStack):
    """Experts that GPUs fetch: in host memory, too, they have the layout of the GPU."""

    def empty_on(self, device: torch.device) -> Self:
        """Allocate a stack of this shape on a device."""
        return self.map(lambda tensor: torch.empty_like(tensor, device=device))


def slot_bytes(
    inputs: Tensor, experts: Tensor, tensors: Sequence[Tensor], kind: Any, rows: int
) -> list[int]:
    """Return the sizes of the tensors made by a token's product with its experts."""
    top_k = experts.shape[1]
    num_inputs = 1 if len(inputs) == len(experts) else top_k
    selected = [top_k * tensor[0].nbytes for tensor in tensors]
    if not hasattr(kind, "multiply_packed"):
        size = inputs.element_size()
        unpacked = [] if kind is Nf4Weight else [unpacked_bytes(kind, rows, inputs)]
        return [*selected, *unpacked, top_k * rows * size, rows * size]
    return [*selected, *kind.input_bytes(num_inputs, inputs), 2 * num_inputs * top_k * rows]


def unpacked_bytes(kind: Any, rows: int, inputs: Tensor) -> int:
    """Return the size of the tensors made to dequantize an expert for [tokens, columns]."""
    return rows * inputs.shape[1] * (inputs.element_size() + getattr(kind, "scratch_bytes", 0))
