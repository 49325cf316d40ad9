"""Movers: bring a block's arguments to the block's device when the block is called.

A copy is remembered for one top-level call, so that a mask which forty layers read is copied once
per stage. The copy is reused only for the same tensor object at the same version, and dropped as
soon as its source dies, so that hidden states don't live longer than on a single device. Tensors
without a version (inference mode) are copied each time.

Outside a top-level call (in a checkpointed region that backward recomputes in one of autograd's
threads) arguments are moved, but no copy is remembered.

The model's own outputs are moved, too: back to the device of its inputs.

Limit: if a block writes into an argument for its caller to read, and the argument was moved, the
write goes to the block's copy, and the caller doesn't see it.
"""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import NO_TENSORS, caches_in, mapped, mapped_call, must_move, tensors_in
from .copies import carry


# A frame is pushed for each call of the model itself, and for each call of a part (its body, its
# encoder) from outside the model. Copies are kept in the innermost frame:
#
#     model(ids)            push F1
#       body(...)           F1 stays: the body is called within the model
#         block 0 … n       each mask is copied once per device, and found in F1 afterwards
#       head(...)           finds the copies of F1, too
#                           pop F1: all copies are dropped
class Frames(threading.local):
    """The top-level calls in progress, innermost last; each thread has its own.

    `caller` is the device of the inputs during `generate`, else None.
    """

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.caller: torch.device | None = None

    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the call of a part of the model: a top-level call, unless inside another one."""
        return call(*args, **kwargs) if self.stack else self.run_top(call, *args, **kwargs)

    def run_top(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a top-level call in a frame of its own; drop its copies at the end, on errors too."""
        self.stack.append(Frame())
        try:
            return call(*args, **kwargs)
        finally:
            self.stack.pop().close()

    def __reduce__(self) -> tuple[type[Frames], tuple[()]]:
        return Frames, ()


class _Copied(NamedTuple):
    """A tensor at a version, and its copy on another device."""

    source: weakref.ref[Tensor]
    version: int
    copy: Tensor

    def stands_for(self, tensor: Tensor, *, has_grad: bool) -> bool:
        """Return True if the copy may be used for a tensor, the source at the same version.

        With `has_grad` the copy must also require gradients as the tensor does.
        """
        if self.source() is not tensor or self.version != tensor._version:
            return False
        return not has_grad or self.copy.requires_grad == tensor.requires_grad


class Frame:
    """The copies of a top-level call, by device and mode, then by identity of the source.

    A copy made without recording gradients (in a checkpointed region, say) must not be used where
    gradients are recorded, so each of the two modes has its own copies.
    """

    __slots__ = ("_copies", "_current", "stage")

    def __init__(self) -> None:
        self.stage: torch.device | None = None
        self._copies: dict[tuple[str, bool], dict[int, _Copied]] = {}
        # By type of device: the index of the caller's current device, to restore.
        self._current: dict[str, int] = {}

    # An entry must never keep its source alive, nor outlive it: another tensor may get the id of a
    # freed one. So an entry has a weak reference whose callback removes the entry.
    #
    #     mask, version 0          copied to cuda:1 for the first block of the stage
    #     mask, version 0          the same copy for all further blocks
    #     mask.add_(1): version 1  copied anew; the new entry takes the place of the old one
    #     mask dies                its entry goes; a new tensor with its id finds none
    def carried(self, tensor: Tensor, device: torch.device, key: tuple[str, bool]) -> Tensor:
        """Return a copy of a tensor on a device, the same one until the tensor changes or dies."""
        copies = self._copies.setdefault(key, {})
        known = copies.get(id(tensor))
        if known is not None and known.stands_for(tensor, has_grad=key[1]):
            return known.copy
        copy = carry(tensor, device)
        # A tensor made in inference mode has no version: changes in place would go unnoticed.
        if not tensor.is_inference():
            number = id(tensor)
            source = weakref.ref(tensor, lambda _: copies.pop(number, None))
            copies[number] = _Copied(source, tensor._version, copy)
        return copy

    def enter_stage(self, device: torch.device) -> None:
        """Make the stage's device the current device of its type."""
        # PyTorch's operators set the device of their operands themselves. Triton, which launches
        # kernels on the current device, and model code that calls `torch.cuda.current_device()`
        # need the current device to be set.
        self.stage = device
        backend = _backend(device)
        if backend is not None:
            if device.type not in self._current:
                self._current[device.type] = backend.current_device()
            backend.set_device(device.index)

    def close(self) -> None:
        """Forget the copies, and restore the caller's current devices."""
        # Entries refer to the dict that holds them: without `clear` only the collector frees them.
        for copies in self._copies.values():
            copies.clear()
        for kind, index in self._current.items():
            backend = _backend(torch.device(kind, index))
            if backend is not None:
                backend.set_device(index)


def _backend(device: torch.device) -> Any:
    """Return torch's module to set the current device; None for the CPU, meta, or no index."""
    if device.index is None or device.type in ("cpu", "meta"):
        return None
    backend = torch.get_device_module(device.type)
    return backend if hasattr(backend, "set_device") else None


class Mover:
    """Brings a call's arguments to a device, except `caches`, arguments with parts per block."""

    __slots__ = ("_caches", "_device", "_frames", "_keys")

    def __init__(
        self, device: torch.device, frames: Frames, caches: frozenset[int | str] = frozenset()
    ) -> None:
        self._caches = caches
        self._device = device
        self._frames = frames
        self._keys = ((str(device), False), (str(device), True))

    def bring(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with their tensors on the device.

        Inside a top-level call the device also becomes the current one.
        """
        device = self._device
        stack = self._frames.stack
        if stack and stack[-1].stage is not device:
            stack[-1].enter_stage(device)
        if _are_on(args, device) and _are_on(kwargs.values(), device):
            return args, kwargs
        # In inference mode no copy is remembered, since it couldn't be used outside of the mode.
        frame = stack[-1] if stack and not torch.is_inference_mode_enabled() else None
        key = self._keys[torch.is_grad_enabled()]

        def move(tensor: Tensor) -> Tensor:
            if not must_move(tensor, device):
                return tensor
            if frame is None:
                return carry(tensor, device)
            return frame.carried(tensor, device, key)

        return mapped_call(args, kwargs, move, self._caches)


def _are_on(values: Any, device: torch.device) -> bool:
    """Return True if no tensor among the values, at any depth, is on another device."""
    for value in values:
        # The commonest types first: this runs for every block and token.
        if type(value) in NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif isinstance(value, (tuple, list)):
            if not _are_on(value, device):
                return False
        elif isinstance(value, (dict, UserDict)) and not _are_on(value.values(), device):
            return False
    return True


class Root:
    """Runs the calls of the model itself, and brings outputs back unless `outputs_stay`.

    Outputs go to the device of the first tensor among the arguments, as with accelerate. Caches
    stay on their devices, and input tensors among the outputs are returned as the same objects.

    Parameters
    ----------
    frames : Frames
    outputs_stay : bool
    device : torch.device, optional
        The device of the first block, if known.
    mover : Mover, optional
        Brings the model's own arguments, if its blocks have no movers.
    """

    __slots__ = ("_first_device", "_frames", "_mover", "_outputs_stay")

    def __init__(
        self,
        frames: Frames,
        *,
        outputs_stay: bool,
        device: torch.device | None = None,
        mover: Mover | None = None,
    ) -> None:
        self._first_device = device
        self._frames = frames
        self._mover = mover
        self._outputs_stay = outputs_stay

    @property
    def device(self) -> torch.device | None:
        """The device of the inputs during `generate`, else of the first block; None if unknown."""
        return self._frames.caller or self._first_device

    def generate(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `generate`, during which the model reports the device of the inputs as its own."""
        caller = self._frames.caller
        self._frames.caller = None if self._outputs_stay else _device_of(args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._frames.caller = caller

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model as a top-level call, and bring its outputs back."""
        if self._mover is not None and torch.compiler.is_compiling():
            return call(*args, **kwargs)  # `generate` compiles for inputs on the device

        def run() -> Any:
            moved = (args, kwargs) if self._mover is None else self._mover.bring(args, kwargs)
            return call(*moved[0], **moved[1])

        outputs = self._frames.run_top(run)
        device = None if self._outputs_stay else _device_of(args, kwargs)
        if device is None:
            return outputs
        inputs = tensors_in((*args, *kwargs.values()))
        # All outputs stay alive meanwhile, so that no new tensor gets the id of another one.
        returned = {id(tensor): tensor for tensor in (*inputs, *tensors_in(caches_in(outputs)))}

        def bring_back(tensor: Tensor) -> Tensor:
            if id(tensor) not in returned:
                returned[id(tensor)] = carry(tensor, device)
            return returned[id(tensor)]

        return mapped(outputs, bring_back)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of a call's first tensor argument; None without a tensor."""
    values = (*args, *kwargs.values())
    # Tensors that are arguments themselves come before tensors inside others (encoder outputs).
    direct = [value for value in values if isinstance(value, Tensor)]
    inputs = direct or tensors_in(values)
    return inputs[0].device if inputs else None
