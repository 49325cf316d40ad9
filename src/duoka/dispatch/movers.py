"""Movers: hooks that bring a block's arguments to its device.

What was moved is remembered for one top-level call, so that a mask which forty layers read is
copied once per stage. A remembered copy is used again only for the same tensor object at the same
version, and it is dropped as soon as its source dies, so hidden states never live longer than on
one device. Tensors without a version (inference mode) are moved each time.

Outside a top-level call (a checkpointed region that backward computes again, in a thread of
autograd's) arguments are moved, and nothing is remembered.

A mover doesn't see a block that writes into its arguments for its caller to read: such a write
stays on the block's own copy.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from duoka.placement import Placement

from .placing import tensor_names

_NO_TENSORS = frozenset({type(None), bool, int, float, str})


def install(
    model: nn.Module, placement: Placement, devices: Mapping[str, torch.device]
) -> list[RemovableHandle]:
    """Put a mover on every block, and a memory of what was moved around every top-level call.

    Parameters
    ----------
    model : nn.Module
    placement : Placement
        Its entries are the blocks. An entry that isn't called itself (a list of layers), or whose
        parts lie on several devices, stands for the largest parts of which neither is true.
    devices : mapping of str to torch.device
        The device of every parameter and buffer under each of its names.

    Returns
    -------
    list of RemovableHandle
        One for each hook, to remove them by.
    """
    blocks: dict[nn.Module, torch.device] = {}
    for name, module in _entry_modules(model, placement):
        for block, device in _entrances(module, name, devices):
            blocks.setdefault(block, device)
    frames = _Frames()
    handles = []
    for block, device in blocks.items():
        mover = _Mover(device, frames)
        # First among the hooks: a user's hook sees arguments where the block computes.
        handles.append(block.register_forward_pre_hook(mover, prepend=True, with_kwargs=True))
    for module in _parents(model, blocks):
        enter, leave = _Enter(frames, is_root=module is model), _Leave(frames)
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def _entry_modules(model: nn.Module, placement: Placement) -> Iterator[tuple[str, nn.Module]]:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    for name, _ in placement.entries:
        if name in modules:  # otherwise the entry is a single parameter, which is never called
            yield name, modules[name]
    # A model calls these two by themselves, even where an entry names what contains them.
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        found = _called_alone(model, getter)
        for name, module in modules.items():
            if module is found:
                yield name, module


def _called_alone(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, nn.Module) else None


def _entrances(
    module: nn.Module, name: str, devices: Mapping[str, torch.device]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """The largest modules below `module` that are called and lie on one device."""
    prefix = f"{name}." if name else ""
    found = {devices[prefix + own] for own, _ in tensor_names(module)}
    if not found:
        return
    if len(found) == 1 and _is_callable(module):
        yield module, found.pop()
        return
    for child_name, child in module.named_children():
        yield from _entrances(child, prefix + child_name, devices)


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _parents(model: nn.Module, blocks: Mapping[nn.Module, torch.device]) -> list[nn.Module]:
    """The callable modules around blocks: calling one of them is a top-level call."""
    return [
        module
        for module in model.modules()
        if _is_callable(module)
        and (module is model or any(part in blocks for part in module.modules() if part != module))
    ]


class _Frames(threading.local):
    """The calls in progress, innermost last; each thread has its own."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frames:
        fresh = memo[id(self)] = _Frames()
        return fresh

    def __reduce__(self) -> tuple[type[_Frames], tuple[()]]:
        return _Frames, ()


class _Moved:
    """The copies of one tensor at one version, by device."""

    __slots__ = ("copies", "source", "version")

    def __init__(self, source: weakref.ref[Tensor], version: int) -> None:
        self.source = source
        self.version = version
        self.copies: dict[torch.device, Tensor] = {}


class _Frame:
    """What one top-level call remembers."""

    __slots__ = ("_device_before", "_moved", "stage")

    def __init__(self) -> None:
        self.stage: torch.device | None = None
        self._moved: dict[int, _Moved] = {}
        self._device_before: dict[str, int] = {}

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        key, version = id(tensor), tensor._version
        moved = self._moved.get(key)
        if moved is None or moved.source() is not tensor or moved.version != version:
            entries = self._moved
            source = weakref.ref(tensor, lambda _: entries.pop(key, None))
            moved = entries[key] = _Moved(source, version)
        found = moved.copies.get(device)
        if found is None or (
            # A copy made under no_grad (a checkpointed region) would lose the gradient.
            not found.requires_grad and tensor.requires_grad and torch.is_grad_enabled()
        ):
            found = moved.copies[device] = tensor.to(device)
        return found

    def enter_stage(self, device: torch.device) -> None:
        """Make the stage's device the current one of its kind."""
        self.stage = device
        backend = _backend(device)
        if backend is None:
            return
        if device.type not in self._device_before:
            self._device_before[device.type] = backend.current_device()
        backend.set_device(device.index)

    def close(self) -> None:
        # Entries refer to the dict that holds them; without this they wait for the collector.
        self._moved.clear()
        for kind, index in self._device_before.items():
            backend = _backend(torch.device(kind, index))
            if backend is not None:
                backend.set_device(index)


def _backend(device: torch.device) -> Any:
    """The module that sets the current device of this kind; None where there is none to set."""
    if device.index is None or device.type in ("cpu", "meta"):
        return None
    backend = torch.get_device_module(device.type)
    return backend if hasattr(backend, "set_device") else None


class _Mover:
    """Forward pre-hook of a block: brings its arguments to its device."""

    __slots__ = ("_device", "_frames")

    def __init__(self, device: torch.device, frames: _Frames) -> None:
        self._device = device
        self._frames = frames

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        device = self._device
        stack = self._frames.stack
        if stack and stack[-1].stage is not device:
            stack[-1].enter_stage(device)
        if _at_home(args, device) and _at_home(kwargs.values(), device):
            return None
        moved_kwargs = {key: self._brought(value) for key, value in kwargs.items()}
        return tuple([self._brought(value) for value in args]), moved_kwargs

    def _brought(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self._device else self._moved(value)
        if not isinstance(value, (tuple, list, dict)):
            return value
        if isinstance(value, dict):
            return self._brought_dict(value)
        if _at_home(value, self._device):
            return value
        items = [self._brought(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)

    def _brought_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        if _at_home(value.values(), self._device):
            return value
        # A shallow copy keeps the class and its attributes: transformers' outputs are dicts.
        brought = copy.copy(value)
        for key, item in value.items():
            brought[key] = self._brought(item)
        return brought

    def _moved(self, tensor: Tensor) -> Tensor:
        device = self._device
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            return tensor  # mixes with any device
        stack = self._frames.stack
        # Without a version a change in place goes unnoticed; and a copy made in inference mode
        # can't be used outside.
        if not stack or torch.is_inference_mode_enabled() or tensor.is_inference():
            return tensor.to(device)
        return stack[-1].move(tensor, device)


def _at_home(values: Any, device: torch.device) -> bool:
    """Whether no tensor among the values, at any depth, is on another device."""
    for value in values:
        # The commonest first: this runs for every block and token.
        if type(value) in _NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif isinstance(value, (tuple, list)):
            if not _at_home(value, device):
                return False
        elif isinstance(value, dict) and not _at_home(value.values(), device):
            return False
    return True


class _Enter:
    """Forward pre-hook of the model, and of what contains blocks: a call begins."""

    __slots__ = ("_frames", "_is_root")

    def __init__(self, frames: _Frames, *, is_root: bool) -> None:
        self._frames = frames
        self._is_root = is_root

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        stack = self._frames.stack
        stack.append(stack[-1] if stack and not self._is_root else _Frame())


class _Leave:
    """Forward hook that runs on errors too: the call is over, what was moved is forgotten."""

    __slots__ = ("_frames",)

    def __init__(self, frames: _Frames) -> None:
        self._frames = frames

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = self._frames.stack
        if stack:
            frame = stack.pop()
            if not stack or stack[-1] is not frame:
                frame.close()
