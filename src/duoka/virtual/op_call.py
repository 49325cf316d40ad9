"""An ATen call on virtual tensors: unwrap arguments, check devices, wrap results.

Every operator's handler goes through here. On a GPU with meta data, `known_values` decides
what is computed and what is only shaped.
"""

from __future__ import annotations

from typing import Any

import torch

from . import faults, known_values
from .tensor import VirtualTensor, place
from .world import VirtualGpu, thread


class Plain:
    """The arguments of a call with backing tensors in place of virtual ones."""

    __slots__ = ("args", "gpu", "kwargs", "mixed")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gpu: VirtualGpu | None = None
        self.mixed = False
        self.args = [self._plain(value) for value in args]
        self.kwargs = {name: self._plain(value) for name, value in kwargs.items()}

    def _plain(self, value: Any) -> Any:
        # Every argument of every operator comes here, so the cheapest test comes first. Parameters
        # pass it too: `torch.nn.Parameter` keeps the class of a tensor subclass, with a mark.
        kind = type(value)
        if kind is VirtualTensor:
            gpu = value.block.gpu
            if self.gpu is not gpu:
                if self.gpu is None:
                    self.gpu = gpu
                else:
                    self.mixed = True
            return value.backing if value.block.unknown is None else known_values.current(value)
        if kind is list or kind is tuple:
            # Sizes, dimensions and strides are by far the most frequent lists.
            if value and type(value[0]) is not int:
                return [self._plain(item) for item in value]
            return value
        if isinstance(value, torch.Tensor):
            self.mixed = True
        return value


def unwrap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plain, VirtualGpu]:
    """Unwrap a call's arguments and check their devices."""
    plain = Plain(args, kwargs)
    gpu = plain.gpu
    assert gpu is not None, f"{func} was called without a virtual tensor"
    if plain.mixed:
        try:
            faults.check_devices(func, args, kwargs)
        except faults.MixedDevicesError as error:
            if thread.arbiter is None:
                raise
            args, kwargs = thread.arbiter.settle(error, args, kwargs)
            plain = Plain(args, kwargs)
            gpu = plain.gpu
            assert gpu is not None, "an arbiter settles on a virtual GPU"
    return plain, gpu


def execute(func: Any, plain: Plain, gpu: VirtualGpu) -> Any:
    """Compute on the backing tensors."""
    if gpu.meta:
        even = known_values.even_choice if gpu.data == "even" else known_values.execute
        return even(func, plain.args, plain.kwargs)
    return func(*plain.args, **plain.kwargs)


def wrap_results(out: Any, gpu: VirtualGpu) -> Any:
    """Wrap the results of a call; results on existing storages aren't charged."""
    if isinstance(out, torch.Tensor):
        return place(out, gpu)
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_results(item, gpu) for item in out])
    return out
