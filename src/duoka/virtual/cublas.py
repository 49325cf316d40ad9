"""Which operations are cuBLAS's on a GPU, so that the first of them takes its workspace."""

from __future__ import annotations

import sys
from typing import Any

import torch

_ATEN = torch.ops.aten
# Not here: `_int_mm`, which gets no workspace, and products with packed weights, of PyTorch's own.
_PRODUCTS = frozenset(
    {
        _ATEN.mm, _ATEN.bmm, _ATEN.mv, _ATEN.dot, _ATEN.vdot,
        _ATEN.addmm, _ATEN.addmm_, _ATEN._addmm_activation,
        _ATEN.baddbmm, _ATEN.baddbmm_, _ATEN.addmv, _ATEN.addmv_,
        _ATEN._scaled_mm, _ATEN._grouped_mm,
    }
)  # fmt: skip
# From torch 2.13 on outer products of batches, as rotary embeddings make them, are Triton's.
_OUTER_IS_TRITONS = "torch._native.ops.bmm_outer_product" in sys.modules


def is_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator's call is a matrix product of cuBLAS's: of nothing there is none."""
    packet = func.overloadpacket
    if packet not in _PRODUCTS:
        return False
    if packet is _ATEN.bmm and _OUTER_IS_TRITONS and args[0].shape[2] == 1:
        return False
    return all(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
