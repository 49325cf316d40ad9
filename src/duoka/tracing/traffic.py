"""Traffic: the bytes that one operator reads and writes, and whether it launches a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from duoka import virtual

from .blocks import tensors_in

_ATEN = torch.ops.aten
# They read of their first argument only what they take from it.
_TAKING = frozenset({_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather})
# They write into their first argument only what they put there.
_PUTTING = frozenset({_ATEN.index_copy_, _ATEN.index_put_, _ATEN.scatter_})
_ALLOCATING = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty})
_GROUPED = frozenset({_ATEN._grouped_mm})


def launches(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an operator's call starts a kernel: views and allocations don't."""
    if func.overloadpacket in _ALLOCATING:
        return False
    inputs = _virtual(tensors_in((args, kwargs)))
    storages = {tensor.storage_id for tensor in inputs}
    outputs = _virtual(tensors_in(result))
    return func._schema.is_mutable or not all(each.storage_id in storages for each in outputs)


def count_bytes(func: Any, args: Any, kwargs: Any, result: Any, *, alone: bool = False) -> int:
    """Return how many bytes an operator that launches a kernel reads and writes."""
    inputs = tensors_in((args, kwargs))
    outputs = _virtual(tensors_in(result))
    packet = func.overloadpacket
    if packet in _TAKING:
        return _bytes(inputs[1:]) + 2 * _bytes(outputs)
    if packet in _PUTTING:
        return 2 * _bytes(inputs[1:])
    if alone and packet in _GROUPED:
        rows, matrices = inputs[0], inputs[1]
        share = min(1.0, rows.shape[0] / matrices.shape[0]) if matrices.ndim == 3 else 1.0
        return round(_bytes([rows, *outputs]) + share * matrices.nbytes)
    return _bytes(inputs) + _bytes(outputs)


def _virtual(tensors: Sequence[Any]) -> list[virtual.VirtualTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, virtual.VirtualTensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
