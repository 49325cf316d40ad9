"""Names of devices, modules and tensors in a report, and the call path to a frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType

import torch
from torch import nn

from duoka.base.model_code import is_model_code
from duoka.report.check_report import CallSite, Origin, OriginKind

from .source_map import locals_of, place_of, spot_of


class ReportNames:
    """Names of devices, of modules by identity, and of tensors.

    `num_gpus` is the number of GPUs up to the last one that the placement names.
    """

    def __init__(
        self, devices: Mapping[torch.device, str], modules: Mapping[int, str], num_gpus: int
    ) -> None:
        self._devices = devices
        self.num_gpus = num_gpus
        self._modules = modules
        self._tensors: Mapping[int, tuple[OriginKind, str, torch.Tensor]] = {}

    def learn(self, tensors: Mapping[int, tuple[OriginKind, str, torch.Tensor]]) -> None:
        """Store kinds and names of tensors by identity."""
        self._tensors = tensors

    def device(self, device: torch.device) -> str:
        """Return the placement's name of a device; torch's name if it has none there."""
        return self._devices.get(device, str(device))

    def renamed(self, message: str) -> str:
        """Return an error message with the placement's names instead of virtual devices."""
        for device, name in self._devices.items():
            message = message.replace(str(device), f"\0{name}\0")
        return message.replace("\0", "").replace("wrapper_vgpu_", "wrapper_CUDA_")

    def tensor(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of a parameter, buffer or attribute of a module; None for others."""
        entry = self._tensors.get(id(tensor))
        if entry is None or entry[2] is not tensor:
            return None
        return Origin(kind=entry[0], name=entry[1])

    def module_of(self, frame: FrameType | None) -> str:
        """Return the name of the innermost running module; "" if none runs."""
        while frame is not None:
            name = self._module(frame)
            if name is not None:
                return name
            frame = frame.f_back
        return ""

    def path(self, frame: FrameType | None) -> Iterator[CallSite]:
        """Yield the calls in model code that lead from the model to a frame."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        tops = [index for index, outer in enumerate(frames) if self._module(outer) is not None]
        module = ""
        for caller in reversed(frames[: max(tops, default=0) + 1]):
            running = self._module(caller)
            module = module if running is None else running
            if is_model_code(caller.f_code) and not _passes_on(caller):
                yield CallSite(place=place_of(spot_of(caller)), module=module)

    def _module(self, frame: FrameType) -> str | None:
        """Return the module whose method a frame runs; None for other functions."""
        if not frame.f_code.co_varnames or frame.f_code.co_argcount == 0:
            return None
        owner = locals_of(frame).get(frame.f_code.co_varnames[0])
        return self._modules.get(id(owner)) if isinstance(owner, nn.Module) else None


def _passes_on(frame: FrameType) -> bool:
    """Return True if a frame is the wrapper of a decorator."""
    code = frame.f_code
    takes_all = bool(code.co_flags & CO_VARARGS and code.co_flags & CO_VARKEYWORDS)
    return takes_all and bool(code.co_freevars) and "<locals>" in code.co_qualname


def at_hand(frame: FrameType | None, device: torch.device) -> Iterator[str]:
    """Yield local names, and parameters of local modules, that hold a tensor on a device."""
    if frame is None:
        return
    names = locals_of(frame)
    for name, value in names.items():
        if isinstance(value, torch.Tensor) and value.device == device:
            yield name
    for name, value in names.items():
        if isinstance(value, nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                if inner.count(".") <= 1 and tensor.device == device:
                    yield f"{name}.{inner}"
