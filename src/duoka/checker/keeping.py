"""What code keeps outside of its modules' attributes: globals, class attributes, caches.

A table that is made on first use and kept in a global would be one of a virtual GPU's after a
check. So what the model's own files and classes keep is put back, and their caches are emptied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from .contents import MOST_DEPTH, Contents, holds_virtual
from .source_map import is_installed

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
            _put_back(namespace, noted)
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


def _put_back(namespace: Any, noted: dict[str, Any]) -> None:
    """Put back what holds tensors of virtual GPUs now; the rest is the code's own affair."""
    for name, value in list(vars(namespace).items()):
        if not holds_virtual(value, depth=_depth(namespace)):
            continue
        if name not in noted:
            delattr(namespace, name)
        elif noted[name] is not value:
            setattr(namespace, name, noted[name])
