"""A call in which tensors of several devices meet: what it was, and what it writes."""

from __future__ import annotations

import inspect
import re
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

from duoka.virtual import MixedDevicesError, VirtualTensor

from .findings import tensors_of
from .source_map import is_model_code

_METHOD = "torch.Tensor."
_SAME_DEVICE = "same device"
_DEVICE = re.compile(r"\bvgpu:\d+\b|\bcpu\b")


class Met:
    """A call that mixes devices."""

    def __init__(
        self,
        error: Exception,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> None:
        # Its frames hold this, which holds it: nothing would let go of the tensors.
        self.error = error.with_traceback(None)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.frame = frame
        # What PyTorch itself refuses before it comes to an ATen operation has only a text.
        self.is_mix = _SAME_DEVICE in str(error) or len(set(_DEVICE.findall(str(error)))) > 1
        self.kernel = ""
        self.written: torch.Tensor | None = None
        self.for_cpu: torch.Tensor | None = None
        if isinstance(error, MixedDevicesError):
            self.is_mix = True
            self.for_cpu = error.for_cpu
            self.written = _visible(error.written, args, kwargs)
            self.kernel = error.func._schema.name.removeprefix("aten::")
        full = op_name(func)
        self.is_method = full.startswith(_METHOD)
        self.op = full.removeprefix("torch.") if self.is_method else full


def _visible(
    written: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What an operation writes into, if the caller can see that."""
    if isinstance(written, VirtualTensor):
        for _, tensor in tensors_of(args, kwargs):
            if isinstance(tensor, VirtualTensor) and tensor.storage_id == written.storage_id:
                return tensor
        return None
    return written


def positions_of(func: Any) -> dict[str, int]:
    """The parameters of an operation in their order, where Python knows them."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: at for at, name in enumerate(names)}


def op_name(func: Any) -> str:
    """The name by which code calls an operation."""
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)


def is_direct(frame: FrameType) -> bool:
    """Whether model code calls the function itself, not by way of a module of PyTorch's."""
    # Functions in Python pass their arguments on as they are to whoever overrides them.
    inner: FrameType | None = frame
    if inner is not None and inner.f_code.co_name == "handle_torch_function":
        inner = inner.f_back and inner.f_back.f_back
    return inner is not None and is_model_code(inner.f_code)
