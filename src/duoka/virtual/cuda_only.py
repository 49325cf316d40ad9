"""Operators of CUDA that have no CPU kernel, for backing tensors on the CPU.

4-bit weights: a weight packed for tensor cores has CUDA's shape and bytes, but an element order of
its own, which only the matrix product of this module reads. The product charges its result alone,
as CUDA's kernel does; buffers on the host aren't charged to the GPU. Fused cells of recurrent
networks are decomposed, and so keep more for backward than CUDA's.
"""

from __future__ import annotations

from typing import Any

import torch

from . import op_call
from .faults import MixedDevicesError
from .operators import below, handlers, make
from .tensor import place

_aten = torch.ops.aten
_ROWS, _COLUMNS, _LANES = 8, 16, 32
_MIDDLE = 8  # numbers are 0 to 15
_libraries: list[torch.library.Library] = []


def _histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a histogram of integers, too; the CPU's kernel takes floating-point numbers only."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    counted = plain.args[0]
    if counted.is_meta:
        # The result has one number per bin: its shape depends on no value.
        bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
        return place(torch.empty(bins, dtype=counted.dtype, device="meta"), gpu)
    countable = counted if counted.is_floating_point() else counted.double()
    out = func(countable, *plain.args[1:], **plain.kwargs)
    return place(out.to(counted.dtype), gpu)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a softmax; with `half_to_float` the input is fp16 and the result fp32, as on CUDA."""
    _, dim, half_to_float = args
    if not half_to_float:
        result = make(func, args, kwargs)
        if not args[0].is_contiguous():
            result.gpu.charge(args[0].nbytes)
        return result
    plain, gpu = op_call.unwrap(func, args, kwargs)
    backing = plain.args[0]
    if backing.is_meta:
        return place(func(backing, dim, True), gpu)
    return place(func(backing.float(), dim, False), gpu)


def softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient in the dtype of the softmax's input, as on CUDA."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    grad, output, dim, input_dtype = plain.args
    if grad.is_meta or grad.dtype == input_dtype:
        return op_call.wrap_results(op_call.execute(func, plain, gpu), gpu)
    return place(func(grad, output, dim, grad.dtype).to(input_dtype), gpu)


def _pack_int4(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack a weight [rows, columns / 2], two 4-bit numbers per byte, into CUDA's shape."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    numbers, tiles = plain.args
    # An int32 holds eight numbers of 4 bit. Example: 4096 x 4096 with 8 tiles has the shape
    # [512, 32, 32, 4]: 2^21 int32, which is 8 MiB, half a byte for each number.
    rows, columns = numbers.shape[0], 2 * numbers.shape[1]
    shape = (rows // _ROWS, columns // (_COLUMNS * tiles), _LANES, tiles // 2)
    if gpu.meta:
        return place(torch.empty(shape, dtype=torch.int32, device="meta"), gpu)
    return place(numbers.clone().view(torch.int32).reshape(shape), gpu)


def _multiply_int4(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply activations [tokens, columns] by a packed 4-bit weight."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    left, packed, group, scale_and_zero = plain.args
    if gpu.meta:
        # PyTorch's own shape rule doesn't accept plain meta tensors.
        shape = (left.shape[0], _ROWS * packed.shape[0])
        return place(torch.empty(shape, dtype=left.dtype, device="meta"), gpu)
    return place(multiply_int4(left, packed, group, scale_and_zero), gpu)


def multiply_int4(
    left: torch.Tensor, packed: torch.Tensor, group: int, scale_and_zero: torch.Tensor
) -> torch.Tensor:
    """Multiply by a packed 4-bit weight whose tensors are the data behind virtual tensors."""
    weight = _unpack_int4(packed, group, scale_and_zero)
    return left @ weight.to(left.dtype).t()


def _unpack_int4(packed: torch.Tensor, group: int, scale_and_zero: torch.Tensor) -> torch.Tensor:
    """Return the weight [rows, columns] as floats; scale_and_zero [columns / group, rows, 2]."""
    rows = _ROWS * packed.shape[0]
    pairs = packed.reshape(rows, -1).view(torch.uint8)
    numbers = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).reshape(rows, -1, group)
    scale, zero = (part.t().unsqueeze(-1) for part in scale_and_zero.float().unbind(-1))
    return ((numbers.float() - _MIDDLE) * scale + zero).reshape(rows, -1)


def _lstm_cell(
    inputs: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Compute a step of an LSTM; return the hidden state, the cell state and the gates."""
    gates = sum((bias for bias in biases if bias is not None), inputs + hidden)
    input_gate, forget_gate, new, output_gate = gates.chunk(4, 1)
    next_cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * new.tanh()
    return output_gate.sigmoid() * next_cell.tanh(), next_cell, gates


def _gru_cell(
    inputs: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a step of a GRU; return the hidden state, and a tensor kept for backward."""
    input_bias, hidden_bias = biases if biases else (None, None)
    from_input = inputs if input_bias is None else inputs + input_bias
    from_hidden = hidden if hidden_bias is None else hidden + hidden_bias
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + (input_reset + hidden_reset).sigmoid() * hidden_new).tanh()
    return new + update * (state - new), from_input


def _pack_sequence(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack padded sequences; `lengths` and the result's batch sizes are on the CPU, as on CUDA."""
    lengths = args[1]
    if lengths.device.type != "cpu":
        error = MixedDevicesError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} tensor",
            func,
            [args[0], lengths],
        )
        error.for_cpu = lengths
        raise error
    plain, gpu = op_call.unwrap(func, args, kwargs)
    data, batch_sizes = func(*plain.args, **plain.kwargs)
    return place(data, gpu), batch_sizes


def install() -> None:
    """Register the handlers of this module."""
    handlers[_aten.histc.default] = _histc
    handlers[_aten._softmax.default] = _softmax
    handlers[_aten._log_softmax.default] = _softmax
    handlers[_aten._log_softmax_backward_data.default] = softmax_backward
    handlers[_aten._convert_weight_to_int4pack.default] = _pack_int4
    handlers[_aten._weight_int4pack_mm.default] = _multiply_int4
    handlers[_aten._pack_padded_sequence.default] = _pack_sequence
    library = torch.library.Library("aten", "IMPL")
    for name, cell in (("_thnn_fused_lstm_cell", _lstm_cell), ("_thnn_fused_gru_cell", _gru_cell)):
        library.impl(name, cell, "AutogradPrivateUse1")
        handlers[getattr(_aten, name).default] = below(cell)
    _libraries.append(library)
