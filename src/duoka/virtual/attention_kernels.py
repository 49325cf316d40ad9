"""CUDA's fused attention operators on virtual GPUs: their outputs and their work memory.

The memory is that of the kernels as PyTorch ships them: the output, a logsumexp per row in fp32,
two small random states; in backward the gradients, the row sums and fp32 accumulators. The numbers
come from `attention_numbers`: what the host holds for them is no memory of the GPU. With data on a
real GPU its own kernels run.
"""

from __future__ import annotations

from typing import Any

import torch

from . import calls
from .attention_numbers import Inputs, attend, differentiate
from .operators import handlers
from .state import Gpu
from .tensor import VirtualTensor, place

_aten = torch.ops.aten
_EFFICIENT_ROWS = 32
_EFFICIENT_REGISTER_HEAD = 128
_EFFICIENT_BLOCK = 64
_FLASH_ROWS = 128


def _flash(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, gpu = calls.unwrap(func, args, kwargs)
    query, key = plain.args[0], plain.args[1]
    if query.is_cuda:
        return calls.wrap_results(func(*plain.args, **plain.kwargs), gpu)
    inputs = Inputs(
        query,
        key,
        plain.args[2],
        dropout=plain.args[3] if len(args) > 3 else 0.0,
        is_causal=len(args) > 4 and bool(args[4]),
        scale=kwargs.get("scale"),
    )
    out, rows = attend(inputs)
    results = place(out, gpu), place(rows, gpu)
    states = place(inputs.seed, gpu), place(_scalar(query), gpu)
    debug = place(query.new_empty(0), gpu)
    return *results, None, None, query.shape[2], key.shape[2], *states, debug


def _flash_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, gpu = calls.unwrap(func, args, kwargs)
    grad, query, key, value, out, rows, _, _, _, _, dropout, is_causal, seed, _ = plain.args
    if query.is_cuda:
        return calls.wrap_results(func(*plain.args, **plain.kwargs), gpu)
    inputs = Inputs(
        query, key, value, dropout=dropout, is_causal=is_causal, scale=kwargs.get("scale"),
        seed=seed,
    )  # fmt: skip
    grads = differentiate(inputs, grad, out, rows)
    results = _placed(grads[:3], (query, key, value), gpu)
    batch, heads, tokens, head_dim = query.shape
    padded_tokens = _rounded(tokens, _FLASH_ROWS)
    padded_head = _rounded(head_dim, 32 if head_dim <= 128 else 64)
    row_bytes = 4 * batch * heads * padded_tokens
    sizes = [row_bytes, row_bytes * padded_head]
    if key.shape[1] != heads:
        # Gradients of keys and values are made per query head, then summed.
        sizes += [query.element_size() * batch * heads * key.shape[2] * head_dim] * 2
    gpu.charge(*sizes)
    return results


def _efficient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, gpu = calls.unwrap(func, args, kwargs)
    query, key, value, bias, needs_rows = plain.args[:5]
    if query.is_cuda:
        return calls.wrap_results(func(*plain.args, **plain.kwargs), gpu)
    inputs = Inputs(
        query, key, value, bias,
        dropout=plain.args[5] if len(args) > 5 else 0.0,
        is_causal=len(args) > 6 and bool(args[6]),
        scale=kwargs.get("scale"),
    )  # fmt: skip
    out, rows = attend(inputs)
    batch, heads, tokens, _ = query.shape
    padded = rows.new_empty(batch, heads, _rounded(tokens, _EFFICIENT_ROWS) if needs_rows else 0)
    if needs_rows:
        padded[..., :tokens] = rows
    results = place(out, gpu), place(padded, gpu)
    states = place(inputs.seed, gpu), place(_scalar(query), gpu)
    if query.element_size() == 2 and value.shape[3] > _EFFICIENT_REGISTER_HEAD:
        # A head that doesn't fit the registers is accumulated in fp32 memory.
        gpu.charge(4 * out.numel())
    return *results, *states


def _efficient_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain, gpu = calls.unwrap(func, args, kwargs)
    grad, query, key, value, bias, out, rows, seed, _, dropout, needed = plain.args[:11]
    if query.is_cuda:
        return calls.wrap_results(func(*plain.args, **plain.kwargs), gpu)
    inputs = Inputs(
        query, key, value, bias, dropout=dropout,
        is_causal=len(args) > 11 and bool(args[11]), scale=kwargs.get("scale"), seed=seed,
    )  # fmt: skip
    batch, heads, tokens, head_dim = query.shape
    grads = differentiate(inputs, grad, out, rows[..., :tokens], needs_bias=needed[3])
    results = _placed(grads[:3], (query, key, value), gpu)
    bias_grad = place(grads[3], gpu) if grads[3] is not None else None
    row_bytes = 4 * batch * heads * tokens
    if query.element_size() == 2:
        accumulator = _rounded(tokens, _EFFICIENT_BLOCK) * _rounded(head_dim, _EFFICIENT_BLOCK)
        gpu.charge(row_bytes, 4 * batch * heads * accumulator)
    else:
        # In fp32 the row sums are made outside the kernel, from a product of the outputs' size.
        gpu.charge(4 * out.numel(), row_bytes)
    return *results, bias_grad


def _placed(
    grads: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor, ...], gpu: Gpu
) -> tuple[VirtualTensor, ...]:
    """Place gradients in memory of their own, laid out as the inputs are."""
    placed = []
    for grad, like in zip(grads, inputs, strict=True):
        assert grad is not None
        laid_out = torch.empty_like(like, device=grad.device)
        placed.append(place(laid_out.copy_(grad), gpu))
    return tuple(placed)


def _scalar(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def install() -> None:
    """Register the handlers of this module."""
    handlers[_aten._scaled_dot_product_flash_attention.default] = _flash
    handlers[_aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward
    handlers[_aten._scaled_dot_product_efficient_attention.default] = _efficient
    handlers[_aten._scaled_dot_product_efficient_attention_backward.default] = _efficient_backward
