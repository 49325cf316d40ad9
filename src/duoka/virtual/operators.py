"""How each ATen operator runs on virtual tensors.

An operator's handler is chosen once, from its schema: composite operators are decomposed (as on
CUDA), views share the storage block of their input, writes return the written argument, and all
others make new tensors. Other modules register handlers of their own (`transfers`, `attention`,
`cuda_only`, `temporaries`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from duoka.errors import VirtualDeviceError

from . import known_values, op_call
from .device_module import can_do_backward, give_name
from .faults import MixedDevicesError
from .tensor import VirtualTensor, place, resync, wrap
from .world import VirtualGpu, arm, thread

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

handlers: dict[Any, Handler] = {}
"""The handler of every operator seen so far, and of those that have their own."""

_ATEN = torch.ops.aten
# Matrix products of cuBLAS, the first of which allocates a workspace. Not among them are `_int_mm`,
# which gets no workspace, and products with packed weights, which are PyTorch's own kernels.
_PRODUCTS = frozenset(
    {
        _ATEN.mm, _ATEN.bmm, _ATEN.mv, _ATEN.dot, _ATEN.vdot,
        _ATEN.addmm, _ATEN.addmm_, _ATEN._addmm_activation,
        _ATEN.baddbmm, _ATEN.baddbmm_, _ATEN.addmv, _ATEN.addmv_,
        _ATEN._scaled_mm, _ATEN._grouped_mm,
    }
)  # fmt: skip
# From torch 2.13 on Triton computes batched outer products, as in rotary embeddings.
_OUTER_IS_TRITONS = "torch._native.ops.bmm_outer_product" in sys.modules
_NO_BACKWARD = -1
_NO_RESULT = object()  # returned after an error in backward, see `run`


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operator on virtual tensors, and report it to this thread's listener."""
    handler = handlers.get(func)
    if handler is None:
        handler = handlers[func] = _choose_handler(func)
    state = thread
    if not state.armed:
        arm()
    try:
        result = handler(func, args, kwargs)
        if is_product(func, args):
            is_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
            result.block.gpu.multiply(in_backward=is_backward)
        listener = state.listener
        if listener is not None and handler is not _decompose:
            listener.operation(func, args, kwargs, result)
    except Exception as error:
        is_awaited = state.arbiter is not None and isinstance(error, MixedDevicesError)
        if is_awaited or torch._C._current_graph_task_id() == _NO_BACKWARD:
            raise
        # In backward a Python error that leaves one of PyTorch's own autograd nodes would end the
        # process: it passes the guard of the node's stream, which is in Python. So the error is
        # kept, and an object returned that can't be a result: PyTorch raises an error of its own
        # for the object, in whose place `run_backward` raises the kept one.
        state.failure = state.failure or error
        return _NO_RESULT
    return result


def run_whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with its arguments unpacked, as `torch.library` passes them."""
    return run(func, args, kwargs)


@cache
def _is_of_cublas(func: Any) -> bool:
    return func.overloadpacket in _PRODUCTS


def is_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if a call is a matrix product of cuBLAS, without empty operands."""
    if not _is_of_cublas(func):
        return False
    if func.overloadpacket is _ATEN.bmm and _OUTER_IS_TRITONS and args[0].shape[2] == 1:
        return False
    return all(arg.numel() for arg in args if isinstance(arg, torch.Tensor))


def is_view(func: Any) -> bool:
    """Return True if an operator that has run returns views alone."""
    return handlers.get(func) is _view


def with_failures(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap autograd's engine: raise the error that `run` kept for an operation inside."""

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if thread.armed:
            # Scopes of inference mode turn multithreading on again (see `world.arm`).
            torch._C._set_multithreading_enabled(False)
            if can_do_backward():
                give_name()
        thread.failure = None  # left by an earlier run, whose code caught the error
        try:
            return engine(*args, **kwargs)
        except RuntimeError as error:
            failure = thread.failure
            if failure is not None:
                raise failure from None
            if "fork-based" not in str(error):  # see `apart`
                raise
            raise VirtualDeviceError(
                "backward on virtual GPUs runs in a fork of this process, which is impossible "
                "after a backward on CUDA in this process",
                hint="plan and check before training, or in another process: duoka plan, duoka "
                "check",
            ) from error
        finally:
            thread.failure = None

    return run_backward


def make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make new tensors: the handler of operators that neither view nor write."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    return op_call.wrap_results(op_call.execute(func, plain, gpu), gpu)


def add_operator(func: Any, buffers: Callable[..., Iterable[Sequence[int]]]) -> None:
    """Let an operator from outside PyTorch run on virtual tensors, by its kernels elsewhere.

    `buffers` returns from the arguments the bytes of the buffers that exist together on a GPU,
    one group after another; each is charged and freed.
    """

    def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = make(func, args, kwargs)
        for sizes in buffers(*args):
            args[0].gpu.charge(*sizes)
        return result

    handlers[func] = run_operator


def below(whole: Callable[..., Any]) -> Handler:
    """Return a handler that calls `whole`, an operator's implementation for autograd.

    Inference mode skips autograd, and so comes to the handler.
    """
    return lambda func, args, kwargs: whole(*args, **kwargs)


# operator               handler         condition
# matmul, linear         _decompose      CompositeImplicitAutograd: made of other operators
# add_, addmm_           _WriteHandler   an argument with "!" in the schema, which is written
# view, transpose        _view           every result aliases an argument
# mm, add, exp           make            none of these: the results are new tensors
def _choose_handler(func: Any) -> Handler:
    """Choose the handler of an operator by its kernels and its schema."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _decompose
    schema = func._schema
    if any(_writes(argument) for argument in schema.arguments):
        return _WriteHandler(func)
    aliases = [value.alias_info is not None for value in schema.returns]
    return _view if aliases and all(aliases) else make


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator as its parts, in inference mode."""
    return func.decompose(*args, **kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose results are views: they share their input's block."""
    if torch.is_inference_mode_enabled() and not args[0].is_inference():
        # A view of a normal tensor is a normal tensor, also in inference mode.
        with torch.inference_mode(False):
            return _view(func, args, kwargs)
    plain, _ = op_call.unwrap(func, args, kwargs)
    block = args[0].block
    out = func(*plain.args, **plain.kwargs)
    if isinstance(out, torch.Tensor):
        # A kernel may return the argument itself; detached, the result has its own geometry.
        return wrap(out.detach() if out is plain.args[0] else out, block)
    return type(out)([wrap(item, block) for item in out])


# The schema of an operator states its writes, for example
#
#   addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2) -> Tensor(a!)      writes and returns self
#   topk.values(…, *, Tensor(a!) values, Tensor(b!) indices) -> (Tensor(a!), Tensor(b!))
#
# Arguments with "!" are written; a result with the same letter is that argument itself, not a new
# tensor. On a GPU without data a write of unknown values makes the written storage unknown, and the
# arguments are unwrapped again, since their backing tensors have changed.
class _WriteHandler:
    """The handler of an operator that writes to arguments, and may return them."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self._names = [argument.name for argument in schema.arguments]
        written = [argument for argument in schema.arguments if _writes(argument)]
        self._written = [argument.name for argument in written]
        self._reshapes = torch.Tag.inplace_view in func.tags or any(
            argument.is_out for argument in schema.arguments
        )
        # For each result the argument that it is, by the schema's alias sets; None for a new one.
        self._returned = [
            next((argument.name for argument in written if _is_alias(value, argument)), None)
            for value in schema.returns
        ]

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_name = dict(zip(self._names, args, strict=False)) | kwargs
        written = list(_virtual_tensors(by_name.get(name) for name in self._written))
        plain, gpu = op_call.unwrap(func, args, kwargs)
        if gpu.meta:
            _, num_unknown = known_values.count(plain.args, plain.kwargs)
            if num_unknown:  # the written tensors become unknown
                for tensor in written:
                    known_values.forget(tensor)
                plain, gpu = op_call.unwrap(func, args, kwargs)
            out = known_values.execute(func, plain.args, plain.kwargs, writes=True)
        else:
            out = func(*plain.args, **plain.kwargs)
        if self._reshapes:
            for tensor in written:
                _follow_reshape(tensor, gpu)
        outs = (out,) if len(self._returned) == 1 else out or ()
        results = tuple(
            op_call.wrap_results(item, gpu) if name is None else by_name.get(name)
            for name, item in zip(self._returned, outs, strict=True)
        )
        return results if len(results) > 1 else next(iter(results), None)


def _is_alias(value: Any, argument: Any) -> bool:
    if value.alias_info is None:
        return False
    return bool(argument.alias_info.before_set & value.alias_info.before_set)


def _virtual_tensors(values: Iterable[Any]) -> Iterator[VirtualTensor]:
    """Yield the virtual tensors among arguments, and in lists and tuples among them."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, VirtualTensor):
                yield item


def _follow_reshape(tensor: VirtualTensor, gpu: VirtualGpu) -> None:
    """Update a written tensor whose backing was reshaped; values too large are forgotten."""
    backing = tensor.backing
    if tensor.shape != backing.shape or tensor.stride() != backing.stride():
        resync(tensor)
        if gpu.meta and tensor.storage_bytes > known_values.KNOWN_LIMIT_BYTES:
            known_values.forget(tensor)


__all__ = ["handlers", "make", "place", "run"]
