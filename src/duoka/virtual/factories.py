"""New tensors on a virtual GPU: torch's factories for a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from . import known_values
from .operators import run
from .tensor import VirtualTensor, place
from .transfers import gpu_of
from .world import VirtualGpu, arm, thread

_libraries: list[torch.library.Library] = []


def _factory(
    name: str, keeps: Callable[[torch.dtype, int], bool] = known_values.keeps_values
) -> Any:
    """Return a factory of torch's for virtual GPUs; `keeps` decides on known values."""
    make = getattr(torch, name)

    def factory(size: Sequence[int], *rest: Any, **options: Any) -> VirtualTensor:
        gpu = _ready(options.pop("device", None))
        options.pop("pin_memory", None)
        if options.get("dtype") is None:  # without one `full` takes that of its number
            is_full = name == "full"
            options["dtype"] = torch.full((), *rest).dtype if is_full else torch.get_default_dtype()
        where = gpu.data_device
        if gpu.meta and keeps(options["dtype"], prod(size)):
            where = torch.device("cpu")
        options = {option: value for option, value in options.items() if value is not None}
        return place(make(size, *rest, device=where, **options), gpu)

    return factory


def _ready(device: torch.device | None) -> VirtualGpu:
    if not thread.armed:
        arm()
    return gpu_of(device)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """Implement ``aten::copy_`` for tensors under construction.

    In a thread that isn't armed yet, `torch.tensor` turns Python dispatch off, so that the copy to
    the device comes here.
    """
    return run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


def _read(tensor: torch.Tensor) -> Any:
    """Implement ``aten::_local_scalar_dense`` for numbers that become part of a new tensor.

    `torch.tensor` of a list with tensors in it reads each of them, with Python dispatch off.
    """
    return run(torch.ops.aten._local_scalar_dense.default, (tensor,), {})


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run operators called without dispatch to the tensor class.

    Torch turns Python dispatch off while it builds a tensor from Python data; and a factory has no
    tensor to look at.
    """
    if _has_virtual(args) or _has_virtual(tuple(kwargs.values())):
        return run(func, args, kwargs)
    gpu = _ready(kwargs.pop("device", None))
    kwargs.pop("pin_memory", None)
    return place(func(*args, device=gpu.data_device, **kwargs), gpu)


def _has_virtual(values_: tuple[Any, ...]) -> bool:
    return any(
        isinstance(value, VirtualTensor)
        or (isinstance(value, (list, tuple)) and _has_virtual(tuple(value)))
        for value in values_
    )


def install() -> None:
    """Register the factories for the backend's dispatch key, for the life of the process."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _factory("empty"), "PrivateUse1")
    aten.impl("empty_strided", _factory("empty_strided"), "PrivateUse1")
    for name in ("zeros", "ones", "full"):
        aten.impl(name, _factory(name, known_values.keeps_constant), "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    aten.impl("_local_scalar_dense", _read, "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    _libraries.extend((aten, everything))
