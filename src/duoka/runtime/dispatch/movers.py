"""Movers: they bring a block's arguments to its device when the block is called.

A copy is remembered for one top-level call, so that a mask which forty layers read is copied once
per stage. It is used again only for the same tensor object at the same version, and dropped as soon
as its source dies, so hidden states never live longer than on one device. Tensors without a version
(inference mode) are copied each time.

Outside a top-level call (a checkpointed region that backward computes again, in a thread of
autograd's) arguments are moved, and nothing is remembered.

The model's own outputs are moved, too: back to the device of its inputs.

A mover doesn't see a block that writes into its arguments for its caller to read: such a write
stays on the block's own copy.
"""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .arguments import NO_TENSORS, caches_in, mapped, mapped_call, must_move, tensors_in
from .copies import carry


class Frames(threading.local):
    """The calls in progress, innermost last; each thread has its own."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.caller: torch.device | None = None

    def enter(self, *, is_root: bool) -> None:
        """Begin to remember copies; a call within the model's own shares the model's frame."""
        stack = self.stack
        stack.append(stack[-1] if stack and not is_root else Frame())

    def enter_part(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Enter the call of a module that contains blocks; a forward pre-hook."""
        self.enter(is_root=False)

    def leave(self, *_: Any) -> None:
        """Forget the copies of the matching `enter`; a forward hook, on errors too."""
        if self.stack:
            frame = self.stack.pop()
            if not self.stack or self.stack[-1] is not frame:
                frame.close()

    def __reduce__(self) -> tuple[type[Frames], tuple[()]]:
        return Frames, ()


class _Copied(NamedTuple):
    """A tensor at a version, and its copy on another device."""

    source: weakref.ref[Tensor]
    version: int
    copy: Tensor


class Memory:
    """The copies on a device, by identity of the source.

    A copy made without recording gradients (in a checkpointed region, say) must not be used where
    they are needed, so each of the two modes has its own memory.
    """

    __slots__ = ("_has_grad", "moved")

    def __init__(self, *, has_grad: bool) -> None:
        self._has_grad = has_grad
        self.moved: dict[int, _Copied] = {}

    def lookup(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor, if it was copied and hasn't changed since."""
        moved = self.moved.get(id(tensor))
        if moved is None or moved.source() is not tensor or moved.version != tensor._version:
            return None
        copy = moved.copy
        if self._has_grad and copy.requires_grad != tensor.requires_grad:
            return None
        return copy

    # An entry must never keep its source alive, nor outlive it: another tensor may get the id of a
    # freed one. So an entry has a weak reference whose callback removes the entry.
    def add(self, tensor: Tensor, copy: Tensor) -> Tensor:
        """Remember a copy as long as its source lives; return the copy."""
        key, entries = id(tensor), self.moved
        # A tensor of inference mode has no version: a change in place would go unnoticed.
        if not tensor.is_inference():
            # An id is given to another tensor only after its first owner is gone from here.
            source = weakref.ref(tensor, lambda _: entries.pop(key, None))
            entries[key] = _Copied(source, tensor._version, copy)
        return copy


class Frame:
    """The copies of a top-level call."""

    __slots__ = ("_current", "_memories", "stage")

    def __init__(self) -> None:
        self.stage: torch.device | None = None
        self._memories: dict[tuple[str, bool], Memory] = {}
        # By kind of device: the index that was the caller's current device.
        self._current: dict[str, int] = {}

    def memory(self, key: tuple[str, bool]) -> Memory:
        """Return the memory of a device, by its name and whether gradients are recorded."""
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(has_grad=key[1])
        return memory

    def enter_stage(self, device: torch.device) -> None:
        """Make the stage's device the current device of its kind."""
        self.stage = device
        backend = _backend(device)
        if backend is not None:
            if device.type not in self._current:
                self._current[device.type] = backend.current_device()
            backend.set_device(device.index)

    def close(self) -> None:
        """Forget the copies, and restore the caller's current devices."""
        # Entries refer to the dict that holds them; without this they wait for the collector.
        for memory in self._memories.values():
            memory.moved.clear()
        for kind, index in self._current.items():
            backend = _backend(torch.device(kind, index))
            if backend is not None:
                backend.set_device(index)


def _backend(device: torch.device) -> Any:
    """Return the module that sets the current device of this kind, or None."""
    if device.index is None or device.type in ("cpu", "meta"):
        return None
    backend = torch.get_device_module(device.type)
    return backend if hasattr(backend, "set_device") else None


class Mover:
    """Brings arguments to a device; `caches` of several blocks stay."""

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
        """Return the arguments with every tensor in them on the device."""
        device = self._device
        stack = self._frames.stack
        if stack and stack[-1].stage is not device:
            stack[-1].enter_stage(device)
        if _are_at(args, device) and _are_at(kwargs.values(), device):
            return args, kwargs
        # A copy made in inference mode can't be used outside, so there nothing is remembered.
        memory = None
        if stack and not torch.is_inference_mode_enabled():
            memory = stack[-1].memory(self._keys[torch.is_grad_enabled()])

        def move(tensor: Tensor) -> Tensor:
            if not must_move(tensor, device):
                return tensor
            if memory is None:
                return carry(tensor, device)
            copy = memory.lookup(tensor)
            return memory.add(tensor, carry(tensor, device)) if copy is None else copy

        return mapped_call(args, kwargs, move, self._caches)


def _are_at(values: Any, device: torch.device) -> bool:
    """Return True if no tensor among the values, at any depth, is on another device."""
    for value in values:
        # The commonest types first: this runs for every block and token.
        if type(value) in NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif isinstance(value, (tuple, list)):
            if not _are_at(value, device):
                return False
        elif isinstance(value, (dict, UserDict)) and not _are_at(value.values(), device):
            return False
    return True


class Root:
    """Runs the calls of the model itself, and brings its outputs back unless they are to stay.

    They go to the device of the first tensor among the arguments, as accelerate brings them there.
    Caches stay, and tensors of the caller come back as they are.

    Parameters
    ----------
    frames : Frames
    outputs_stay : bool
    device : torch.device, optional
        Of the first block, where it is known.
    mover : Mover, optional
        Brings the model's own arguments, where its blocks have no movers.
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
        """The device of the inputs in `generate`; else the first block's, where it is known."""
        return self._frames.caller or self._first_device

    def generate(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `generate` with a model that reports the device of its inputs as its own."""
        caller = self._frames.caller
        self._frames.caller = None if self._outputs_stay else _device_of(args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._frames.caller = caller

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model."""
        if self._mover is not None and torch.compiler.is_compiling():
            return call(*args, **kwargs)  # `generate` compiles for inputs on the device
        self._frames.enter(is_root=True)
        try:
            moved = (args, kwargs) if self._mover is None else self._mover.bring(args, kwargs)
            outputs = call(*moved[0], **moved[1])
        finally:
            self._frames.leave()
        device = None if self._outputs_stay else _device_of(args, kwargs)
        if device is None:
            return outputs
        inputs = tensors_in((*args, *kwargs.values()))
        # Outputs live while they are brought back, so that no tensor gets the identity of another.
        returned = {id(tensor): tensor for tensor in (*inputs, *tensors_in(caches_in(outputs)))}

        def bring_back(tensor: Tensor) -> Tensor:
            if id(tensor) not in returned:
                returned[id(tensor)] = carry(tensor, device)
            return returned[id(tensor)]

        return mapped(outputs, bring_back)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of a call's first tensor; None where there is no tensor."""
    values = (*args, *kwargs.values())
    # An argument that is a tensor comes before those inside of others (an encoder's outputs).
    direct = [value for value in values if isinstance(value, Tensor)]
    inputs = direct or tensors_in(values)
    return inputs[0].device if inputs else None
