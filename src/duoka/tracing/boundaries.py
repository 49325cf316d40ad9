"""Boundaries of blocks: calls of modules and explicit moves, for the time of a ``with``.

Observers of calls are hooks of PyTorch's. A replacement takes the place of ``module.forward``,
inside of all hooks, because it decides whether the module runs at all.
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
"""Called with a module and the arguments of its call; returns those that the module is given."""
Replacement = Callable[[Callable[..., Any], Any, Any], Any]
"""Called in place of a module's forward, with this and the arguments."""


@contextmanager
def observe_calls(
    model: nn.Module,
    enter: Mapping[str, Enter],
    leave: Mapping[str, Callable[[nn.Module, Any, Any], None]],
) -> Iterator[None]:
    """Call observers, by the name of their module, before and after its calls."""
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
    """Give the calls of named modules to replacements; names of parameters are left out."""
    with ExitStack() as patches:
        for name, replacement in replacements.items():
            module = find_submodule(model, name)
            if module is not None:
                _patch(module, replacement, patches)
        yield


def _patch(module: nn.Module, replacement: Replacement, patches: ExitStack) -> None:
    own_forward, forward = vars(module).get("forward"), module.forward

    @wraps(forward)  # whose signature says what it takes
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
    """Return the module of a name, or None where the name is a parameter's."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


Place = TypeVar("Place")


class Moves(TorchFunctionMode, Generic[Place]):
    """Reports explicit moves, and tensors created on the device of another, inside a ``with``.

    That is ``x.to(y.device)``, and ``arange(n, device=y.device)``. On one device such a move does
    nothing, so that no listener hears of it; on several the result lies where `y` lies. The place
    of `y` is found again by the device object, which was read from `y`.

    `place_of` returns where a tensor belongs, as the listener tells places apart, or None.
    `note_move` is given what ``x.to(…)`` made, `x` itself and the named place; its result is what
    the model gets. `created` is given what was made from no tensor, and the place.
    """

    # While a model is traced, it is whole on vgpu:0, and devices compare equal. But each read of
    # `Tensor.device` makes a new object, whose identity tells whose device was read:
    #
    #   device = y.device                   _read[id(device)] = device, the place of y
    #   x.to(device)                        a move of x to the place of y
    #   torch.arange(4, device=device)      a tensor made at the place of y
    #
    # A device that model code writes as a string, or makes anew, names no place.

    def __init__(
        self,
        place_of: Callable[[torch.Tensor], Place | None],
        note_move: Callable[[torch.Tensor, torch.Tensor, Place], torch.Tensor],
        created: Callable[[Any, Place], None] = lambda result, place: None,
    ) -> None:
        super().__init__()
        self._place_of = place_of
        self._moved = note_move
        self._created = created
        # Every read makes a new object. It is kept, so that no other one gets its identity.
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
                return self._moved(result, args[0], place)
        elif id(kwargs.get("device")) in self._read:
            self._created(result, self._read[id(kwargs["device"])][1])
        return result

    def _find_place(self, values: tuple[Any, ...]) -> Place | None:
        for value in values:
            if isinstance(value, torch.Tensor):
                return self._place_of(value)
            if id(value) in self._read:
                return self._read[id(value)][1]
        return None
