"""A model, for a while on virtual GPUs: the same objects, and afterwards as it was.

Copying a model would tear it from what its own code refers to: a closure over the module, a hook
that is another module's method. So the model itself is run. Its parameters stay the very objects
that they are, and take the contents of virtual ones for the time of a check. What the code keeps
elsewhere is put back where it came to hold a virtual tensor, which means nothing after a check:
attributes and containers at any depth, globals, class attributes; caches of functions are emptied.
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
from duoka.runtime.dispatch.place_tensors import fill, on_host, tensor_names
from duoka.virtual import VirtualTensor

_LruCache = type(cache(len))

_MOST_DEPTH = 6
"""How far down containers are followed."""
_DEPTH_IN_LIBRARIES = 1
"""As far in a library's: its registries are deep, and hold no tensors of a model's."""
_MOST_ITEMS = 10_000
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
"""Those that are copied and filled again; others may do more than hold."""
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
    """Put a model on virtual GPUs inside the scope."""
    snapshot = ModelSnapshot(model)
    hosts = on_host(model, devices, offloaded)
    try:
        snapshot.move({name: device for name, device in devices.items() if name not in hosts})
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
    """Contents of a model's parameters, and attributes of all its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(tensor_names(model))
        # What modules hold themselves is put back in any case, with hooks that were added.
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
        """Restore the model."""
        self._containers.restore()
        for container, content in self._attributes:
            _refill(container, content)
        for tensor, _ in self._swapped:
            tensor.grad = None
        self._swap_back()
        if self._swapped:
            gc.collect()  # what the run left behind refers to a parameter
            self._swap_back()
        for tensor, parameter in self._swapped:
            # A graph of the run's lives on: the contents are safe in another object.
            for table, key, original in self._slots:
                if original is tensor:
                    table[key] = parameter

    def _swap_back(self) -> None:
        remaining = []
        for pair in self._swapped:
            try:
                torch.utils.swap_tensors(*pair)
            except RuntimeError:
                remaining.append(pair)
        self._swapped = remaining

    @property
    def num_replaced(self) -> int:
        """Return the number of parameters that were replaced by other objects."""
        return len(self._swapped)


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    if is_composed(tensor) and tensor.is_meta:
        empty = empty_weight(tensor, device)
        for part in parts(empty).values():
            _fill(part)
        return empty
    if is_composed(tensor):
        return move_weight(tensor.detach(), device)
    if not tensor.is_meta:
        # Of a subclass the contents are taken: what it does by itself isn't for this.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(torch.Tensor).to(device)
    return _fill(torch.empty_like(tensor, device=device))


def _fill(data: Tensor) -> Tensor:
    """Fill uninitialized tensors, whose NaN would spread, if numbers are computed."""
    if isinstance(data, VirtualTensor) and data.gpu.meta:
        return data
    return fill(data)


# ── containers ──


# A copy of each container that can be reached is kept, not of what it holds. Afterwards only those
# that hold a virtual tensor are filled again: what else the model's code has put into them is its
# own business. A plain object counts as the dict of its attributes; a tuple can't be filled again,
# so that the container around it is.
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
    """Return the restorable container: the value, or the attributes of a plain object."""
    if type(value) in _CONTAINERS:
        return value
    if isinstance(value, (*_NO_HOLDERS, dict, list, set)):
        return None
    return getattr(value, "__dict__", None)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


def _is_virtual(value: Any) -> bool:
    """Return True for a virtual tensor, or a tuple with one (tuples cannot be restored)."""
    if isinstance(value, (tuple, frozenset)):
        return any(_is_virtual(item) for item in value)
    return isinstance(value, VirtualTensor)


def _reachable(value: Any, depth: int, visited: set[int]) -> Iterator[Any]:
    """Yield a value and its contents to a limited depth, except modules."""
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
                function = getattr(value, "__func__", value)  # of a static method
                if isinstance(function, _LruCache):
                    function.cache_clear()
                # Only what holds a virtual tensor: other changes are the code's own.
                if any(map(_is_virtual, _reachable(value, depth, set()))):
                    _restore_name(namespace, name, value, attributes)


def _restore_name(namespace: Any, name: str, value: Any, saved: dict[str, Any]) -> None:
    if name not in saved:
        delattr(namespace, name)
    elif saved[name] is not value:
        setattr(namespace, name, saved[name])


def _depth(namespace: Any) -> int:
    module = sys.modules.get(getattr(namespace, "__module__", namespace.__name__))
    is_library = is_installed(getattr(module, "__file__", None))
    return _DEPTH_IN_LIBRARIES if is_library else _MOST_DEPTH


def _own_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules except PyTorch's."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    foreign = ("torch.", "builtins", "abc", "typing")
    return [cls for cls in classes if not cls.__module__.startswith(foreign)]


def _own_modules(classes: list[type]) -> list[ModuleType]:
    """Return the modules of some classes, and those outside of packages that they import from."""
    names = {cls.__module__ for cls in classes}
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    for module in list(modules.values()):
        for value in list(vars(module).values()):
            # Of other objects no attribute is asked for, which may run code.
            is_defined = isinstance(value, (FunctionType, type))
            home = sys.modules.get(value.__module__) if is_defined else value
            if isinstance(home, ModuleType) and not is_installed(vars(home).get("__file__")):
                modules[home.__name__] = home
    return list(modules.values())
