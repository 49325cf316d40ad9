"""Parameters and buffers go where the placement says, each once, ties kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from duoka.errors import ModelError, PlacementError
from duoka.placement import Placement


def tensor_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, persistent or not, each under every name it has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def place(model: nn.Module, placement: Placement) -> None:
    """Move parameters and buffers to their devices, each once; ties are kept.

    What is on the meta device is allocated on its device and not filled. A parameter stays the
    same object where PyTorch allows it; between kinds of devices it becomes a new one, as in
    `nn.Module.to`.

    Raises
    ------
    PlacementError
        If the placement doesn't name exactly one device for every parameter and buffer.
    """
    move_tensors(model, devices_by_name(model, placement))


def devices_by_name(model: nn.Module, placement: Placement) -> dict[str, torch.device]:
    """The device of every parameter and buffer under each of its names.

    Raises
    ------
    PlacementError
        If a name has no device, an entry names nothing, or a tied tensor has several devices.
    """
    tensors = dict(tensor_names(model))
    placement.check(tensors)
    by_text = {text: torch.device(text) for text in placement.devices}
    devices: dict[str, torch.device] = {}
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        text = placement.device_of(name)
        assert text is not None  # check() has refused a placement that misses a name
        devices[name] = by_text[text]
        names_of.setdefault(id(tensor), []).append(name)
    split = [names for names in names_of.values() if len({devices[name] for name in names}) > 1]
    if split:
        raise PlacementError(
            "tied parameters are placed on several devices: "
            + "; ".join(
                ", ".join(f"{name} on {devices[name]}" for name in names) for names in split
            ),
            hint="a tied parameter runs on one device: give all its names the same",
            doubled=[name for names in split for name in names],
        )
    return devices


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers on the meta device.

    Raises
    ------
    ModelError
        With how many there are, and the first few names.
    """
    names = [name for name, tensor in tensor_names(model) if tensor.is_meta]
    if names:
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ModelError(
            f"{len(names)} parameters and buffers have no data: {some}",
            hint="load the weights first; `duoka.load(plan)` loads and dispatches",
        )


def move_tensors(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Put every parameter and buffer on the device of its name."""
    # An id stands for one tensor here: only tensors of the model as it was are looked up, and each
    # of them lives until its last place in the model is filled anew.
    placed: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    name = f"{prefix}.{key}" if prefix else key
                    placed[id(tensor)] = _placed(tensor, devices[name])
                table[key] = placed[id(tensor)]


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    data = _data_on(tensor.detach(), device)
    if not isinstance(tensor, nn.Parameter):
        return data
    grad = None if tensor.grad is None else tensor.grad.to(device)
    # Only plain tensors can exchange their contents; a subclass keeps its own in Python.
    if type(tensor.data) is type(data) is torch.Tensor and torch._has_compatible_shallow_copy_type(
        tensor.data, data
    ):
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad
        return tensor
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    for mark, value in tensor.__dict__.items():
        parameter.__dict__.setdefault(mark, value)  # what is there already belongs to the data
    parameter.grad = grad
    return parameter


def _data_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)
