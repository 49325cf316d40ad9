"""Moves parameters and buffers to the devices of a placement, each once, with ties kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duoka.base.text import is_within, longest_prefix
from duoka.errors import Faults, ModelError, PlacementError
from duoka.models.adapter_stacks import STACKS
from duoka.models.quantization import empty_weight, is_composed, move_weight
from duoka.models.quantization import on_host as host_experts
from duoka.planner.placement import Placement
from duoka.virtual import active_world, is_virtual

from .copies import carry

_SCALE = 0.02


def tensor_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, persistent or not, a tied one under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def empty_modules(model: nn.Module) -> Iterator[str]:
    """Yield the name of every module that holds no parameter or buffer, each under all its names.

    Device maps written by transformers and accelerate name dropout and activations, too.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if name and next(tensor_names(module), None) is None:
            yield name


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def invent_values(model: nn.Module) -> None:
    """Fill weights with random values, so that model code can read computed results."""
    stacks = (buffer for name, buffer in model.named_buffers() if name.endswith(STACKS))
    for tensor in (*model.parameters(), *stacks):
        if tensor.is_floating_point():
            fill(tensor.data)


def fill(data: Tensor) -> Tensor:
    """Fill a tensor with random values in the range of weights, or with zeros for integers."""
    return data.normal_(std=_SCALE) if data.is_floating_point() else data.zero_()


def place(model: nn.Module, placement: Placement) -> None:
    """Move parameters and buffers to their devices, each once; ties are kept.

    Tensors on the meta device are allocated on their new device, and not filled. A parameter stays
    the same object where PyTorch allows; between types of devices it may become a new object, as in
    `nn.Module.to`.
    """
    move_tensors(model, devices_by_name(model, placement))


def devices_by_name(model: nn.Module, placement: Placement) -> dict[str, torch.device]:
    """Return the device of every parameter and buffer under each of its names."""
    tensors = {name: table[key] for name, (table, key) in _slots(model).items()}
    placement.check(tensors)
    # Memory is taken in the order of the placement, so that addresses are those of the forecast.
    # The entries ("model.layers.1", "vgpu:1"), ("", "vgpu:0") have the ranks 0 and 1, and a tensor
    # belongs to the longest entry that covers its name: those of layers.1 come first, then others.
    ranks = {entry: rank for rank, (entry, _) in enumerate(placement.entries)}
    by_rank = [torch.device(text) for _, text in placement.entries]
    # One object for each device, so that movers can compare devices by identity.
    interned = {device: device for device in by_rank}
    rank_of = {name: ranks[longest_prefix(name, ranks) or ""] for name in tensors}
    ordered = sorted(tensors, key=rank_of.__getitem__)
    devices = {name: interned[by_rank[rank_of[name]]] for name in ordered}
    _refuse_split(tensors, devices)
    return devices


def _refuse_split(tensors: Mapping[str, Tensor], devices: Mapping[str, torch.device]) -> None:
    """Raise PlacementError if the names of a tied tensor have different devices."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    split = [names for names in names_of.values() if len({devices[name] for name in names}) > 1]
    if split:
        listed = (", ".join(f"{name} on {devices[name]}" for name in names) for names in split)
        raise PlacementError(
            f"tied parameters are placed on several devices: {'; '.join(listed)}",
            hint="assign all names of a tied parameter to the same device",
            faults=Faults(doubled=tuple(name for names in split for name in names)),
        )


def _slots(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return for each parameter and buffer, by name, its module's dictionary and its key there."""
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    slots[f"{prefix}.{key}" if prefix else key] = (table, key)
    return slots


def refuse_meta(model: nn.Module) -> None:
    """Raise ModelError for a model with parameters or buffers on the meta device."""
    names = [name for name, tensor in tensor_names(model) if tensor.is_meta]
    if names:
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ModelError(
            f"{len(names)} parameters and buffers have no data: {some}",
            hint="load the weights first; `duoka.load(plan)` loads and dispatches",
        )


def on_host(
    model: nn.Module, devices: Mapping[str, torch.device], offloaded: Sequence[str]
) -> dict[str, torch.device]:
    """Return the CPU as device of each tensor of the offloaded modules, by name.

    Raise PlacementError if other modules share these tensors.
    """
    inside = (name for name in devices if any(is_within(name, module) for module in offloaded))
    hosts = dict.fromkeys(inside, torch.device("cpu"))
    tensors = list(tensor_names(model))
    ids = {id(tensor) for name, tensor in tensors if name in hosts}
    shared = [name for name, tensor in tensors if id(tensor) in ids and name not in hosts]
    if shared:
        raise PlacementError(
            f"offloaded modules share weights with other modules: {', '.join(shared)}",
            hint="don't offload tied weights",
            faults=Faults(split=tuple(shared)),
        )
    return hosts


def with_host_experts(
    model: nn.Module, devices: Mapping[str, torch.device]
) -> Iterator[tuple[str, torch.device]]:
    """Yield names and devices, for experts on the host the CPU.

    On virtual GPUs without data nothing is computed, so experts on the host are left out.
    """
    hosts = {
        f"{owner}.{name}"
        for owner, module in host_experts(model)
        for name, _ in module.named_parameters()
    }
    for name, device in devices.items():
        if device.type == "meta" or name not in hosts:
            yield name, device
        elif not (is_virtual(device) and active_world().gpus[0].meta):
            yield name, torch.device("cpu")


def move_tensors(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Move the parameters and buffers of these names to their devices, in the order of names."""
    slots = _slots(model)
    # Tensors are identified by id. That is safe, since only the model's original tensors are looked
    # up, each of which lives until its last slot is refilled; so no slot may be visited twice.
    placed: dict[int, Tensor] = {}
    done: set[tuple[int, str]] = set()
    for name, device in with_host_experts(model, devices):
        table, key = slots[name]
        if (id(table), key) in done:
            continue
        done.add((id(table), key))
        tensor = table[key]
        if id(tensor) not in placed:
            placed[id(tensor)] = _place_tensor(tensor, device)
        table[key] = placed[id(tensor)]


class TensorSnapshot:
    """The parameter and buffer objects of a model, to be restored later."""

    def __init__(self, model: nn.Module) -> None:
        self._originals = [(table, key, table[key]) for table, key in _slots(model).values()]

    def restore(self) -> None:
        """Put the same objects back into the model."""
        for table, key, tensor in self._originals:
            table[key] = tensor


def as_parameter(data: Tensor, like: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of data, with the extra attributes of the parameter `like`."""
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    for mark, value in like.__dict__.items():
        parameter.__dict__.setdefault(mark, value)  # existing attributes belong to the data
    return parameter


def _place_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor with its gradient; a parameter stays the same object if PyTorch allows."""
    if tensor.device == device:
        return tensor
    data = _data_on(tensor, device).detach()
    if not isinstance(tensor, nn.Parameter):
        return data
    grad = None if tensor.grad is None else carry(tensor.grad, device)
    # Only plain tensors can take over data in place; a subclass keeps its data in Python.
    if type(tensor.data) is type(data) is Tensor and torch._has_compatible_shallow_copy_type(
        tensor.data, data
    ):
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad
        return tensor
    parameter = as_parameter(data, tensor, requires_grad=tensor.requires_grad)
    parameter.grad = grad
    return parameter


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor's data to a device; a meta tensor becomes unfilled memory there."""
    if is_composed(tensor):
        return empty_weight(tensor, device) if tensor.is_meta else move_weight(tensor, device)
    tensor = tensor.detach()
    return torch.empty_like(tensor, device=device) if tensor.is_meta else carry(tensor, device)
