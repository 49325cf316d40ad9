"""The values of fused attention, computed on backing tensors: forward and backward.

PyTorch's fused CPU kernel computes them; it supports neither dropout nor gradients of the bias.
Nothing here is charged to a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import varlen

_aten = torch.ops.aten


@dataclass(slots=True)
class Inputs:
    """The inputs of a call of fused attention.

    `query`, `key`, `value`: ``[batch, heads, tokens, head_dim]``; with fewer key heads than query
    heads, each key head serves a group of query heads. `bias` is added to the scores, ``[batch,
    heads, query tokens, key tokens]``. `scale` is 1 / sqrt(head_dim) by default.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is None:
            self.scale = 1 / math.sqrt(self.query.shape[3])

    @property
    def is_meta(self) -> bool:
        """True if a tensor is on the meta device, so that only shapes are known."""
        return self.query.is_meta or self.key.is_meta or self.value.is_meta

    @property
    def num_groups(self) -> int:
        """The number of query heads for each key head."""
        return self.query.shape[1] // self.key.shape[1]

    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values with their heads repeated, one for every query head."""
        key, value, groups = self.key, self.value, self.num_groups
        if groups == 1:
            return key, value
        return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def attend(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the logsumexp of every row of scores in fp32."""
    query = inputs.query
    batch, heads, tokens, _ = query.shape
    if inputs.is_meta:
        shape = (batch, tokens, heads, inputs.value.shape[3])
        out = torch.empty(shape, dtype=query.dtype, device="meta").transpose(1, 2)
        return out, torch.empty(shape[0], heads, tokens, device="meta")
    padded, head_dim = _pad_to_equal_heads(inputs)
    out, rows = _aten._scaled_dot_product_flash_attention_for_cpu(
        *padded, 0.0, inputs.is_causal, attn_mask=inputs.bias, scale=inputs.scale
    )
    if out.shape[3] != head_dim:  # cut off padding; lay out heads of a token side by side
        out = out[..., :head_dim].transpose(1, 2).contiguous().transpose(1, 2)
    return out, rows


# PyTorch has kernels of `torch_attn::_varlen_attn` for CUDA alone.
@varlen._varlen_attn.register_kernel("cpu")
def attend_over_pages(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what `torch.nn.attention.varlen.varlen_attn` does over pages, on the CPU.

    Only causal attention with one pass over the keys is supported (`num_splits=1`).

    Parameters
    ----------
    args
        Those of the operator, all of them.

    Returns
    -------
    tuple
        The result [tokens, heads, head_dim], whose rows of no sequence are zero; logsumexps
        [heads, tokens] without values; and the state of random numbers.
    """
    query, key, value, cu_seq_q, _, _, _, _, scale, window, is_grouped, used, tables, _ = args
    rows = torch.empty(query.shape[1], len(query), device=query.device)
    result = torch.zeros_like(query), rows, torch.zeros(2, dtype=torch.uint64, device=query.device)
    if query.is_meta or key.is_meta:
        return result
    starts, left = cu_seq_q.tolist(), window[0]
    for index, number in enumerate(used.tolist()):
        start, stop = starts[index : index + 2]
        if start == stop:
            continue
        position = torch.arange(number - (stop - start), number)[:, None]
        is_seen = torch.arange(number) <= position
        if left >= 0:
            is_seen &= torch.arange(number) >= position - left
        pages = tables[index, : -(-number // key.shape[1])]
        keys, values = (
            part[pages].flatten(0, 1)[:number].transpose(0, 1)[None] for part in (key, value)
        )
        attended = functional.scaled_dot_product_attention(
            query[None, start:stop].transpose(1, 2),
            keys,
            values,
            attn_mask=is_seen,
            scale=scale,
            enable_gqa=is_grouped,
        )
        result[0][start:stop] = attended[0].transpose(0, 1)
    return result


def differentiate(
    inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value."""
    if inputs.is_meta:
        return inputs.query, inputs.key, inputs.value
    padded, head_dim = _pad_to_equal_heads(inputs)
    width = padded[0].shape[3]
    rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    query_grad, key_grad, value_grad = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _pad_heads(grad, width), *padded, _pad_heads(out, width), rows, 0.0, inputs.is_causal,
        attn_mask=inputs.bias, scale=inputs.scale,
    )  # fmt: skip
    query_dim = inputs.query.shape[3]
    return (
        query_grad[..., :query_dim],
        _sum_shared(inputs, key_grad[..., :query_dim]),
        _sum_shared(inputs, value_grad[..., :head_dim]),
    )


def _pad_to_equal_heads(inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], int]:
    """Pad heads to equal size for the CPU's kernel: zeros change no score.

    Return query, key and value, and the head size of the value before padding.
    """
    key, value = inputs.shared()
    width = max(inputs.query.shape[3], value.shape[3])
    return tuple(_pad_heads(item, width) for item in (inputs.query, key, value)), value.shape[3]


def _pad_heads(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the head size of a tensor with zeros to `width`."""
    missing = width - tensor.shape[3]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _sum_shared(inputs: Inputs, grad: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of each shared key head over its group of query heads."""
    if inputs.num_groups == 1:
        return grad
    shared: torch.Tensor = grad.unflatten(1, (inputs.key.shape[1], inputs.num_groups))
    return shared.sum(2)
