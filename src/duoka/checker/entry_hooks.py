"""Track the placed module entered last, and move arguments of submodules called from outside.

A map that names `model.decoder` also places its embedding. If code calls that embedding alone
(`get_input_embeddings()(ids)`), the hooks of accelerate or duoka move its arguments; inside a
running `model.decoder` nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from duoka.runtime.dispatch.arguments import tensors_in
from duoka.runtime.dispatch.movers import Frames, Mover
from duoka.runtime.dispatch.place_tensors import tensor_names

from .mixed_call import CAUSE, Args, Kwargs

# Called with the device of the placed module that is entered.
Entered = Callable[[torch.device], None]


def watch_entries(
    modules: Mapping[nn.Module, torch.device], entered: Entered, running: list[PlacedModule]
) -> None:
    """Install hooks that call `entered` and keep the `running` placed modules, outermost first."""
    for module, device in modules.items():
        region = PlacedModule(device, entered, running)
        module.register_forward_pre_hook(region.enter)
        module.register_forward_hook(region.leave, always_call=True)
        for part in _parts(module, modules):
            part.register_forward_pre_hook(region.enter_part, with_kwargs=True)


def _parts(module: nn.Module, modules: Mapping[nn.Module, torch.device]) -> list[nn.Module]:
    """Return the submodules of a placed module that hold tensors and are not placed themselves."""
    parts = []
    for child in module.children():
        if child not in modules:
            if any(True for _ in tensor_names(child)):
                parts.append(child)
            parts += _parts(child, modules)
    return parts


class PlacedModule:
    """Hooks of a placed module and its submodules."""

    def __init__(self, device: torch.device, entered: Entered, running: list[PlacedModule]) -> None:
        self.device = device
        self._entered = entered
        self._running = running
        self._mover = Mover(device, Frames())

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        return self  # a copy of a running module is on the same device

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the placed module."""
        self._running.append(self)
        self._entered(self.device)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the placed module, also called after errors."""
        self._running.remove(self)
        for tensor in tensors_in(output):  # the placement decided their device, not a fault
            vars(tensor).pop(CAUSE, None)

    def enter_part(
        self, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs] | None:
        """Forward pre-hook of a submodule: move arguments if the call comes from outside."""
        if self in self._running:
            return None
        self._entered(self.device)
        return self._mover.bring(args, kwargs)
