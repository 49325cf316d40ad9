"""What containers hold, taken down and put back: attributes, lists, dicts, at any depth.

Model code keeps tensors of its run in many places. Those of a virtual GPU mean nothing after a
check, so what came to hold one is made to hold what it held.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from duoka.virtual import VirtualTensor

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
