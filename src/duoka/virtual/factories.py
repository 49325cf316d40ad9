"""Factories: how torch's `empty`, `zeros`, `full` and others make tensors on a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from . import known_values
from .operators import run, run_whole
from .tensor import VirtualTensor, place
from .transfers import gpu_of
from .world import VirtualGpu, arm, thread

_libraries: list[torch.library.Library] = []


def _factory(
    name: str, keeps: Callable[[torch.dtype, int], bool] = known_values.keeps_values
) -> Any:
    """Implement torch's factory `name` for virtual GPUs.

    `keeps` decides, from dtype and number of elements, if values are kept on a GPU without data.
    """
    make = getattr(torch, name)

    # `rest` is the fill value of `full`, or the strides of `empty_strided`.
    def factory(size: Sequence[int], *rest: Any, **options: Any) -> VirtualTensor:
        gpu = _gpu_of_factory(options.pop("device", None))
        options.pop("pin_memory", None)
        if options.get("dtype") is None:  # by default `full` has its value's dtype
            is_full = name == "full"
            options["dtype"] = torch.full((), *rest).dtype if is_full else torch.get_default_dtype()
        where = gpu.data_device
        if gpu.meta and keeps(options["dtype"], prod(size)):
            where = torch.device("cpu")
        options = {option: value for option, value in options.items() if value is not None}
        return place(make(size, *rest, device=where, **options), gpu)

    return factory


def _gpu_of_factory(device: torch.device | None) -> VirtualGpu:
    """Return the GPU for a new tensor, and arm this thread (`world.arm`)."""
    if not thread.armed:
        arm()
    return gpu_of(device)


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that torch doesn't dispatch to `VirtualTensor`.

    That happens for factories, which have no tensor among their arguments, and while torch builds a
    tensor from Python data, with Python dispatch turned off.
    """
    if _has_virtual_tensor(args) or _has_virtual_tensor(tuple(kwargs.values())):
        return run(func, args, kwargs)
    gpu = _gpu_of_factory(kwargs.pop("device", None))
    kwargs.pop("pin_memory", None)
    return place(func(*args, device=gpu.data_device, **kwargs), gpu)


def _has_virtual_tensor(values: tuple[Any, ...]) -> bool:
    """Return True for a virtual tensor among the values, at any depth of lists and tuples."""
    return any(
        isinstance(value, VirtualTensor)
        or (isinstance(value, (list, tuple)) and _has_virtual_tensor(tuple(value)))
        for value in values
    )


def install() -> None:
    """Register the factories for the backend's dispatch key, for the life of the process."""
    # A call with a virtual tensor among its arguments goes to `__torch_dispatch__`, whose dispatch
    # key (Python) comes before those of backends. A factory has only a device, so torch looks for
    # a kernel of that backend, PrivateUse1: those below, or the fallback for all other operators.
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _factory("empty"), "PrivateUse1")
    aten.impl("empty_strided", _factory("empty_strided"), "PrivateUse1")
    for name in ("zeros", "ones", "full"):
        aten.impl(name, _factory(name, known_values.keeps_constant), "PrivateUse1")
    # `torch.tensor` turns Python dispatch off while it builds a tensor: in a thread not armed yet
    # its copy to the device comes here, and so does each read of a tensor in a list of numbers.
    for name in ("copy_", "_local_scalar_dense"):
        aten.impl(name, partial(run_whole, getattr(torch.ops.aten, name).default), "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    _libraries.extend((aten, everything))
