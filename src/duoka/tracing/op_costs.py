"""Arithmetic: the floating-point operations of one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# torch 2.11's own formula refuses grouped queries, where keys have fewer heads than queries.
_FUSED_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
    }
)
_ITS_BACKWARD = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
        torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    }
)


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return how many additions and multiplications an operator's call takes.

    Those of matrix products, convolutions and attention, as ``torch.utils.flop_counter`` counts
    them; whatever else is 0. Causal attention counts in full.
    """
    if func.overloadpacket in _FUSED_ATTENTION:
        return _attention_flops(*args[:3])
    if func.overloadpacket in _ITS_BACKWARD:
        # Scores again, and the gradients of queries and keys; those of scores and values.
        return _attention_flops(*args[1:4], of_keys=3, of_values=2)
    if func.overloadpacket is torch.ops.aten._weight_int4pack_mm:
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
    """So many products over the width of keys, and over that of values."""
    batch, heads, queries, width = query.shape
    widths = of_keys * width + of_values * value.shape[3]
    return 2 * batch * heads * queries * key.shape[2] * widths
