"""Costs of an operator: floating-point operations, bytes read and written, kernel launches.

Each operator is counted by itself; `record` adds its costs to the running block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
_FUSED_BACKWARD = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_backward,
        _ATEN._scaled_dot_product_efficient_attention_backward,
    }
)
# Operators that read only the selected elements of their first argument.
_GATHERING = frozenset({_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather})
# Operators that write only the selected elements of their first argument.
_SCATTERING = frozenset({_ATEN.index_copy_, _ATEN.index_put_, _ATEN.scatter_})
_ALLOCATING = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty})
_GROUPED = frozenset({_ATEN._grouped_mm})
_EXPERT_LAUNCHES = 5
"""Kernels of `models.quantization.experts` for each token of a few, or for each expert."""


@cache
def _experts() -> frozenset[Any]:
    """Return the operators of `models.quantization.experts`, which are registered on import."""
    return frozenset({torch.ops.duoka.experts_linear, torch.ops.duoka.experts_backward})


@cache
def _on_host() -> frozenset[Any]:
    """Return the operators for experts on the host."""
    return frozenset({torch.ops.duoka.host_experts, torch.ops.duoka.host_experts_backward})


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the number of additions and multiplications of an operator's call.

    Matrix products, convolutions and attention count as in ``torch.utils.flop_counter``; any other
    operator counts 0. Causal attention counts as full attention.
    """
    if func.overloadpacket in _FUSED_ATTENTION:
        return _count_attention_flops(*args[:3])
    if func.overloadpacket in _FUSED_BACKWARD:
        # Five products instead of two: S = Q Kᵀ again, dQ = dS K and dK = dSᵀ Q over the width of
        # keys; dP = dO Vᵀ and dV = Pᵀ dO over that of values (FlashAttention, Dao et al., 2022).
        return _count_attention_flops(*args[1:4], of_keys=3, of_values=2)
    if func.overloadpacket is _ATEN._weight_int4pack_mm:
        # Activations [tokens, columns] with a packed weight, to [tokens, rows].
        return 2 * int(args[0].numel()) * int(result.shape[1])
    if func is torch.ops.torch_attn._varlen_attn.default:
        # Every query counts as attending to the most keys of a sequence.
        return 4 * int(args[0].numel()) * int(args[6])
    if func.overloadpacket in _experts():
        # A product for each pair of token and expert: activations [.., columns], to [pairs, rows].
        return 2 * int(result.numel()) * int(args[0].shape[1])
    if func.overloadpacket in _on_host():  # of the GPU, if it fetches them
        passes = 1 if func is torch.ops.duoka.host_experts.default else 3
        return int(passes * args[1].numel() * args[-2]) if args[-1] else 0
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def count_host_work(func: Any, args: Any, *, is_few: bool) -> tuple[int, int, int, int]:
    """Return the weight bytes and FLOPs of experts on the host, and the GPU's work for its cache.

    The host reads the bytes; no FLOPs means that the GPU fetches them. With a cache, the GPU's
    launches and memory traffic are those of experts that it has (`is_few`: see `count_bytes`).
    """
    if func.overloadpacket not in _on_host():
        return 0, 0, 0, 0
    _, index, *_, slots, _, num_bytes, experts, flops, fetched = args
    if fetched and not is_few:
        return num_bytes, 0, 0, 0
    share = min(1.0, index.numel() / experts) if is_few else 1.0
    if not slots:
        return round(share * num_bytes), index.numel() * flops, 0, 0
    # Of experts chosen evenly, the cache has the share slots / experts. Of both projections,
    # selected weights are read, written, and read again.
    missing_bytes = round(share * (1 - slots / experts) * num_bytes)
    return missing_bytes, 0, 2 * _EXPERT_LAUNCHES * len(index), round(3 * share * num_bytes)


def _count_attention_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    of_keys: int = 1,
    of_values: int = 1,
) -> int:
    """Count the operations of `of_keys` products over the width of keys, `of_values` of values."""
    batch, heads, queries, width = query.shape
    widths = of_keys * width + of_values * value.shape[3]
    return 2 * batch * heads * queries * key.shape[2] * widths


def count_launches(
    func: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    is_few: bool = False,
) -> int:
    """Return the number of kernels that an operator's call starts; views and allocations none."""
    if func.overloadpacket in _ALLOCATING:
        return 0
    if func.overloadpacket in _experts():
        return _EXPERT_LAUNCHES * (len(inputs[1]) if is_few else inputs[2].shape[0])
    storages = {tensor.storage_id for tensor in _select_virtual(inputs)}
    return func._schema.is_mutable or not all(
        tensor.storage_id in storages for tensor in _select_virtual(outputs)
    )


def count_bytes(
    func: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    is_few: bool = False,
) -> int:
    """Return the bytes read and written by a kernel.

    `is_few` means a step of so few tokens that each reads the matrices of its own experts; a step
    of more tokens counts as reading all.
    """
    outputs = _select_virtual(outputs)
    packet = func.overloadpacket
    if packet in _GATHERING:
        return _sum_bytes(inputs[1:]) + 2 * _sum_bytes(outputs)
    if func is torch.ops.torch_attn._varlen_attn.default:
        # The keys and values of one sequence, the longest possible; queries and results.
        query, keys, values, *_, tables = inputs
        heads, head_dim = keys.shape[2:]
        number = 2 * tables.shape[1] * keys.shape[1] * heads * head_dim
        return 2 * query.nbytes + number * values.element_size()
    if packet in _SCATTERING:
        return 2 * _sum_bytes(inputs[1:])
    if is_few and packet in _GROUPED:
        rows, matrices = inputs[0], inputs[1]
        share = min(1.0, rows.shape[0] / matrices.shape[0]) if matrices.ndim == 3 else 1.0
        return round(_sum_bytes([rows, *outputs]) + share * matrices.nbytes)
    if is_few and packet in _experts():
        # Selected weights are read, written, and read again.
        share = 3 * inputs[1].numel() / inputs[2].shape[0]
        return round(_sum_bytes([*inputs[:2], *outputs]) + share * _sum_bytes(inputs[2:]))
    return _sum_bytes(inputs) + _sum_bytes(outputs)


def _select_virtual(tensors: Sequence[Any]) -> list[virtual.VirtualTensor]:
    """Return the tensors on virtual GPUs."""
    return [tensor for tensor in tensors if isinstance(tensor, virtual.VirtualTensor)]


def _sum_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
