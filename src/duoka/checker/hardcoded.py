"""Hard-coded CUDA devices in model code, and the `torch.cuda` that model code sees.

Model code calls `torch.cuda.is_available()` to select a device. On a machine without a GPU it must
take the same branch as with GPUs, so it gets the answers of the virtual GPUs. Libraries call the
same functions to select kernels, and get the real answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from duoka.base.model_code import is_installed
from duoka.virtual import active_world, is_virtual, virtual_device
from duoka.virtual import device_type as virtual_type

from .mixed_call import Args, Kwargs

_TO = torch.Tensor.to
_CUDA = torch.Tensor.cuda
# Functions of `torch.cuda` that virtual GPUs answer: about all GPUs, and about one GPU.
_OF_ALL = ("empty_cache", "is_bf16_supported")
_OF_ONE = (
    "get_device_capability", "get_device_name", "max_memory_allocated", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    "synchronize",
)  # fmt: skip

# One object for each device, to tell a tensor's device from a device that the code names. For a
# tensor on vgpu:1 model code always gets the same object torch.device("cuda", 1). When passed to
# `y.to(...)`, that object is recognized by identity, and is not hard-coded. An equal device that
# the code creates is another object.
_seen: dict[int, torch.device] = {}


def device_position(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int | str | None:
    """Return the position or keyword of the CUDA device in a call; None if there is none."""
    if func is _CUDA:
        return 1 if len(args) > 1 else "device"
    if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
        return "device"
    if func is _TO:
        return 1 if len(args) > 1 and _is_cuda(args[1]) else None
    return next((position for position, value in enumerate(args) if _is_device(value)), None)


def on_virtual_gpu(
    func: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    position: int | str,
    current: CurrentDevice,
) -> tuple[Any, Callable[..., Any], Args, Kwargs]:
    """Return the named device, and the call with the virtual GPU of that index.

    A bare "cuda" is the current GPU: the first one unless the code sets another.
    """
    device = kwargs.get("device") if isinstance(position, str) else args[position]
    virtual_gpu = _virtual(device, current)
    if func is _CUDA:
        options = {name: value for name, value in kwargs.items() if name != "device"}
        return device, _TO, (args[0], virtual_gpu), options
    if isinstance(position, str):
        return device, func, args, {**kwargs, position: virtual_gpu}
    return device, func, (*args[:position], virtual_gpu, *args[position + 1 :]), kwargs


def _is_device(value: Any) -> bool:
    """Return True for a torch.device of CUDA."""
    return type(value) is torch.device and value.type == "cuda"


def _is_cuda(value: Any) -> bool:
    """Return True for any form of a CUDA device: text, index or torch.device."""
    if type(value) is str:
        return value.startswith("cuda")
    if type(value) is int:
        return True
    return _is_device(value)


def _virtual(device: Any, current: CurrentDevice) -> torch.device:
    """Return the virtual GPU of a CUDA device; raise if there is no such GPU, as CUDA does."""
    index = current.number(device)
    active_world().gpu(index)  # raises for an invalid index
    return virtual_device(index)


def present_as_cuda(device: torch.device) -> torch.device:
    """Return a virtual GPU in the form that model code sees; other devices unchanged."""
    if not is_virtual(device):
        return device
    return _seen.setdefault(device.index, torch.device("cuda", device.index))


def is_asked_device(device: object) -> bool:
    """Return True if a device is an object of `present_as_cuda`: code asked a tensor for it."""
    return any(device is virtual for virtual in _seen.values())


class CurrentDevice:
    """The current CUDA device: the first one unless the code sets another."""

    def __init__(self) -> None:
        self.index = 0
        self.is_set = False

    def number(self, device: Any = None) -> int:
        """Return the index of a device in any form that CUDA's functions accept."""
        if device is not None and not isinstance(device, int):
            device = torch.device(device).index
        return self.index if device is None else device

    def set(self, device: Any) -> None:
        """Set the current device."""
        self.index, self.is_set = _virtual(device, self).index, True

    @contextmanager
    def scope(self, device: Any) -> Iterator[None]:
        """Set the current device inside the scope."""
        previous = self.index, self.is_set
        self.set(device)
        try:
            yield
        finally:
            self.index, self.is_set = previous


@contextmanager
def virtual_cuda(num_gpus: int) -> Iterator[CurrentDevice]:
    """Make `torch.cuda` report `num_gpus` GPUs to model code inside the scope."""
    current = CurrentDevice()
    vgpu = torch.get_device_module(virtual_type())
    answers: dict[str, Callable[..., Any]] = {name: getattr(vgpu, name) for name in _OF_ALL}
    for name in _OF_ONE:
        answers[name] = partial(_of_one, getattr(vgpu, name), current)
    answers["device_count"] = lambda: num_gpus
    answers["is_available"] = lambda: True
    answers["current_device"] = lambda: current.index
    answers["set_device"] = current.set
    answers["device"] = current.scope
    with ExitStack() as stack:
        for name, answer in answers.items():
            function = _for_model_code(answer, getattr(torch.cuda, name))
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", _autocast))
        yield current


_start_autocast = torch.autocast.__init__


def _autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Initialize autocast; for CUDA with the device type of virtual GPUs."""
    kind = virtual_type() if device_type == "cuda" else device_type
    _start_autocast(self, kind, *args, **kwargs)


def _of_one(answer: Callable[..., Any], current: CurrentDevice, device: Any = None) -> Any:
    """Call `answer` with the index of a device, by default the current one."""
    return answer(current.number(device))


def _for_model_code(answer: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `answer` from model code and `real` from installed code."""

    def function(*args: Any, **kwargs: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        return (real if is_installed(file) or file.startswith("<") else answer)(*args, **kwargs)

    return function
