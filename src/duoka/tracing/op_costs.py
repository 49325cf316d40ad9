"""Costs of an operator: floating-point operations, bytes read and written, kernel launches.

Each operator is counted by itself; `record` adds its costs to the block that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from duoka import virtual

_ATEN = torch.ops.aten
# torch 2.11's own formula refuses grouped queries, where keys have fewer heads than queries.
_FUSED_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
    }
)
_ITS_BACKWARD = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_backward,
        _ATEN._scaled_dot_product_efficient_attention_backward,
    }
)
# They read of their first argument only what they take from it.
_TAKING = frozenset({_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather})
# They write into their first argument only what they put there.
_PUTTING = frozenset({_ATEN.index_copy_, _ATEN.index_put_, _ATEN.scatter_})
_ALLOCATING = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty})
_GROUPED = frozenset({_ATEN._grouped_mm})


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return how many additions and multiplications an operator's call takes.

    Those of matrix products, convolutions and attention, as ``torch.utils.flop_counter`` counts
    them; whatever else is 0. Causal attention counts in full.
    """
    if func.overloadpacket in _FUSED_ATTENTION:
        return _attention_flops(*args[:3])
    if func.overloadpacket in _ITS_BACKWARD:
        # Five products instead of two: S = Q Kᵀ again, dQ = dS K and dK = dSᵀ Q over the width of
        # keys; dP = dO Vᵀ and dV = Pᵀ dO over that of values (FlashAttention, Dao et al., 2022).
        return _attention_flops(*args[1:4], of_keys=3, of_values=2)
    if func.overloadpacket is _ATEN._weight_int4pack_mm:
        # Activations [tokens, columns] with a packed weight, to [tokens, rows].
        return 2 * int(args[0].numel()) * int(result.shape[1])
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    of_keys: int = 1,
    of_values: int = 1,
) -> int:
    """Count the operations of products over the widths of keys and of values."""
    batch, heads, queries, width = query.shape
    widths = of_keys * width + of_values * value.shape[3]
    return 2 * batch * heads * queries * key.shape[2] * widths


def launches(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Return True if an operator's call starts a kernel, unlike views and allocations."""
    if func.overloadpacket in _ALLOCATING:
        return False
    storages = {tensor.storage_id for tensor in _virtual(inputs)}
    return func._schema.is_mutable or not all(
        tensor.storage_id in storages for tensor in _virtual(outputs)
    )


def count_bytes(
    func: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    is_alone: bool = False,
) -> int:
    """Return the bytes read and written by a kernel.

    A token that `is_alone` reads the matrices of its own experts only.
    """
    outputs = _virtual(outputs)
    packet = func.overloadpacket
    if packet in _TAKING:
        return _bytes(inputs[1:]) + 2 * _bytes(outputs)
    if packet in _PUTTING:
        return 2 * _bytes(inputs[1:])
    if is_alone and packet in _GROUPED:
        rows, matrices = inputs[0], inputs[1]
        share = min(1.0, rows.shape[0] / matrices.shape[0]) if matrices.ndim == 3 else 1.0
        return round(_bytes([rows, *outputs]) + share * matrices.nbytes)
    return _bytes(inputs) + _bytes(outputs)


def _virtual(tensors: Sequence[Any]) -> list[virtual.VirtualTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, virtual.VirtualTensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
