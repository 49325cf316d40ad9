"""Operators that CUDA has and the CPU lacks, for backing tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from . import calls
from .operators import handlers, make
from .tensor import place

_aten = torch.ops.aten


def _histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count integers too; the CPU counts only floating-point numbers."""
    plain, gpu = calls.unwrap(func, args, kwargs)
    counted = plain.args[0]
    if gpu.meta:
        # The number of bins is given: no value is needed for the shape.
        bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
        if counted.is_meta:
            return place(torch.empty(bins, dtype=counted.dtype, device="meta"), gpu)
    if counted.is_floating_point() or counted.is_cuda:
        return place(func(*plain.args, **plain.kwargs), gpu)
    out = func(counted.double(), *plain.args[1:], **plain.kwargs)
    return place(out.to(counted.dtype), gpu)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a softmax of fp16 numbers in fp32 in one step, as on CUDA."""
    _, dim, half_to_float = args
    if not half_to_float:
        return make(func, args, kwargs)
    plain, gpu = calls.unwrap(func, args, kwargs)
    backing = plain.args[0]
    if backing.is_cuda or backing.is_meta:
        return place(func(backing, dim, True), gpu)
    return place(func(backing.float(), dim, False), gpu)


def _softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient in the dtype of the softmax's input, as on CUDA."""
    plain, gpu = calls.unwrap(func, args, kwargs)
    grad, output, dim, input_dtype = plain.args
    if grad.is_cuda or grad.is_meta or grad.dtype == input_dtype:
        return calls.wrap_results(calls.execute(func, plain, gpu), gpu)
    return place(func(grad, output, dim, grad.dtype).to(input_dtype), gpu)


def install() -> None:
    """Register the handlers of this module."""
    handlers[_aten.histc.default] = _histc
    handlers[_aten._softmax.default] = _softmax
    handlers[_aten._log_softmax.default] = _softmax
    handlers[_aten._softmax_backward_data.default] = _softmax_backward
    handlers[_aten._log_softmax_backward_data.default] = _softmax_backward
