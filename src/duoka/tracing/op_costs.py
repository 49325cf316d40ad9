"""Costs of an operator: floating-point operations, bytes read and written, kernel launches.

Each operator is counted by itself; `record` adds its costs to the running block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from duoka import virtual

_OPERATORS = {
    # Read, or write, only the selected elements of their first argument.
    "gathering": "aten.embedding aten.index aten.index_select aten.gather",
    "scattering": "aten.index_copy_ aten.index_put_ aten.scatter_",
    "allocating": "aten.empty aten.empty_like aten.empty_strided aten.new_empty",
    "left @ right": "aten.mm aten.bmm",
    "bias + left @ right": "aten.addmm aten.baddbmm",
    "grouped": "aten._grouped_mm",
    "packed": "aten._weight_int4pack_mm",
    "block tables": "torch_attn._varlen_attn",
    # torch 2.11's own formula refuses grouped queries, where keys have fewer heads than queries.
    "attention": "aten._scaled_dot_product_flash_attention "
    "aten._scaled_dot_product_efficient_attention",
    "attention backward": "aten._scaled_dot_product_flash_attention_backward "
    "aten._scaled_dot_product_efficient_attention_backward",
    # Of `models.quantization.experts`; and for experts on the host.
    "experts": "duoka.experts_linear duoka.experts_backward",
    "host": "duoka.host_experts duoka.host_experts_backward",
}
_KINDS = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_EXPERT_LAUNCHES = 5
"""Kernels of `models.quantization.experts` for each token of a few, or for each expert."""


# Tracing counts some ten thousand calls of a few operators, whose names and schemas are slow.
@cache
def find_kind(func: Any) -> str:
    """Return the kind of an operator that has run; of most, "view", "writing" or "other"."""
    default = "writing" if func._schema.is_mutable else "other"
    return _KINDS.get(str(func.overloadpacket), "view" if virtual.is_view(func) else default)


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the number of additions and multiplications of an operator's call.

    Matrix products, convolutions and attention count as in ``torch.utils.flop_counter``; any other
    operator counts 0. Causal attention counts as full attention.
    """
    formula = _choose_formula(func)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _choose_formula(func: Any) -> Callable[..., int] | None:
    """Return the function of an operator's arguments and result that counts its operations."""
    kind = find_kind(func)
    if kind.endswith("left @ right"):  # torch's formulas for these do the same, slowly
        at = int(kind.startswith("bias"))
        return lambda *args, **_: 2 * args[at].numel() * args[at + 1].shape[-1]
    if kind == "attention":
        return lambda *args, **_: _count_attention_flops(*args[:3])
    if kind == "attention backward":
        # Five products instead of two: S = Q Kᵀ again, dQ = dS K and dK = dSᵀ Q over the width of
        # keys; dP = dO Vᵀ and dV = Pᵀ dO over that of values (FlashAttention, Dao et al., 2022).
        return lambda *args, **_: _count_attention_flops(*args[1:4], of_keys=3, of_values=2)
    if kind == "packed":
        # Activations [tokens, columns] with a packed weight, to [tokens, rows].
        return lambda *args, out_val, **_: 2 * args[0].numel() * out_val.shape[1]
    if kind == "block tables":
        # Every query counts as attending to the most keys of a sequence.
        return lambda *args, **_: 4 * args[0].numel() * int(args[6])
    if kind == "experts":
        # A product for each pair of token and expert: activations [.., columns], to [pairs, rows].
        return lambda *args, out_val, **_: 2 * out_val.numel() * args[0].shape[1]
    if kind == "host":  # of the GPU, if it fetches them
        passes = 1 if func is torch.ops.duoka.host_experts.default else 3
        return lambda *args, **_: passes * args[1].numel() * args[-2] if args[-1] else 0
    return flop_registry.get(func.overloadpacket)


def count_host_work(func: Any, args: Any, *, is_few: bool) -> tuple[int, int, int, int]:
    """Return the weight bytes and FLOPs of experts on the host, and the GPU's work for its cache.

    The host reads the bytes; no FLOPs means that the GPU fetches them. With a cache, the GPU's
    launches and memory traffic are those of experts that it has (`is_few`: see `count_bytes`).
    """
    if find_kind(func) != "host":
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
    query: Tensor, key: Tensor, value: Tensor, *, of_keys: int = 1, of_values: int = 1
) -> int:
    """Count the operations of `of_keys` products over the width of keys, `of_values` of values."""
    batch, heads, queries, width = query.shape
    widths = of_keys * width + of_values * value.shape[3]
    return 2 * batch * heads * queries * key.shape[2] * widths


def count_launches(
    func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_few: bool = False
) -> int:
    """Return the number of kernels that an operator's call starts; views and allocations none."""
    kind = find_kind(func)
    if kind in ("gathering", "scattering", "writing"):
        return 1
    if kind in ("allocating", "view"):
        return 0
    if kind == "experts":
        return _EXPERT_LAUNCHES * (len(inputs[1]) if is_few else inputs[2].shape[0])
    blocks = {tensor.block for tensor in _select_virtual(inputs)}
    return not all(tensor.block in blocks for tensor in _select_virtual(outputs))


def count_bytes(
    func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_few: bool = False
) -> int:
    """Return the bytes read and written by a kernel.

    `is_few` means a step of so few tokens that each reads the matrices of its own experts; a step
    of more tokens counts as reading all.
    """
    kind, outputs = find_kind(func), _select_virtual(outputs)
    if kind == "gathering":
        return _sum_bytes(inputs[1:]) + 2 * _sum_bytes(outputs)
    if kind == "block tables":
        # The keys and values of one sequence, the longest possible; queries and results.
        query, keys, values, *_, tables = inputs
        heads, head_dim = keys.shape[2:]
        number = 2 * tables.shape[1] * keys.shape[1] * heads * head_dim
        return 2 * query.nbytes + number * values.element_size()
    if kind == "scattering":
        return 2 * _sum_bytes(inputs[1:])
    if is_few and kind == "grouped":
        rows, matrices = inputs[0], inputs[1]
        share = min(1.0, rows.shape[0] / matrices.shape[0]) if matrices.ndim == 3 else 1.0
        return round(_sum_bytes([rows, *outputs]) + share * matrices.nbytes)
    if is_few and kind == "experts":
        # Selected weights are read, written, and read again.
        share = 3 * inputs[1].numel() / inputs[2].shape[0]
        return round(_sum_bytes([*inputs[:2], *outputs]) + share * _sum_bytes(inputs[2:]))
    return _sum_bytes(inputs) + _sum_bytes(outputs)


def _select_virtual(tensors: Sequence[Any]) -> list[virtual.VirtualTensor]:
    """Return the tensors on virtual GPUs."""
    return [tensor for tensor in tensors if isinstance(tensor, virtual.VirtualTensor)]


def _sum_bytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])
