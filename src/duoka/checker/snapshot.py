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

from duoka.models.quantization import empty_weight, is_composed, moved, parts
from duoka.runtime.dispatch.dispatch import stream
from duoka.runtime.dispatch.install import install_on
from duoka.runtime.dispatch.place import on_host, tensor_names
from duoka.virtual import VirtualTensor

from .source_map import is_installed

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


_OF_LIBRARIES = 1
_LruCache = type(cache(len))


@contextmanager
def kept_as_before(model: nn.Module) -> Iterator[None]:
    """Put back what the code of a model keeps when the scope ends."""
    namespaces: list[Any] = [*_own_modules(model), *_own_classes(model)]
    before = [(each, dict(vars(each))) for each in namespaces]
    contents = Contents()
    for namespace, noted in before:
        for value in noted.values():
            contents.note(value, depth=_depth(namespace))
    try:
        yield
    finally:
        contents.put_back()
        for namespace, noted in before:
            _put_namespace_back(namespace, noted)
        for namespace in namespaces:
            for value in list(vars(namespace).values()):
                function = getattr(value, "__func__", value)  # of a static method
                if isinstance(function, _LruCache):
                    function.cache_clear()


def _depth(namespace: Any) -> int:
    """How far to follow: a library's registries are deep, and hold no tensors of a model's."""
    module = sys.modules.get(getattr(namespace, "__module__", namespace.__name__))
    return _OF_LIBRARIES if is_installed(getattr(module, "__file__", None)) else MOST_DEPTH


def _own_classes(model: nn.Module) -> Iterator[type]:
    """The classes of a model's modules, but for PyTorch's."""
    found: dict[type, None] = {}
    for module in model.modules():
        found.update(dict.fromkeys(type(module).__mro__))
    for cls in found:
        if not cls.__module__.startswith(("torch.", "builtins", "abc", "typing")):
            yield cls


def _own_modules(model: nn.Module) -> Iterator[ModuleType]:
    """The files of these classes, and the files of the same people that they import."""
    names = {cls.__module__ for cls in _own_classes(model)}
    found = {name: sys.modules[name] for name in names if name in sys.modules}
    for module in list(found.values()):
        for value in list(vars(module).values()):
            other = _home(value)
            if other is not None and not is_installed(vars(other).get("__file__")):
                found[other.__name__] = other
    yield from found.values()


def _home(value: Any) -> ModuleType | None:
    """The module that a global is, or was defined in; nothing else is asked, for it may answer."""
    if isinstance(value, ModuleType):
        return value
    if isinstance(value, (FunctionType, type)):
        return sys.modules.get(value.__module__)
    return None


def _put_namespace_back(namespace: Any, noted: dict[str, Any]) -> None:
    """Put back what holds tensors of virtual GPUs now; the rest is the code's own affair."""
    for name, value in list(vars(namespace).items()):
        if not holds_virtual(value, depth=_depth(namespace)):
            continue
        if name not in noted:
            delattr(namespace, name)
        elif noted[name] is not value:
            setattr(namespace, name, noted[name])


MOST_DEPTH = 6
"""How far down containers are followed."""

CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
"""Those that are copied and filled again; others may do more than hold."""

_MOST_ITEMS = 10_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype)
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Enum)


class Contents:
    """The containers that can be reached from some values, with what they hold now."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def note(self, value: Any, *, depth: int = MOST_DEPTH) -> None:
        """Take down what a value holds, and what that holds; modules have an order of their own."""
        self._note(value, MOST_DEPTH - depth)

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or depth >= MOST_DEPTH:
            return
        container = _container(value)
        if container is not None:
            if id(container) in self._known or len(container) > _MOST_ITEMS:
                return
            self._known[id(container)] = (container, container.copy())
        for item in _items(value if container is None else container):
            self._note(item, depth + 1)

    def put_back(self) -> None:
        """Let every container that holds a virtual tensor now hold what it held."""
        for container, copy in self._known.values():
            if any(_is_virtual(item) for item in _items(container)):
                refill(container, copy)


def refill(container: Any, content: Any) -> None:
    """Let a list, dict or set hold what it held; it stays the same object."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _container(value: Any) -> Any:
    """What can be put back: the value itself, or the attributes of a plain object."""
    if type(value) in CONTAINERS:
        return value
    if isinstance(value, (*_NO_HOLDERS, dict, list, set)):
        return None
    return getattr(value, "__dict__", None)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(dict.values(value))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)


def _is_virtual(value: Any) -> bool:
    """A virtual tensor, or a tuple with one: tuples can't be put back themselves."""
    if isinstance(value, (tuple, frozenset)):
        return any(_is_virtual(item) for item in value)
    return isinstance(value, VirtualTensor)


def holds_virtual(value: Any, *, depth: int = MOST_DEPTH) -> bool:
    """Whether a value is a virtual tensor, or a container that leads to one."""
    return _leads_to_virtual(value, depth, set())


def _leads_to_virtual(value: Any, depth: int, seen: set[int]) -> bool:
    if _is_virtual(value):
        return True
    if isinstance(value, _PLAIN) or depth == 0 or id(value) in seen:
        return False
    seen.add(id(value))
    container = _container(value)
    held = value if container is None else container
    if isinstance(held, (dict, list, set)) and len(held) > _MOST_ITEMS:
        return False
    return any(_leads_to_virtual(item, depth - 1, seen) for item in _items(held))
