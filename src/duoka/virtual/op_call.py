"""An ATen call on virtual tensors: unwrap arguments, check devices, wrap results.

Every operator's handler goes through here. If the virtual GPU's tensors are on the meta device,
`known_values` decides which results are computed and which are only shape-inferred.
"""

from __future__ import annotations

from typing import Any

import torch

from . import faults, known_values
from .tensor import VirtualTensor, place
from .world import VirtualGpu, thread


class Plain:
    """The arguments of a call, with every virtual tensor replaced by its backing tensor.

    `gpu` is the GPU of the first virtual tensor, None if there is no virtual tensor; `mixed` is
    True if the call has a tensor on any other device as well.
    """

    __slots__ = ("args", "gpu", "kwargs", "mixed")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gpu: VirtualGpu | None = None
        self.mixed = False
        self.args = [self._unwrap(value) for value in args]
        self.kwargs = {name: self._unwrap(value) for name, value in kwargs.items()}

    def _unwrap(self, value: Any) -> Any:
        """Replace a virtual tensor, also in lists, and note its GPU."""
        # Every argument of every operator comes here, so the cheapest test comes first. Parameters
        # pass this test too: `torch.nn.Parameter` keeps the class of a tensor subclass.
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
                return [self._unwrap(item) for item in value]
            return value
        if isinstance(value, torch.Tensor):
            self.mixed = True
        return value


def unwrap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plain, VirtualGpu]:
    """Replace the virtual tensors of a call by their backing tensors, and check all devices.

    Return the unwrapped arguments and the virtual GPU on which the call runs. If CUDA would refuse
    the mix of devices, MixedDevicesError is raised; or, in a scope of `settled_by` (duoka check),
    `thread.arbiter.settle` records the fault and returns the arguments moved to one virtual GPU,
    with which the call goes on.
    """
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
    """Run an operator on backing tensors; on meta, `known_values` may only infer shapes."""
    if gpu.meta:
        run = known_values.even_choice if gpu.data == "even" else known_values.execute
        return run(func, plain.args, plain.kwargs)
    return func(*plain.args, **plain.kwargs)


def wrap_results(out: Any, gpu: VirtualGpu) -> Any:
    """Wrap the tensors among a call's results; only new storages are charged to the GPU."""
    if isinstance(out, torch.Tensor):
        return place(out, gpu)
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_results(item, gpu) for item in out])
    return out
