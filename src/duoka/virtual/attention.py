"""Fused attention: which kernel CUDA would choose, and what goes into it.

The choice follows the published conditions of PyTorch's fused kernels (documentation of
`torch.nn.functional.scaled_dot_product_attention` and `torch.backends.cuda.SDPAParams`) for a GPU
of compute capability 8.x. The kernels themselves are in `attention_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn import functional

from . import attention_kernels
from .operators import handlers

Kernel = Literal["flash", "efficient", "math"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_LIMIT = 256
_FLASH_HEAD_MULTIPLE = 8
_MASK_MULTIPLE = 8
_libraries: list[torch.library.Library] = []


def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> Kernel:
    """Choose the kernel that CUDA would."""
    if not _fusible(query, key, value):
        return "math"
    grouped = query.shape[1] != key.shape[1] or key.shape[1] != value.shape[1]
    if torch.backends.cuda.flash_sdp_enabled() and _fits_flash(query, key, value, mask):
        square = not is_causal or query.shape[2] == key.shape[2]
        heads_fit = not grouped or (enable_gqa and query.shape[1] % key.shape[1] == 0)
        if square and heads_fit:
            return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped:
        multiple = 8 if query.dtype in _HALF else 4
        aligned = query.shape[3] % multiple == 0 and value.shape[3] % multiple == 0
        if aligned and query.dtype != torch.float64:
            return "efficient"
    return "math"


def _fusible(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 and tensor.numel() > 0 for tensor in tensors)
        and all(tensor.dtype == query.dtype for tensor in tensors)
        and all(tensor.shape[0] == query.shape[0] for tensor in tensors)
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
        and query.shape[3] == key.shape[3]
        and query.is_floating_point()
    )


def _fits_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    return (
        mask is None
        and query.dtype in _HALF
        and query.shape[3] == value.shape[3] <= _FLASH_HEAD_LIMIT
    )


@dataclass(frozen=True, slots=True)
class Options:
    """What `scaled_dot_product_attention` is given beside its three tensors, in torch's order."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """Implement ``aten::scaled_dot_product_attention`` for virtual GPUs; see `Options`."""
    options = Options(*rest, **named)
    mask = options.attn_mask
    kernel = choose_kernel(
        query, key, value, mask, is_causal=options.is_causal, enable_gqa=options.enable_gqa
    )
    if mask is not None and mask.dtype == torch.bool:
        additive = torch.zeros_like(mask, dtype=query.dtype)
        mask = additive.masked_fill_(mask.logical_not(), -math.inf)
    options = replace(options, attn_mask=mask)
    if kernel == "flash":
        return _flash(query, key, value, options)
    if kernel == "efficient":
        return _efficient(query, key, value, options)
    return _aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        mask,
        options.dropout_p,
        options.is_causal,
        None,
        scale=options.scale,
        enable_gqa=options.enable_gqa,
    )[0]


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> Any:
    head_dim = query.shape[3]
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    padding = -head_dim % _FLASH_HEAD_MULTIPLE
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, options.dropout_p, options.is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if padding else out


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> Any:
    bias = None if options.attn_mask is None else _bias(options.attn_mask, query, key)
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    return _aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        bias,
        needs_grad,
        options.dropout_p,
        options.is_causal,
        scale=options.scale,
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Make the mask what the kernel reads: rows aligned to 8 elements, one for every head."""
    strides = mask.stride()
    if strides[-1] != 1 or any(stride % _MASK_MULTIPLE for stride in strides[:-1]):
        length = mask.shape[-1]
        # A full multiple is added to an aligned length too: the kernel's own rule.
        padded = functional.pad(mask, (0, _MASK_MULTIPLE - length % _MASK_MULTIPLE))
        mask = padded[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _attend_below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attend in inference mode, where the operator arrives whole."""
    return attend(*args, **kwargs)


def install() -> None:
    """Register fused attention with torch, for the life of the process."""
    attention_kernels.install()
    handlers[_aten.scaled_dot_product_attention.default] = _attend_below
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    _libraries.append(library)
