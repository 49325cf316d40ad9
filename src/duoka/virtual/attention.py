"""Fused attention: CUDA's choice of a kernel, and the memory of the chosen kernel.

The choice follows the published conditions of PyTorch's fused kernels (documentation of
`torch.nn.functional.scaled_dot_product_attention` and `torch.backends.cuda.SDPAParams`) for a GPU
of compute capability 8.x, or before Ampere. Where kernels differ among 8.x, those of 8.6 are meant;
cuDNN's kernels for Hopper are treated as flash attention. Outputs and temporary buffers are those
of the kernels as PyTorch ships them: the output, a logsumexp per row in fp32, two small states of
the random numbers; in backward the gradients, the row sums and fp32 accumulators.
`attention_numbers` computes the values on the host, which charges no memory to the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from duoka.forecast.flash_splits import FlashShape, PartBytes

from . import attention_numbers, op_call
from .attention_numbers import Inputs, differentiate
from .operators import below, handlers
from .tensor import VirtualTensor, place
from .world import VirtualGpu

Kernel = Literal["flash", "efficient", "math"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_LIMIT = 256
_FLASH_HEAD_MULTIPLE = 8
_MASK_MULTIPLE = 8
_EFFICIENT_ROWS = 32
_EFFICIENT_REGISTER_HEAD = 128
_EFFICIENT_BLOCK = 64
_EFFICIENT_FIELDS = 4  # numbers in front of each tile of the fp32 accumulator
_EFFICIENT_SPLITS = 200  # key splits of all heads together, if batch * heads < _MANY_HEADS
_MANY_HEADS = 256
_FLASH_ROWS = 128
_libraries: list[torch.library.Library] = []


# kernel      dtype         mask   heads                        lengths, sizes
# flash       16 bit        none   equal, or grouped with GQA   head size equal and at most 256
# efficient   all but fp64  any    equal                        head size a multiple of 8 (fp32: 4)
# math        any           any    any                          any
#
# The first row that holds is taken; causal flash attention needs as many queries as keys.
def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
    before_ampere: bool = False,
) -> Kernel:
    """Return the kernel that CUDA would choose for a call of attention."""
    if not _is_fusible(query, key, value) or (before_ampere and query.dtype == torch.bfloat16):
        return "math"
    # Flash where its conditions hold, then memory-efficient, then plain matrix products.
    grouped = query.shape[1] != key.shape[1] or key.shape[1] != value.shape[1]
    square = not is_causal or query.shape[2] == key.shape[2]
    heads_fit = not grouped or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    dims_fit = query.shape[3] == value.shape[3] <= _FLASH_HEAD_LIMIT
    may_flash = torch.backends.cuda.flash_sdp_enabled() and not before_ampere and mask is None
    if may_flash and query.dtype in _HALF and square and heads_fit and dims_fit:
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped:
        multiple = 8 if query.dtype in _HALF else 4
        aligned = query.shape[3] % multiple == 0 and value.shape[3] % multiple == 0
        if aligned and query.dtype != torch.float64:
            return "efficient"
    return "math"


def _is_fusible(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if shapes, dtypes and strides meet the conditions of both fused kernels."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 and tensor.numel() > 0 for tensor in tensors)
        and all(tensor.dtype == query.dtype for tensor in tensors)
        and all(tensor.shape[0] == query.shape[0] for tensor in tensors)
        and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
        and query.shape[3] == key.shape[3]
        and query.is_floating_point()
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `scaled_dot_product_attention`, in torch's order."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """Implement ``aten::scaled_dot_product_attention`` for virtual GPUs.

    `rest` and `named` are the options of torch's function, in the order of `Options`.
    """
    assert isinstance(query, VirtualTensor)
    options = Options(*rest, **named)
    mask = options.attn_mask
    gqa, before_ampere = options.enable_gqa, query.gpu.world.generation.before_ampere
    kernel = choose_kernel(
        *(query, key, value, mask),
        is_causal=options.is_causal,
        enable_gqa=gqa,
        before_ampere=before_ampere,
    )
    needs_math = options.dropout_p or (mask is not None and mask.requires_grad)
    if not query.backing.is_meta and needs_math:
        kernel = "math"  # the CPU's fused kernel has neither dropout nor gradients of the mask
    if kernel == "flash":
        return _attend_flash(query, key, value, options)
    if kernel == "efficient":
        return _attend_efficient(query, key, value, options)
    args = (query, key, value, _additive(mask, query), options.dropout_p, options.is_causal, None)
    math_attention = _aten._scaled_dot_product_attention_math
    return math_attention(*args, scale=options.scale, enable_gqa=gqa)[0]


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Turn a boolean mask into an additive one (0 or -inf); leave an additive mask or None."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, query.new_zeros(()), query.new_full((), -math.inf))


def _attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> Any:
    """Call flash attention, with heads padded to the multiple of 8 that the kernel needs."""
    head_dim = query.shape[3]
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    # The kernel takes heads of whole multiples of 8: 100 is padded to 104. Zeros change no score,
    # the scale stays 1 / sqrt(100), and the padding of the output is cut off.
    padding = -head_dim % _FLASH_HEAD_MULTIPLE
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, options.dropout_p, options.is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if padding else out


def _attend_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> Any:
    """Call memory-efficient attention, with the mask as an aligned additive bias."""
    bias = _bias(_additive(options.attn_mask, query), query, key)
    requires_grad = any(tensor.requires_grad for tensor in (query, key, value))
    args = (query, key, value, bias, torch.is_grad_enabled() and requires_grad)
    return _aten._scaled_dot_product_efficient_attention(
        *args, options.dropout_p, options.is_causal, scale=options.scale
    )[0]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Expand an additive mask to [batch, heads, queries, keys], its rows aligned to 8 elements.

    Return None without a mask.
    """
    if mask is None:
        return None
    strides = mask.stride()
    if strides[-1] != 1 or any(stride % _MASK_MULTIPLE for stride in strides[:-1]):
        length = mask.shape[-1]
        # An aligned length grows by a full multiple, too, as in PyTorch's own padding.
        padded = functional.pad(mask, (0, _MASK_MULTIPLE - length % _MASK_MULTIPLE))
        mask = padded[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _run_flash(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator of flash attention: values, outputs and temporary buffers."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    query, key = plain.args[0], plain.args[1]
    is_causal = len(args) > 4 and bool(args[4])
    inputs = Inputs(query, key, plain.args[2], is_causal=is_causal, scale=kwargs.get("scale"))
    out, rows = attention_numbers.attend(inputs)
    results = *_place_like((out,), (query,), gpu), place(rows, gpu)
    batch, heads, tokens, head_dim = query.shape
    if len(args) <= 3 or not args[3]:  # no dropout
        # The kernel may split the keys: each part has fp32 row sums and an fp32 output.
        shape, sizes = FlashShape(heads, key.shape[1], head_dim), (batch, tokens, key.shape[2])
        padded_head = _round_up(head_dim, 32 if head_dim <= 128 else 64)
        gpu.charge(*(PartBytes.of(shape, row, *sizes) for row in (4, 4 * padded_head)))
    states = [place(state, gpu) for state in _random_states(query)]
    debug = place(query.new_empty(0), gpu)
    return *results, None, None, query.shape[2], key.shape[2], *states, debug


def _run_flash_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the backward operator of flash attention: gradients and temporary buffers."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    grad, query, key, value, out, rows, _, _, _, _, _, is_causal, _, _ = plain.args
    inputs = Inputs(query, key, value, is_causal=is_causal, scale=kwargs.get("scale"))
    grads = differentiate(inputs, grad, out, rows)
    results = _place_like(grads, (query, key, value), gpu)
    # In fp32: a sum for each row of queries, and the accumulator of the queries' gradient.
    batch, heads, tokens, head_dim = query.shape
    padded_tokens = _round_up(tokens, _FLASH_ROWS)
    padded_head = _round_up(head_dim, 32 if head_dim <= 128 else 64)
    row_bytes = 4 * batch * heads * padded_tokens
    sizes = [row_bytes, row_bytes * padded_head]
    if key.shape[1] != heads:
        # Gradients of keys and values are computed per query head, then summed per key head.
        sizes += [query.element_size() * batch * heads * key.shape[2] * head_dim] * 2
    # The kernel reads gradient and output with all heads of a token side by side: else a copy.
    sizes += [item.nbytes for item in (grad, out) if not item.transpose(1, 2).is_contiguous()]
    gpu.charge(*sizes)
    return results


def _run_efficient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator of memory-efficient attention: values, outputs and temporary buffers."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    query, key, value, bias, needs_rows = plain.args[:5]
    inputs = Inputs(
        query, key, value, bias,
        is_causal=len(args) > 6 and bool(args[6]),
        scale=kwargs.get("scale"),
    )  # fmt: skip
    out, rows = attention_numbers.attend(inputs)
    batch, heads, tokens, _ = query.shape
    padded = rows.new_empty(batch, heads, _round_up(tokens, _EFFICIENT_ROWS) if needs_rows else 0)
    if needs_rows:
        padded[..., :tokens] = rows
    results = place(out, gpu), place(padded, gpu)
    # Without dropout CUDA's kernel keeps the random states on the host.
    has_dropout = len(args) > 5 and bool(args[5])
    states = _random_states(query) if has_dropout else [query.new_empty(0)] * 2
    if query.element_size() == 2 and value.shape[3] > _EFFICIENT_REGISTER_HEAD:
        # A head that doesn't fit the registers is accumulated in fp32 memory.
        gpu.charge(4 * out.numel())
    return *results, *(place(state, gpu) for state in states)


def _run_efficient_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the backward operator of memory-efficient attention."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    grad, query, key, value, bias, out, rows, _, _, _, needed = plain.args[:11]
    inputs = Inputs(
        query, key, value, bias,
        is_causal=len(args) > 11 and bool(args[11]), scale=kwargs.get("scale"),
    )  # fmt: skip
    batch, heads, tokens, _ = query.shape
    grads = differentiate(inputs, grad, out, rows[..., :tokens])
    swapped = (item.transpose(1, 2) for item in (query, key, value))
    # Gradients have all heads of a token side by side.
    layouts = tuple(item.new_empty(item.shape).transpose(1, 2) for item in swapped)
    results = _place_like(grads, layouts, gpu)
    bias_grad = place(torch.empty_like(bias), gpu) if needed[3] and bias is not None else None
    row_bytes = 4 * batch * heads * tokens
    if query.element_size() == 4:
        # In fp32 the row sums come from a product as large as the output, before the kernel.
        gpu.charge(4 * out.numel(), row_bytes, row_bytes)
    gpu.charge(row_bytes, _accumulator_bytes(query, key, value))
    return *results, bias_grad


def _accumulator_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the bytes of the accumulators of efficient attention's backward pass."""
    # The gradient of queries [tokens, head_dim] is accumulated in fp32 tiles of `rows` x 64, each
    # behind a few fields. Example: 100 tokens and a half-precision head of 80: rows = 128, so one
    # row of two tiles for each head, 2 x (128 x 64 + 4) numbers.
    rows = block = _EFFICIENT_BLOCK
    head_dim, is_half = max(query.shape[3], value.shape[3]), query.element_size() == 2
    if is_half and (block < head_dim <= 96 or head_dim > _EFFICIENT_REGISTER_HEAD):
        rows = 2 * block
    num_blocks = -(-query.shape[2] // rows) * -(-query.shape[3] // block)
    num_heads = query.shape[0] * query.shape[1]
    numbers = num_heads * num_blocks * (rows * block + _EFFICIENT_FIELDS)
    if is_half and head_dim > 96:
        # Few heads split their keys into about `_EFFICIENT_SPLITS` parts in all. The exact number
        # isn't proportional to the batch, so no rule of a profile could express it.
        is_many = num_heads >= _MANY_HEADS
        splits = num_heads * -(-key.shape[2] // block) if is_many else _EFFICIENT_SPLITS
        numbers += splits * block * (_round_up(key.shape[3], 128) + _round_up(value.shape[3], 128))
    return 4 * numbers


def _place_like(
    results: tuple[torch.Tensor, ...], layouts: tuple[torch.Tensor, ...], gpu: VirtualGpu
) -> tuple[VirtualTensor, ...]:
    """Copy results into new tensors on the GPU, each with the strides of its layout tensor."""
    return tuple(
        place(torch.empty_like(model, device=result.device).copy_(result), gpu)
        for result, model in zip(results, layouts, strict=True)
    )


def _run_flash_over_pages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `torch.nn.attention.varlen.varlen_attn`: values, outputs and temporary buffers.

    Only a single pass over the keys is supported (`num_splits=1`).
    """
    plain, gpu = op_call.unwrap(func, args, kwargs)
    if gpu.world.generation.before_ampere:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    out, rows, seed = attention_numbers.attend_over_pages(*plain.args)
    results = place(out, gpu), place(rows, gpu)
    # The kernel's own state of random numbers lives as long as the call, which returns another one.
    state = place(_random_states(out)[0], gpu)
    gpu.charge(8)
    returned = *results, place(seed, gpu)
    del state
    return returned


def _random_states(like: torch.Tensor) -> list[torch.Tensor]:
    """Return the seed and the offset of a kernel's random numbers."""
    return [torch.zeros(shape, dtype=torch.int64, device=like.device) for shape in ((2,), ())]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def install() -> None:
    """Register fused attention with torch, for the life of the process."""
    for kind, forward, backward in (
        ("flash", _run_flash, _run_flash_backward),
        ("efficient", _run_efficient, _run_efficient_backward),
    ):
        name = f"_scaled_dot_product_{kind}_attention"
        handlers[getattr(_aten, name).default] = forward
        handlers[getattr(_aten, f"{name}_backward").default] = backward
    handlers[torch.ops.torch_attn._varlen_attn.default] = _run_flash_over_pages
    handlers[_aten.scaled_dot_product_attention.default] = below(attend)
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    _libraries.append(library)
