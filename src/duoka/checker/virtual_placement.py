"""A model's tensors on virtual GPUs, for good: whoever does this is in a process of its own.

Copying a model would tear it from what its own code refers to: a closure over the module, a hook
that is another module's method. So the model itself is run, in a fork (`virtual.apart`), and its
parameters stay the very objects that they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duoka.models.quantization import empty_weight, is_composed, moved, parts
from duoka.runtime.dispatch.dispatch import stream
from duoka.runtime.dispatch.install_movers import install_on
from duoka.runtime.dispatch.place_tensors import fill, on_host, tensor_names
from duoka.virtual import VirtualTensor


def put_on_virtual_gpus(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    placed: Mapping[nn.Module, torch.device],
    offloaded: Sequence[str] = (),
) -> None:
    """Put a model's tensors on their devices, and movers on the modules that are placed."""
    hosts = on_host(model, devices, offloaded)
    _move(model, {name: device for name, device in devices.items() if name not in hosts})
    install_on(model, placed)
    stream(model, offloaded, devices)


def _move(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    tensors = dict(tensor_names(model))
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (table, key, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]
    moved_by_id: dict[int, Tensor] = {}
    for name, device in devices.items():
        tensor = tensors[name]
        if id(tensor) not in moved_by_id and tensor.device != device:
            moved_by_id[id(tensor)] = _moved(tensor, device)
    for table, key, tensor in slots:
        if id(tensor) in moved_by_id:
            table[key] = moved_by_id[id(tensor)]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
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
    return tensor


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    if is_composed(tensor) and tensor.is_meta:
        empty = empty_weight(tensor, device)
        for part in parts(empty).values():
            _fill(part)
        return empty
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
    return fill(data)
