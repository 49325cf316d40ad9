"""Boundaries of blocks: observe module calls and explicit moves within a ``with`` statement.

Observers of calls are PyTorch hooks. A replacement takes the place of ``module.forward``, inside
all hooks, because a replacement decides whether the module runs at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Enter = Callable[[nn.Module, Any, Any], tuple[Any, Any] | None]
"""Called with a module, args and kwargs; returns the args and kwargs to call the module with, or
None to leave them."""
Replacement = Callable[[Callable[..., Any], Any, Any], Any]
"""Called in place of a module's forward, with that forward, args and kwargs."""


@contextmanager
def observe_calls(
    model: nn.Module,
    enter: Mapping[str, Enter],
    leave: Mapping[str, Callable[[nn.Module, Any, Any], None]],
) -> Iterator[None]:
    """Call `enter` before and `leave` after each call of a module, by the module's name."""
    with ExitStack() as handles:
        for name, module in model.named_modules():
            if name in enter:
                handle = module.register_forward_pre_hook(enter[name], with_kwargs=True)
                handles.callback(handle.remove)
            if name in leave:
                handle = module.register_forward_hook(leave[name], always_call=True)
                handles.callback(handle.remove)
        yield


@contextmanager
def replace_calls(model: nn.Module, replacements: Mapping[str, Replacement]) -> Iterator[None]:
    """Replace the forward of modules, by name; names of parameters are ignored."""
    with ExitStack() as patches:
        for name, replacement in replacements.items():
            module = find_submodule(model, name)
            if module is not None:
                _patch_forward(module, replacement, patches)
        yield


def _patch_forward(module: nn.Module, replacement: Replacement, patches: ExitStack) -> None:
    """Replace a module's forward until `patches` is closed."""
    own_forward, forward = vars(module).get("forward"), module.forward

    @wraps(forward)  # model code may inspect the signature
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(forward, args, kwargs)

    def restore() -> None:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward

    patches.callback(restore)
    module.forward = replaced


def find_submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of this name, or None if no module has the name (a parameter may)."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


Place = TypeVar("Place")


class Moves(TorchFunctionMode, Generic[Place]):
    """Reports explicit moves and tensors created on another tensor's device, within a ``with``.

    These are ``x.to(y.device)`` and ``arange(n, device=y.device)``. With the whole model on one
    device such a move does nothing, so a listener of operations never sees it; on several devices
    the result lies on the device of `y`. The mode maps each device object back to the tensor `y`
    that it was read from.

    `place_of(tensor)` returns the place of a tensor (an object of the caller, such as a block
    number), or None if unknown. `note_move(result, x, place)` returns the tensor that model code
    gets in place of the result. `created(result, place)` is called for a created tensor.
    """

    # A model is traced whole on vgpu:0, so all devices compare equal. But each read of
    # `Tensor.device` creates a new object, whose identity tells which tensor it was read from:
    #
    #   device = y.device                   _read[id(device)] = device, the place of y
    #   x.to(device)                        a move of x to the place of y
    #   torch.arange(4, device=device)      a tensor made at the place of y
    #
    # A device given as a string, or constructed by model code, has no known place.

    def __init__(
        self,
        place_of: Callable[[torch.Tensor], Place | None],
        note_move: Callable[[torch.Tensor, torch.Tensor, Place], torch.Tensor],
        created: Callable[[Any, Place], None] = lambda result, place: None,
    ) -> None:
        super().__init__()
        self._place_of = place_of
        self._note_move = note_move
        self._created = created
        # Device objects are kept alive, so that no later object gets the same `id`.
        self._read: dict[int, tuple[torch.device, Place]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            place = self._place_of(args[0])
            if place is not None:
                self._read[id(result)] = (result, place)
        elif func is torch.Tensor.to:
            place = self._find_place((*args[1:], *kwargs.values()))
            if place is not None:
                return self._note_move(result, args[0], place)
        elif id(kwargs.get("device")) in self._read:
            self._created(result, self._read[id(kwargs["device"])][1])
        return result

    def _find_place(self, values: tuple[Any, ...]) -> Place | None:
        """Return the place named by arguments of ``x.to``; None if they name no known place."""
        for value in values:
            if isinstance(value, torch.Tensor):
                return self._place_of(value)
            if id(value) in self._read:
                return self._read[id(value)][1]
        return None
