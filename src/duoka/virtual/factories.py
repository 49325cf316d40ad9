"""New tensors on a virtual GPU: what torch asks of a backend that holds memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import known_values
from .operators import run
from .tensor import VirtualTensor, place
from .threads import arm
from .transfers import gpu_of
from .world import Gpu, thread

_libraries: list[torch.library.Library] = []


def _data_device(
    gpu: Gpu, dtype: torch.dtype, size: Sequence[int], keeps: Any = known_values.keeps_values
) -> torch.device:
    if not gpu.meta:
        return gpu.data_device
    num_elements = 1
    for length in size:
        num_elements *= length
    return torch.device("cpu" if keeps(dtype, num_elements) else "meta")


def empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> VirtualTensor:
    """Implement ``aten::empty.memory_format``."""
    gpu = _ready(device)
    dtype = dtype or torch.get_default_dtype()
    data = torch.empty(
        size,
        dtype=dtype,
        layout=layout or torch.strided,
        device=_data_device(gpu, dtype, size),
        memory_format=memory_format or torch.contiguous_format,
    )
    return place(data, gpu)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> VirtualTensor:
    """Implement ``aten::empty_strided``."""
    gpu = _ready(device)
    dtype = dtype or torch.get_default_dtype()
    data = torch.empty_strided(size, stride, dtype=dtype, device=_data_device(gpu, dtype, size))
    return place(data, gpu)


def _filled(name: str) -> Any:
    """Implement ``aten::zeros`` or ``aten::ones``."""
    make = getattr(torch, name)

    def filled(
        size: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> VirtualTensor:
        gpu = _ready(device)
        dtype = dtype or torch.get_default_dtype()
        where = _data_device(gpu, dtype, size, known_values.keeps_constant)
        return place(make(size, dtype=dtype, layout=layout or torch.strided, device=where), gpu)

    return filled


def _full(
    size: Sequence[int],
    fill_value: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> VirtualTensor:
    """Implement ``aten::full``; without a dtype it is that of the number."""
    gpu = _ready(device)
    dtype = dtype or torch.full((), fill_value).dtype
    where = _data_device(gpu, dtype, size, known_values.keeps_constant)
    return place(torch.full(size, fill_value, dtype=dtype, device=where), gpu)


def _ready(device: torch.device | None) -> Gpu:
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
    """Run what reaches the backend without passing the tensor class.

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
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("empty_strided", empty_strided, "PrivateUse1")
    aten.impl("zeros", _filled("zeros"), "PrivateUse1")
    aten.impl("ones", _filled("ones"), "PrivateUse1")
    aten.impl("full", _full, "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    aten.impl("_local_scalar_dense", _read, "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    _libraries.extend((aten, everything))
