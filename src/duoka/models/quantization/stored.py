"""Rows of weights from quantized checkpoints, and weights that hold such rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .stacked import MIDDLE, TILE_COLUMNS, ExpertStack, Int4Tiles
from .weights import COLUMNS, OPAQUE, TILED, TILES


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a weight [rows, columns], or of all experts' [experts, rows, columns].

    `tensors` are those of the class `kind` in their order, with a row's values in the last
    dimension. For `Int4Tiles` they are numbers from 0 to 15, uint8 [rows, columns], and scales and
    zero points in float32 [rows, groups].
    """

    kind: type[Any]
    columns: int
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized rows."""
        return torch.Size((*self.tensors[0].shape[:-1], self.columns))

    @property
    def weight_shape(self) -> torch.Size:
        """The shape of the weight in a model that stores stacks transposed."""
        *experts, rows, columns = self.shape
        return torch.Size((*experts, columns, rows) if experts else (rows, columns))

    @property
    def form(self) -> tuple[Any, ...]:
        """The class, and the dtype and the extent along a row of each tensor."""
        return self.kind, self.columns, *((t.dtype, t.shape[-1]) for t in self.tensors)

    def numel(self) -> int:
        """Return the number of elements of the dequantized rows."""
        return prod(self.shape)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> StoredRows:
        return self.map(lambda tensor: tensor[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> StoredRows:
        """Return rows with a function applied to each tensor."""
        return StoredRows(self.kind, self.columns, tuple(map(change, self.tensors)))

    def packed(self, layout: str) -> tuple[Tensor, ...]:
        """Return the tensors of a weight of the class named `layout`, on the rows' device."""
        if self.kind is not Int4Tiles:
            return self.tensors
        numbers, scale, zero = self.tensors
        # The kernels compute (number - 8) * scale + zero.
        scale_and_zero = torch.stack([scale, (MIDDLE - zero) * scale], -1).transpose(0, 1)
        if layout in ("Int4Rows", OPAQUE):
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
            return packed, scale_and_zero
        missing = -self.columns % (COLUMNS if layout == TILED else TILE_COLUMNS)
        groups = missing * len(scale_and_zero) // self.columns
        high, low = F.pad(numbers, (0, missing)).unflatten(1, (-1, 2)).unbind(-1)
        packed = torch.ops.aten._convert_weight_to_int4pack(high << 4 | low, TILES)
        return packed, F.pad(scale_and_zero, (0, 0, 0, 0, 0, groups)).to(torch.bfloat16)


def empty_stored(rows: StoredRows, like: Tensor, *, is_transposed: bool) -> Tensor:
    """Allocate on the meta device a weight like a parameter, in the form of stored rows."""
    experts = like.shape[:-2]
    count = like.shape[-1 if is_transposed else -2]
    sized = rows.map(lambda tensor: tensor.new_empty((count, tensor.shape[-1])))
    if rows.kind is Int4Tiles and not experts:
        from torchao.quantization import Int4TilePackedTo4dTensor

        group = rows.columns // rows.tensors[1].shape[-1]
        dense: Tensor = Int4TilePackedTo4dTensor(*sized.packed(TILED), [1, group], like.shape)
        return dense
    layout = rows.kind.tensor_shapes(count, rows.columns, like.dtype)
    tensors = dict(zip(layout, sized.packed(rows.kind.__name__), strict=True))
    if "absmax" in tensors:  # rows follow each other in one dimension
        tensors = {name: tensors[name].view(shape) for name, (shape, _) in layout.items()}
    if not experts:
        weight: Tensor = rows.kind(tensors, like.shape, like.dtype)
        return weight
    stacked = {name: part.new_empty((*experts, *part.shape)) for name, part in tensors.items()}
    return ExpertStack.make(stacked, like.shape, like.dtype, rows.kind, is_transposed)
