"""A replacement of the package flash_attn for remote code.

This module stands for the package and for each of its modules. It has the functions that published
model code imports, with the same results and shapes. They run on any device, use PyTorch's
`scaled_dot_product_attention`, and refuse unknown arguments.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as padding

flash_attn_interface = bert_padding = layers = rotary = sys.modules[__name__]


class FlashAttnOptions(NamedTuple):
    """The options of flash_attn functions, in the order of their positional arguments."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    deterministic: bool = False


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Tensor:
    """Compute attention of [batch, queries, heads, head_dim] to [batch, keys, key_heads, head_dim].

    The last query is at the position of the last key. `window_size` is the numbers of keys before
    and after its position to which a query attends; a negative number means no limit.
    """
    # Query i is at the position of key `ahead + i`. Two queries over four keys, causal, window 1:
    #
    #   query 0   . x x .        row 0 from column ahead - left = 1 (triu) to ahead = 2 (tril)
    #   query 1   . . x x
    options = FlashAttnOptions(*args, **named)
    ahead, (left, right) = k.shape[1] - q.shape[1], options.window_size
    right = 0 if options.causal else right
    is_causal, mask = ahead == right == 0 and left < 0, None
    if not is_causal and (left >= 0 or right >= 0):
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        mask = mask.tril(ahead + right if right >= 0 else k.shape[1])
        mask = mask.triu(ahead - left if left >= 0 else -q.shape[1])
    sizes: Any = {"scale": options.softmax_scale, "enable_gqa": q.shape[2] != k.shape[2]}
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v, mask, options.dropout_p, is_causal, **sizes)
    return mixed.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """Compute attention within each sequence of a packed row [tokens, heads, head_dim].

    After the offsets `cu_seqlens_q` and `cu_seqlens_k` come two maximum lengths, which are ignored,
    and the options of `flash_attn_func`.
    """
    options = {name: value for name, value in kw.items() if not name.startswith("max_seqlen_")}
    args = args[2 - len(kw) + len(options) :]
    ends = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    parts = [(q[None, a:b], k[None, c:d], v[None, c:d]) for (a, b), (c, d) in ends]
    return torch.cat([flash_attn_func(*part, *args, **options)[0] for part in parts])


def unpad_input(tensor: Tensor, attention_mask: Tensor) -> Any:
    """Return the tokens without padding, their indices, the cumulative lengths, and the maximum."""
    return padding._unpad_input(tensor, attention_mask)[:4]


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False
) -> Tensor:
    """Apply rotary embeddings, [tokens, dims / 2], to the first `dims` dimensions of each head.

    `x` is [batch, tokens, heads, head_dim]; the result is always a new tensor.
    """
    size, axis = 2 * cos.shape[-1], -1 if interleaved else -2
    cos, sin = (part[: x.shape[1], None] for part in (cos, sin))
    first, second = x[..., :size].unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(axis)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], axis)
    rotated = torch.cat([turned.flatten(-2).to(x.dtype), x[..., size:]], -1)
    return x.copy_(rotated) if inplace else rotated


flash_attn_unpadded_func, apply_rotary_emb_func = flash_attn_varlen_func, apply_rotary_emb
index_first_axis, pad_input = Tensor.__getitem__, padding._pad_input
