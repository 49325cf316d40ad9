"""Devices that model code names itself: `.cuda()`, `device="cuda:0"`, `device=0`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duoka.virtual import active_world

from .cuda import CurrentDevice

_TO = torch.Tensor.to
_CUDA = torch.Tensor.cuda


def is_hard_coded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call names a CUDA device."""
    if func is _CUDA:
        return True
    device = kwargs.get("device") if kwargs else None
    if device is not None and _is_cuda(device):
        return True
    if func is _TO:
        return len(args) > 1 and _is_cuda(args[1])
    return any(type(each) is torch.device and each.type == "cuda" for each in args)


def softened(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], current: CurrentDevice
) -> tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The device that a call names, and the call with the virtual GPU of that number.

    A bare "cuda" is the current GPU: the first, unless the code sets another. Nobody but duoka
    sets it to a layer's.
    """
    if func is _CUDA:
        device = args[1] if len(args) > 1 else kwargs.pop("device", None)
        return device, _TO, (args[0], _virtual(device, current)), kwargs
    device = kwargs.get("device")
    if device is not None and _is_cuda(device):
        return device, func, args, {**kwargs, "device": _virtual(device, current)}
    at = 1 if func is _TO else next(i for i, each in enumerate(args) if _is_device(each))
    moved = (*args[:at], _virtual(args[at], current), *args[at + 1 :])
    return args[at], func, moved, kwargs


def _is_device(value: Any) -> bool:
    return type(value) is torch.device and value.type == "cuda"


def _is_cuda(value: Any) -> bool:
    if type(value) is str:
        return value.startswith("cuda")
    if type(value) is int:
        return True
    return _is_device(value)


def _virtual(device: Any, current: CurrentDevice) -> torch.device:
    index = current.number(device)
    active_world().gpu(index)  # fails as CUDA does if there is no such GPU
    return torch.device("vgpu", index)
