"""Move a model to virtual GPUs in place, and restore it afterwards.

A copy of a model would lose the references of its own code: a closure over a module, a hook that is
another module's method. So the model itself is run. Its parameters stay the same objects, and have
the contents of virtual parameters during a check. Any other state of the code in which the check
has left a virtual tensor is restored: attributes and containers, globals, class attributes. Caches
of functions are cleared.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from duoka.base.model_code import is_installed
from duoka.models.quantization import empty_weight, is_composed, move_weight, parts
from duoka.runtime.dispatch.dispatch import stream
from duoka.runtime.dispatch.install_movers import install_on
from duoka.runtime.dispatch.place_tensors import fill, on_host, tensor_names, with_host_experts
from duoka.virtual import VirtualTensor

_LruCache = type(cache(len))

_MOST_DEPTH = 6
"""Maximum depth to which nested containers are followed."""
_DEPTH_IN_LIBRARIES = 1
"""The same for library code, whose registries are deep and hold no tensors of a model."""
_MOST_ITEMS = 10_000
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
"""Containers that are copied and restored; other classes may have side effects."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype)
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Enum)


# ── a model's tensors and attributes ──


@contextmanager
def on_virtual_gpus(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    device_by_module: Mapping[nn.Module, torch.device],
    offloaded: Sequence[str] = (),
) -> Iterator[ModelSnapshot]:
    """Move a model to virtual GPUs inside the scope, with movers and streamed offloaded weights."""
    snapshot = ModelSnapshot(model)
    hosts = on_host(model, devices, offloaded)
    try:
        placed = with_host_experts(model, devices)
        snapshot.move({name: device for name, device in placed if name not in hosts})
        installed = install_on(model, device_by_module)
        streamers = stream(model, offloaded, devices)
        try:
            yield snapshot
        finally:
            for streamer in streamers:
                streamer.remove()
            installed.remove(model)
    finally:
        snapshot.restore()


class ModelSnapshot:
    """Saved tensors and attributes of a model, to restore after a run."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(tensor_names(model))
        # Attributes of modules are restored in any case, which removes hooks that were added.
        tables = [vars(module) for module in model.modules()]
        attributes = [value for table in tables for value in table.values()]
        self._attributes = [
            (container, container.copy())
            for container in (*tables, *attributes)
            if type(container) in _CONTAINERS
        ]
        self._containers = ContainerSnapshot()
        for value in attributes:
            for item in _items(value) if type(value) in _CONTAINERS else (value,):
                self._containers.add(item)
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (table, key, tensor)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]

    def move(self, devices: Mapping[str, torch.device]) -> None:
        """Move every parameter and buffer to its device."""
        moved_by_id: dict[int, Tensor] = {}
        for name, device in devices.items():
            tensor = self._tensors[name]
            if id(tensor) not in moved_by_id and tensor.device != device:
                moved_by_id[id(tensor)] = self._move_tensor(tensor, device)
        for table, key, tensor in self._slots:
            if id(tensor) in moved_by_id:
                table[key] = moved_by_id[id(tensor)]

    def _move_tensor(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor on a device: for a parameter the same object, if possible."""
        with torch.no_grad():
            data = _data_on(tensor, device)
        if not isinstance(tensor, nn.Parameter):
            return data
        parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
        if type(tensor) is not nn.Parameter:
            return parameter
        # The model's own parameter object takes the virtual contents, since closures and ties refer
        # to it. That fails if a weak reference or an autograd graph refers to the parameter.
        try:
            torch.utils.swap_tensors(tensor, parameter)
        except RuntimeError:
            return parameter
        self._swapped.append((tensor, parameter))
        return tensor

    def restore(self) -> None:
        """Restore the parameters' contents, and attributes and containers of the modules."""
        self._containers.restore()
        for container, content in self._attributes:
            _refill(container, content)
        for tensor, _ in self._swapped:
            tensor.grad = None
        self._swap_back()
        if self._swapped:
            gc.collect()  # garbage of the run still refers to a parameter
            self._swap_back()
        for tensor, parameter in self._swapped:
            # A graph of the run still refers to `tensor`; `parameter` has the original contents.
            for table, key, original in self._slots:
                if original is tensor:
                    table[key] = parameter

    def _swap_back(self) -> None:
        """Swap original contents back; keep the pairs still referred to by a graph."""
        remaining = []
        for pair in self._swapped:
            try:
                torch.utils.swap_tensors(*pair)
            except RuntimeError:
                remaining.append(pair)
        self._swapped = remaining

    @property
    def num_replaced(self) -> int:
        """Return the number of parameters that `restore` had to replace by new objects."""
        return len(self._swapped)


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the contents of a tensor on a device; filled if the tensor is on meta."""
    if is_composed(tensor) and tensor.is_meta:
        empty = empty_weight(tensor, device)
        for part in parts(empty).values():
            _fill(part)
        return empty
    if is_composed(tensor):
        return move_weight(tensor.detach(), device)
    if not tensor.is_meta:
        # Of a subclass only the plain contents are moved, without its own behavior.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(torch.Tensor).to(device)
    return _fill(torch.empty_like(tensor, device=device))


def _fill(data: Tensor) -> Tensor:
    """Fill an uninitialized tensor if numbers are computed, since a NaN in it would spread."""
    return data if isinstance(data, VirtualTensor) and data.gpu.meta else fill(data)


# ── containers ──


# A shallow copy of each reachable container is kept. Afterwards only containers that hold a virtual
# tensor are restored; other changes by the model's code stay. A plain object counts as the dict of
# its attributes. A tuple can't be restored in place, so the container around it is restored.
class ContainerSnapshot:
    """Containers reachable from some values, with their contents."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._seen: set[int] = set()

    def add(self, value: Any, depth: int = _MOST_DEPTH) -> None:
        """Add the containers reachable from a value."""
        for item in _reachable(value, depth - 1, self._seen):
            container = _container(item)
            if container is not None and len(container) <= _MOST_ITEMS:
                self._copies.setdefault(id(container), (container, container.copy()))

    def restore(self) -> None:
        """Restore every container that holds a virtual tensor now."""
        for container, copy in self._copies.values():
            if any(_is_virtual(item) for item in _items(container)):
                _refill(container, copy)


def _refill(container: Any, content: Any) -> None:
    """Restore the contents of a list, dict or set in place."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _container(value: Any) -> Any:
    """Return the container to restore: the value, or a plain object's attributes; else None."""
    if type(value) in _CONTAINERS:
        return value
    if isinstance(value, (*_NO_HOLDERS, dict, list, set)):
        return None
    return getattr(value, "__dict__", None)


def _items(value: Any) -> list[Any]:
    """Return the values of a dict, or the items of a list, tuple or set; empty for others."""
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


def _is_virtual(value: Any) -> bool:
    """Return True for a virtual tensor, or a tuple with one (tuples cannot be restored)."""
    if isinstance(value, (tuple, frozenset)):
        return any(_is_virtual(item) for item in value)
    return isinstance(value, VirtualTensor)


def _reachable(value: Any, depth: int, visited: set[int]) -> Iterator[Any]:
    """Yield a value and its nested contents down to a depth, without those of modules."""
    yield value
    if isinstance(value, _PLAIN) or depth <= 0 or id(value) in visited:
        return
    visited.add(id(value))
    container = _container(value)
    items = _items(value if container is None else container)
    if len(items) <= _MOST_ITEMS:
        for item in items:
            yield from _reachable(item, depth - 1, visited)


# ── globals and class attributes ──


@contextmanager
def restore_globals(model: nn.Module) -> Iterator[None]:
    """Restore module-level state of a model's code after the scope.

    A table that is cached in a global on first use would stay on a virtual GPU. So the globals and
    class attributes of the model's own files are restored, and their caches cleared.
    """
    classes = _own_classes(model)
    saved: list[tuple[Any, int, dict[str, Any]]] = [
        (namespace, _depth(namespace), dict(vars(namespace)))
        for namespace in (*_own_modules(classes), *classes)
    ]
    containers = ContainerSnapshot()
    for _, depth, attributes in saved:
        for value in attributes.values():
            containers.add(value, depth)
    try:
        yield
    finally:
        containers.restore()
        for namespace, depth, attributes in saved:
            for name, value in list(vars(namespace).items()):
                function = getattr(value, "__func__", value)  # a static method's function
                if isinstance(function, _LruCache):
                    function.cache_clear()
                # Other changes than virtual tensors are made by the code on purpose.
                if any(map(_is_virtual, _reachable(value, depth, set()))):
                    _restore_name(namespace, name, value, attributes)


def _restore_name(namespace: Any, name: str, value: Any, saved: dict[str, Any]) -> None:
    """Restore a global or class attribute to its saved value, or delete a new attribute."""
    if name not in saved:
        delattr(namespace, name)
    elif saved[name] is not value:
        setattr(namespace, name, saved[name])


def _depth(namespace: Any) -> int:
    """Return the depth to which containers of a module or class are followed."""
    module = sys.modules.get(getattr(namespace, "__module__", namespace.__name__))
    is_library = is_installed(getattr(module, "__file__", None))
    return _DEPTH_IN_LIBRARIES if is_library else _MOST_DEPTH


def _own_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules except PyTorch's."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    foreign = ("torch.", "builtins", "abc", "typing")
    return [cls for cls in classes if not cls.__module__.startswith(foreign)]


def _own_modules(classes: list[type]) -> list[ModuleType]:
    """Return the modules of classes, and the modules outside of packages they import from."""
    names = {cls.__module__ for cls in classes}
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    for module in list(modules.values()):
        for value in list(vars(module).values()):
            # Attributes of other objects are not read, since that may run code.
            is_defined = isinstance(value, (FunctionType, type))
            home = sys.modules.get(value.__module__) if is_defined else value
            if isinstance(home, ModuleType) and not is_installed(vars(home).get("__file__")):
                modules[home.__name__] = home
    return list(modules.values())
