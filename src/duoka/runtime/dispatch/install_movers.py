"""Chooses the modules that get movers, and the calls during which copies are remembered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import getattr_static

import torch
from torch import nn

from duoka.base.text import containing
from duoka.planner.placement import Placement

from .arguments import caches_of
from .classes import FRAMES, MOVER, ROOT, update_class
from .movers import Frames, Mover, Root
from .place_tensors import tensor_names


def install(
    model: nn.Module,
    placement: Placement,
    devices: Mapping[str, torch.device],
    *,
    on_blocks: bool = True,
    outputs_stay: bool = False,
) -> Installed:
    """Put a mover on every block, and remember copies during every top-level call.

    Without `on_blocks` only the arguments of the model itself are moved, and those of its encoder,
    which `generate` calls directly.
    """
    start = next(iter(devices.values()), None)
    if on_blocks or start is None:
        blocks = moving_modules(model, placement, devices)
        return install_on(model, blocks, outputs_stay=outputs_stay, first=start)
    encoder = encoder_of(model)
    blocks = {} if encoder is None else {encoder: start}
    return install_on(model, blocks, outputs_stay=outputs_stay, first=start, inputs_to=start)


def moving_modules(
    model: nn.Module, placement: Placement, devices: Mapping[str, torch.device]
) -> dict[nn.Module, torch.device]:
    """Return the modules whose arguments must be moved at each call, with the device of each."""
    blocks = dict(_containers(model, placement, devices))
    for name, module in _entry_modules(model, placement):
        for block, device in _entrances(module, name, devices):
            blocks.setdefault(block, device)
    return blocks


def install_on(
    model: nn.Module,
    blocks: Mapping[nn.Module, torch.device],
    *,
    outputs_stay: bool = False,
    first: torch.device | None = None,
    inputs_to: torch.device | None = None,
) -> Installed:
    """Put movers on the given modules alone, and remember copies during top-level calls.

    If given, `first` is the device that the model reports as its own, and `inputs_to` the device to
    which the model's own arguments are brought.
    """
    frames = Frames()
    parents = _parents(model, blocks)
    for block, device in blocks.items():
        caches = caches_of(block) if block in parents else frozenset[int | str]()
        block.__dict__[MOVER] = Mover(device, frames, caches)
        update_class(block)
    mover = None if inputs_to is None else Mover(inputs_to, frames)
    model.__dict__[ROOT] = Root(frames, outputs_stay=outputs_stay, device=first, mover=mover)
    update_class(model)
    for module in parents:
        module.__dict__[FRAMES] = frames
        update_class(module)
    return Installed(list(blocks))


class Installed:
    """The movers that were put on a model's blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self._blocks = blocks

    def remove(self, model: nn.Module) -> None:
        """Remove the movers, and restore the classes of all modules."""
        del model.__dict__[ROOT]
        # Blocks that were replaced since are no longer among the model's modules.
        for module in {*self._blocks, *model.modules()}:
            for name in (MOVER, FRAMES):
                module.__dict__.pop(name, None)
            update_class(module)


def _containers(
    model: nn.Module, placement: Placement, devices: Mapping[str, torch.device]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield callable modules that contain placement entries, with the device of their first part.

    A container's own code may combine an argument with outputs of its first part (a residual around
    a layer whose parts are entries). The model itself isn't a container: its arguments stay.
    """
    containers = {owner for entry, _ in placement.entries for owner in containing(entry)}
    starts: dict[str, torch.device] = {}
    for name, device in devices.items():  # in the order of execution
        for owner in containing(name):
            starts.setdefault(owner, device)
    for name, module in model.named_modules():
        if name in containers and is_callable(module):
            yield module, starts[name]


def _entry_modules(model: nn.Module, placement: Placement) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the placement's entries, and the input and output embeddings."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    for name, _ in placement.entries:
        if name in modules:  # else the entry is a parameter, which isn't called
            yield name, modules[name]
    # A model may call its embeddings directly, even if an entry is a module around them.
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        embedding = None
        with suppress(AttributeError, NotImplementedError):
            embedding = getattr(model, getter)()
        yield from ((name, module) for name, module in modules.items() if module is embedding)


def _entrances(
    module: nn.Module, name: str, devices: Mapping[str, torch.device]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the largest callable modules below `module` with a single device."""
    # With layers.0 on one device and layers.1 on another, the entry "model" has the entrances
    # model.embed_tokens, model.layers.0 and model.layers.1: neither the model nor its list of
    # layers has a single device. An entrance moves arguments; modules below it need not.
    prefix = f"{name}." if name else ""
    entrances = {devices[prefix + tensor] for tensor, _ in tensor_names(module)}
    if not entrances:
        return
    if len(entrances) == 1 and is_callable(module):
        yield module, entrances.pop()
        return
    for child_name, child in module.named_children():
        yield from _entrances(child, prefix + child_name, devices)


def streamed_modules(
    model: nn.Module, entries: Sequence[str], devices: Mapping[str, torch.device]
) -> dict[torch.device, list[nn.Module]]:
    """Return by device the modules whose weights are streamed as a unit, for offloaded entries.

    The modules of a device are in the order of the entries, in which they run.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    by_device: dict[torch.device, list[nn.Module]] = {}
    for name in entries:
        for module, device in _entrances(modules[name], name, devices):
            by_device.setdefault(device, []).append(module)
    return by_device


def is_callable(module: nn.Module) -> bool:
    """Return True if a module has a `forward`, which a list of modules hasn't."""
    # A compiled module has `forward` as an attribute of the instance.
    forward = getattr_static(type(module), "forward", nn.Module.forward)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _parents(model: nn.Module, blocks: Mapping[nn.Module, torch.device]) -> list[nn.Module]:
    """List the callable modules around blocks; a call of one outside the model is top-level."""
    return [
        module
        for module in model.modules()
        if module is not model
        and is_callable(module)
        and any(part in blocks for part in module.modules() if part is not module)
    ]


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of an encoder-decoder model of transformers; None for other models."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    get_encoder = getattr(model, "get_encoder", None)
    encoder = get_encoder() if get_encoder is not None else None
    return encoder if isinstance(encoder, nn.Module) else None
