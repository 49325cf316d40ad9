"""Temporary buffers of CUDA kernels: memory beside the results, freed when the operation ends.

Measured with PyTorch's CUDA build. Buffers of less than a percent of an operation's result (partial
sums, the scratch of `cumsum` and `topk`) aren't counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import cuda_only
from .operators import below, handlers, make, run_whole

_aten = torch.ops.aten
_SORTED_IN_SHARED_MEMORY = 4096
_SORT_TABLE_BYTES = 8704  # plus a third of a byte per number, for rows of up to a million
_WHOLE = ("silu_backward", "mish_backward")
"""Operators with a CUDA kernel of their own, which other backends decompose."""

_libraries: list[torch.library.Library] = []


# By operator: a function from the result and the arguments to the bytes of each buffer.
_BUFFERS: dict[Any, Callable[[Any, Any], tuple[int, ...]]] = {
    # The exponentials and their sums.
    _aten.logsumexp.default: lambda out, args: (args[0].nbytes, out.nbytes),
    # A random number for each weight.
    _aten.multinomial.default: lambda out, args: (args[0].nbytes,),
    # The search for fully masked rows: a boolean per element, one per row, and a number.
    _aten._safe_softmax.default: lambda out, args: (
        *(out.numel(), out.numel() // max(out.shape[args[1]], 1)),
        out.element_size(),
    ),
    # The copy of a broadcast mask, and int64 positions, the cumulative sum of the mask.
    _aten.masked_scatter.default: lambda out, args: (
        0 if args[1].is_contiguous() and args[1].shape == out.shape else out.numel(),
        8 * out.numel(),
    ),
}


def _make_with_buffers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of `_BUFFERS`, and charge its buffers."""
    out = make(func, args, kwargs)
    out.gpu.charge(*_BUFFERS[func](out, args))
    return out


def _softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the gradient of a softmax; charge a buffer for the product of gradient and output."""
    result = cuda_only.softmax_backward(func, args, kwargs)
    result.gpu.charge(args[0].nbytes)
    return result


def _sort(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sort, and charge the buffers of radix sort; rows are sorted together, by row and value."""
    ordered, order = result = make(func, args, kwargs)
    dim = args[1] if func is _aten.sort.default and len(args) > 1 else kwargs.get("dim", -1)
    length = ordered.shape[dim] if ordered.dim() else 1
    # A single row always counts as long: a step's operations must not depend on its tokens.
    if ordered.dim() == 1 or length > _SORTED_IN_SHARED_MEMORY:
        rows = [order.nbytes, ordered.nbytes] if ordered.numel() > length else []
        tables = 0  # for a single row, as a profile's rules couldn't express them
        if ordered.dim() > 1:
            tables = _SORT_TABLE_BYTES + ordered.numel() // length * (length // 3)
        ordered.gpu.charge(order.nbytes, *rows, order.nbytes + ordered.nbytes + tables)
    return result


def _make_softmax(name: str) -> Any:
    """Make a softmax that converts from fp16 to fp32 inside the kernel, as on CUDA."""
    kernel = getattr(_aten, f"_{name}").default

    def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype == torch.float16 and dtype == torch.float32:
            return kernel(tensor, dim, True)
        return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)

    return softmax


def install() -> None:
    """Register the operators of this module with torch, for the life of the process."""
    handlers.update(dict.fromkeys(_BUFFERS, _make_with_buffers))
    handlers[_aten._softmax_backward_data.default] = _softmax_backward
    handlers[_aten.sort.default] = handlers[_aten.sort.stable] = _sort
    library = torch.library.Library("aten", "IMPL")
    for name in ("softmax", "log_softmax"):
        softmax = _make_softmax(name)
        library.impl(f"{name}.int", softmax, "AutogradPrivateUse1")
        handlers[getattr(_aten, name).int] = below(softmax)
    for name in _WHOLE:
        # An operator registered for the backend isn't decomposed before `__torch_dispatch__`.
        whole = getattr(_aten, name).default
        handlers[whole] = make
        library.impl(name, partial(run_whole, whole), "PrivateUse1")
    _libraries.append(library)
