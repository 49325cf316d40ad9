"""A model, for a while on virtual GPUs: the same objects, and afterwards as it was.

Copying a model would tear it from what its own code refers to: a closure over the module, a hook
that is another module's method. So the model itself is run. Its parameters stay the very objects
that they are, and take the contents of virtual ones for the time of a check.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from duoka.models.quantization import empty_weight, is_composed, moved, parts
from duoka.runtime.dispatch.dispatch import stream
from duoka.runtime.dispatch.install import install_on
from duoka.runtime.dispatch.place import on_host, tensor_names
from duoka.virtual import VirtualTensor

from .contents import CONTAINERS, Contents, refill

_SCALE = 0.02


@contextmanager
def borrowed(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    placed: Mapping[nn.Module, torch.device],
    offloaded: Sequence[str] = (),
) -> Iterator[Borrowing]:
    """Put a model on virtual GPUs inside the scope."""
    before = Borrowing(model)
    hosts = on_host(model, devices, offloaded)
    try:
        before.move({name: device for name, device in devices.items() if name not in hosts})
        installed = install_on(model, placed)
        streamers = stream(model, offloaded, devices)
        try:
            yield before
        finally:
            for streamer in streamers:
                streamer.remove()
            installed.remove()
    finally:
        before.restore()


class Borrowing:
    """What a model holds: its parameters' contents, and every module's attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(tensor_names(model))
        self._attributes = [(module, _copied(vars(module))) for module in model.modules()]
        # Not what modules hold themselves, which is put back in any case.
        self._contents = Contents()
        for _, attributes in self._attributes:
            for value, content in attributes.values():
                for item in (value,) if content is None else _values(content):
                    self._contents.note(item)
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._slots = _slots(model)

    def move(self, devices: Mapping[str, torch.device]) -> None:
        """Put every parameter and buffer on its device."""
        moved: dict[int, Tensor] = {}
        for name, device in devices.items():
            tensor = self._tensors[name]
            if id(tensor) not in moved and tensor.device != device:
                moved[id(tensor)] = self._moved(tensor, device)
        for table, key, tensor in self._slots:
            if id(tensor) in moved:
                table[key] = moved[id(tensor)]

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        with torch.no_grad():
            data = _data_on(tensor, device)
        if not isinstance(tensor, nn.Parameter):
            return data
        parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
        if type(tensor) is not nn.Parameter:
            return parameter
        # The model's own object takes the contents: closures and ties refer to it. That fails
        # where somebody holds a weak reference to it or a graph that it is a leaf of.
        try:
            torch.utils.swap_tensors(tensor, parameter)
        except RuntimeError:
            return parameter
        self._swapped.append((tensor, parameter))
        return tensor

    def restore(self) -> None:
        """Make the model what it was."""
        self._contents.put_back()
        for module, attributes in self._attributes:
            _put_back(vars(module), attributes)
        for tensor, _ in self._swapped:
            tensor.grad = None
        self._swap_back()
        if self._swapped:
            gc.collect()  # what the run left behind refers to a parameter
            self._swap_back()
        for tensor, parameter in self._swapped:
            # A graph of the run's lives on: the contents are safe in another object.
            for table, key, held in self._slots:
                if held is tensor:
                    table[key] = parameter

    def _swap_back(self) -> None:
        left = []
        for pair in self._swapped:
            try:
                torch.utils.swap_tensors(*pair)
            except RuntimeError:
                left.append(pair)
        self._swapped = left

    @property
    def num_replaced(self) -> int:
        """How many parameters are other objects than before."""
        return len(self._swapped)


def _slots(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    tables = (
        table for module in model.modules() for table in (module._parameters, module._buffers)
    )
    return [
        (table, key, held) for table in tables for key, held in table.items() if held is not None
    ]


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    if is_composed(tensor) and tensor.is_meta:
        made = empty_weight(tensor, device)
        for part in parts(made).values():
            _fill(part)
        return made
    if is_composed(tensor):
        return moved(tensor.detach(), device)
    if not tensor.is_meta:
        # Of a subclass the contents are taken: what it does by itself isn't for this.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(torch.Tensor).to(device)
    return _fill(torch.empty_like(tensor, device=device))


def _fill(data: Tensor) -> Tensor:
    """Where numbers are computed they should be some: what was never written may be NaN."""
    if isinstance(data, VirtualTensor) and data.gpu.meta:
        return data
    return data.normal_(std=_SCALE) if data.is_floating_point() else data.zero_()


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes, with the content of their containers as it is now."""
    return {
        name: (value, value.copy() if type(value) in CONTAINERS else None)
        for name, value in attributes.items()
    }


def _values(content: Any) -> Any:
    return list(content.values()) if isinstance(content, dict) else list(content)


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, content) in before.items():
        attributes[name] = value
        if content is not None:
            refill(value, content)
