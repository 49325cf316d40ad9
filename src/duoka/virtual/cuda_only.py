"""Operators that CUDA has and the CPU lacks, for backing tensors on the CPU.

Weights of 4 bit: the layout for tensor cores has the shape and the bytes that CUDA gives it; what
stands in it is in an order of our own, which only the product here reads. The product charges its
result alone, as CUDA's kernel does; what the host holds to compute the numbers is no memory of the
GPU. Fused cells of recurrent networks: the workspace is what CUDA's kernels keep for backward, the
gates' activations (LSTM, ``4 * hidden`` columns) or what the gradient needs (GRU, ``5 * hidden``).
"""

from __future__ import annotations

from typing import Any

import torch

from . import known_values, op_call
from .faults import MixedDevicesError
from .operators import Handler, handlers, make
from .tensor import place

_aten = torch.ops.aten
_ROWS, _COLUMNS, _LANES = 8, 16, 32
_MIDDLE = 8  # numbers are 0 to 15


def _histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count integers too; the CPU counts only floating-point numbers."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
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
        result = make(func, args, kwargs)
        if not args[0].is_contiguous():
            result.gpu.charge(args[0].nbytes)
        return result
    plain, gpu = op_call.unwrap(func, args, kwargs)
    backing = plain.args[0]
    if backing.is_cuda or backing.is_meta:
        return place(func(backing, dim, True), gpu)
    return place(func(backing.float(), dim, False), gpu)


def softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient in the dtype of the softmax's input, as on CUDA."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    grad, output, dim, input_dtype = plain.args
    if grad.is_cuda or grad.is_meta or grad.dtype == input_dtype:
        return op_call.wrap_results(op_call.execute(func, plain, gpu), gpu)
    return place(func(grad, output, dim, grad.dtype).to(input_dtype), gpu)


def _pack_int4(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out a weight [rows, columns / 2] of two numbers in a byte."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    numbers, tiles = plain.args
    if numbers.is_cuda:
        return place(func(numbers, tiles), gpu)
    rows, columns = numbers.shape[0], 2 * numbers.shape[1]
    shape = (rows // _ROWS, columns // (_COLUMNS * tiles), _LANES, tiles // 2)
    if gpu.meta:
        return place(torch.empty(shape, dtype=torch.int32, device="meta"), gpu)
    return place(numbers.clone().view(torch.int32).reshape(shape), gpu)


def _multiply_int4(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply activations [tokens, columns] with a packed weight."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    left, packed, group, scale_and_zero = plain.args
    if packed.is_cuda:
        return place(func(left, packed, group, scale_and_zero), gpu)
    if gpu.meta:
        # PyTorch's own rule for the shape takes no plain meta tensors.
        shape = (left.shape[0], _ROWS * packed.shape[0])
        return place(torch.empty(shape, dtype=left.dtype, device="meta"), gpu)
    weight = _unpack_int4(packed, group, scale_and_zero)
    return place(left @ weight.to(left.dtype).t(), gpu)


def _unpack_int4(packed: torch.Tensor, group: int, scale_and_zero: torch.Tensor) -> torch.Tensor:
    """The weight [rows, columns] in floating point; scale_and_zero [columns / group, rows, 2]."""
    rows = _ROWS * packed.shape[0]
    pairs = packed.reshape(rows, -1).view(torch.uint8)
    numbers = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).reshape(rows, -1, group)
    scale, zero = (part.t().unsqueeze(-1) for part in scale_and_zero.float().unbind(-1))
    return ((numbers.float() - _MIDDLE) * scale + zero).reshape(rows, -1)


def _lstm(
    inputs: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    gates = _summed(inputs, hidden, *biases)
    enter, keep, new, leave = gates.chunk(4, 1)
    enter, keep, new, leave = enter.sigmoid(), keep.sigmoid(), new.tanh(), leave.sigmoid()
    next_cell = keep * cell + enter * new
    return leave * next_cell.tanh(), next_cell, torch.cat([enter, keep, new, leave], 1)


def _lstm_backward(
    hidden_grad: torch.Tensor | None,
    cell_grad: torch.Tensor | None,
    cell: torch.Tensor,
    next_cell: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    enter, keep, new, leave = workspace.chunk(4, 1)
    squashed = next_cell.tanh()
    total = torch.zeros_like(next_cell) if cell_grad is None else cell_grad
    leave_grad = torch.zeros_like(leave)
    if hidden_grad is not None:
        total = total + hidden_grad * leave * (1 - squashed * squashed)
        leave_grad = hidden_grad * squashed * leave * (1 - leave)
    gates_grad = torch.cat(
        [
            total * new * enter * (1 - enter),
            total * cell * keep * (1 - keep),
            total * enter * (1 - new * new),
            leave_grad,
        ],
        1,
    )
    return gates_grad, total * keep, gates_grad.sum(0) if has_bias else None


def _gru(
    inputs: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    input_bias, hidden_bias = biases if biases else (None, None)
    from_input = inputs if input_bias is None else inputs + input_bias
    from_hidden = hidden if hidden_bias is None else hidden + hidden_bias
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    reset = (input_reset + hidden_reset).sigmoid()
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    workspace = torch.cat([reset, update, new, state, hidden_new], 1)
    return new + update * (state - new), workspace


def _gru_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    reset, update, new, state, hidden_new = workspace.chunk(5, 1)
    update_grad = grad * (state - new) * update * (1 - update)
    new_grad = grad * (1 - update) * (1 - new * new)
    reset_grad = new_grad * hidden_new * reset * (1 - reset)
    input_grad = torch.cat([reset_grad, update_grad, new_grad], 1)
    hidden_grad = torch.cat([reset_grad, update_grad, new_grad * reset], 1)
    biases = (input_grad.sum(0), hidden_grad.sum(0)) if has_bias else (None, None)
    return input_grad, hidden_grad, grad * update, *biases


def _summed(*terms: torch.Tensor | None) -> torch.Tensor:
    total = terms[0]
    assert total is not None
    for term in terms[1:]:
        total = total if term is None else total + term
    return total


def _computing(compute: Any) -> Handler:
    """Make the handler that computes on backing tensors, or leaves it to a real GPU's kernel."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain, gpu = op_call.unwrap(func, args, kwargs)
        if gpu.data_device.type == "cuda":
            return op_call.wrap_results(func(*plain.args), gpu)
        operands = plain.args
        if known_values.count(operands, {})[1]:
            operands = [known_values.without_values(value) for value in operands]
        results = compute(*operands)
        return tuple(None if result is None else place(result, gpu) for result in results)

    return handle


def _pack_sequence(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack sequences; how many go on at each step stays on the CPU, as with CUDA."""
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
    handlers[_aten._thnn_fused_lstm_cell.default] = _computing(_lstm)
    handlers[_aten._thnn_fused_lstm_cell_backward_impl.default] = _computing(_lstm_backward)
    handlers[_aten._thnn_fused_gru_cell.default] = _computing(_gru)
    handlers[_aten._thnn_fused_gru_cell_backward.default] = _computing(_gru_backward)
    handlers[_aten._pack_padded_sequence.default] = _pack_sequence
