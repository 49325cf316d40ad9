"""Subject of a check: a model, the devices of its modules, its inputs or workload.

For a checkpoint whose own code fails to build the model, `stop_of` reports the place of the error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duoka.base.model_code import Spot, raised_in
from duoka.base.text import longest_prefix, value_of
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import Faults, ModelError, PlacementError
from duoka.forecast.workload import Workload
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.models.remote_code import stop_hint
from duoka.report.check_report import OriginKind, Stop
from duoka.runtime.dispatch.install_movers import is_callable
from duoka.runtime.dispatch.place_tensors import tensor_names

from .source_map import place_of

Entries = tuple[tuple[str, str], ...]
"""(name, device) of modules or single tensors, in the order of the device map."""

_PACKAGES = ("duoka", "torch", "transformers")
_NEAREST = 3
_DEVICE = re.compile(r"cpu|(?:cuda|vgpu):\d{1,3}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model on a placement with its workload."""

    model: nn.Module
    name: str
    """Name of the model in the report."""
    entries: Entries
    """Modules (or single tensors) and their devices; a longer name overrides a shorter one."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Budgets in bytes by device, where stated."""
    generation: GpuGeneration | None = None
    """Generation of the GPUs, where known."""
    completeness: Faults = field(default_factory=Faults)
    """Errors of the device map, before it was completed to the entries."""
    inputs: Mapping[str, Any] | tuple[Any, ...] | Callable[[nn.Module], Any] | None = None
    """Arguments of one call, or a function that is called with the model and runs it. None to run
    the workload, with a model that generates."""
    workload: Workload = field(default_factory=Workload)
    prompt: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Arguments of `forward` for a prompt with images; empty for a prompt of text alone."""
    train: bool = False
    """Run the loss and backward instead of generating."""
    not_run: tuple[str, ...] = ()
    """Files with model code of the checkpoint that isn't trusted, and so doesn't run."""
    hint: str = ""
    """Hint for the user if the model's code stops with an error of its own."""
    if_too_large: str = ""
    """Note for the report if the model needs more memory than the budgets."""
    is_dispatched: bool = False
    """Move arguments at the modules where `duoka.dispatch` installs movers. Otherwise arguments are
    moved at the modules that the entries name."""
    notes: tuple[str, ...] = ()
    """Notes for the report on decisions made before the check."""
    elsewhere: frozenset[Spot] = frozenset()
    """Places where a mixed operation runs on another device than the module around it."""
    offloaded: tuple[str, ...] = ()
    """Modules whose weights stay in host memory, and are copied to their devices for each call."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the entries, in order."""
        return tuple(dict.fromkeys(device for _, device in self.entries))


def code_of(model: nn.Module) -> str:
    """Describe the model's code: its class and package or file."""
    cls = type(model)
    package = cls.__module__.partition(".")[0]
    if package in _PACKAGES:
        return f"{cls.__name__} of {package}"
    try:
        return f"{cls.__name__} of {Path(inspect.getfile(cls)).name}"
    except (OSError, TypeError):
        return cls.__name__


def read_entries(device_map: Mapping[Any, Any]) -> Entries:
    """Read a device map with names, indices, or torch devices."""
    entries = tuple((str(name), device_name(device)) for name, device in device_map.items())
    wrong = [name for name, device in entries if not _DEVICE.fullmatch(device)]
    if wrong:
        raise PlacementError(
            f"{device_map[wrong[0]]!r} is not a device that can be checked; the map assigns it to "
            + ", ".join(repr(name) for name in wrong),
            hint='use a GPU ("cuda:1", or its number) or "cpu"',
            faults=Faults(misplaced=tuple(wrong)),
        )
    return entries


def device_name(device: object) -> str:
    """Return the name of a device; an int is a GPU or stage index."""
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    text = str(device)
    if text.isdecimal():
        return f"cuda:{text}"
    return "cuda:0" if text == "cuda" else text


def complete_map(model: nn.Module, entries: Entries) -> tuple[Entries, Faults]:
    """Complete a device map; return its entries, and the faults of the original.

    A tensor without an entry gets the device of the previous tensor in registration order.
    """
    names = [name for name, _ in tensor_names(model)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    known_names = {*names, *modules}
    unknown = tuple(entry for entry, _ in entries if entry not in known_names)
    devices = {entry: device for entry, device in entries if entry in known_names}
    unplaced = [name for name in names if value_of(name, devices) is None]
    saved = model.state_dict()
    missing = tuple(name for name in unplaced if name in saved)
    doubled = tuple(_contradicted(model, devices))
    completed = dict(devices)
    last_device = next(iter(devices.values()), "cuda:0")
    for name in names:
        device = value_of(name, devices)
        if device is None:
            completed[name] = last_device
        else:
            last_device = device
    if not (missing or unknown or doubled):
        return tuple(completed.items()) if unplaced else entries, Faults()
    near = {name: tuple(get_close_matches(name, modules, n=_NEAREST)) for name in unknown}
    faults = Faults(
        missing=missing,
        unknown=unknown,
        doubled=doubled,
        nearest={name: names for name, names in near.items() if names},
        completed=completed,
    )
    return tuple(completed.items()), faults


def _contradicted(model: nn.Module, devices: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of tied tensors that have different devices by their names."""
    by_tensor: dict[int, dict[str, str | None]] = {}
    for name, tensor in tensor_names(model):
        by_tensor.setdefault(id(tensor), {})[name] = value_of(name, devices)
    for devices_by_name in by_tensor.values():
        if len({device for device in devices_by_name.values() if device is not None}) > 1:
            yield from devices_by_name


def tensor_devices(model: nn.Module, entries: Entries) -> dict[str, str]:
    """Return the device of every parameter and buffer, in the order of the map."""
    devices = dict(entries)
    ranks = {entry: rank for rank, entry in enumerate(devices)}
    # The map is complete: a tensor without another entry has the entry "", the whole model.
    entry_of = {name: longest_prefix(name, devices) or "" for name, _ in tensor_names(model)}
    return {
        name: devices[entry_of[name]]
        for name in sorted(entry_of, key=lambda name: ranks[entry_of[name]])
    }


def placed_modules(model: nn.Module, entries: Entries) -> dict[nn.Module, str]:
    """Return the modules of a map; for a container that is never called, its called children."""
    devices = dict(entries)
    modules = dict(model.named_modules(remove_duplicate=False))
    device_by_module: dict[nn.Module, str] = {}
    for name, device in devices.items():
        if name in modules:
            for module in _callables(modules[name], name, devices):
                device_by_module.setdefault(module, device)
    return device_by_module


def _callables(module: nn.Module, name: str, devices: Mapping[str, str]) -> Iterator[nn.Module]:
    """Yield a module if it can be called, else its callable children without an own entry."""
    if is_callable(module):
        yield module
        return
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        if inner not in devices:
            yield from _callables(child, inner, devices)


def named_tensors(model: nn.Module) -> dict[int, tuple[OriginKind, str, torch.Tensor]]:
    """Return kind, name and tensor of parameters, buffers and tensor attributes, by id."""
    by_id: dict[int, tuple[OriginKind, str, torch.Tensor]] = {}
    for name, tensor in tensor_names(model):
        kind: OriginKind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        by_id.setdefault(id(tensor), (kind, name, tensor))
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for suffix, tensor in _tensors_of(value):
                name = ".".join(filter(None, (prefix, attribute))) + suffix
                by_id.setdefault(id(tensor), ("attribute", name, tensor))
    return by_id


def _tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an attribute, in a list, tuple or mapping with suffixes like "[0]"."""
    if isinstance(value, torch.Tensor):
        yield "", value
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    items = enumerate(value) if isinstance(value, (list, tuple)) else items
    yield from ((f"[{key!r}]", item) for key, item in items if isinstance(item, torch.Tensor))


def stop_of(checkpoint: Checkpoint, error: ModelError) -> Stop | None:
    """Describe a failure of a checkpoint's code; None for an error of duoka without a cause.

    The place is None if the cause was not raised in the checkpoint's files.
    """
    cause = error.__cause__
    if cause is None:
        return None
    own_files = {(checkpoint.path / file.name).absolute() for file in checkpoint.code}
    spot = raised_in(cause, lambda code: Path(code.co_filename).absolute() in own_files)
    message = f"{type(cause).__name__}: {cause}"
    return Stop(
        message=message,
        place=None if spot is None else place_of(spot),
        phase="build",
        hint=(isinstance(cause, ModuleNotFoundError) and error.hint) or stop_hint(message),
    )
