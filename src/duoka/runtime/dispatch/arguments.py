"""Which tensors of a call are brought to a block: one rule for dispatch, tracing and the check.

A tensor is brought from wherever it is, from the CPU too (a mask that model code made there), at
any depth of tuples, lists and dictionaries. What stays: a single number on the CPU, which mixes
with any device; what an object keeps to itself, as a cache does; and where a module holds several
blocks, a cache that has a part for each: every part lies with the block that made it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from duoka.models.kv_cache import CACHE_NAMES

NO_TENSORS = frozenset({type(None), bool, int, float, str})


def is_brought(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor that comes to a device is brought there."""
    return tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu")


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor in it changed; the very same object where none was."""
    if type(value) in NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        packed: Any = value
        changed = change(packed.data)
        # its batch sizes stay on the CPU
        return packed if changed is packed.data else packed.to(changed.device)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        entries = {key: mapped(item, change) for key, item in value.items()}
        if all(entries[key] is item for key, item in value.items()):
            return value
        # A shallow copy keeps the class and its attributes: transformers' outputs are dicts.
        result = copy.copy(value)
        for key, item in entries.items():
            result[key] = item
        return result
    return value


def brought(value: Any, device: torch.device) -> Any:
    """The value with every tensor in it that a mover would bring to a device."""
    return mapped(value, lambda tensor: tensor.to(device) if is_brought(tensor, device) else tensor)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    # Asked for every argument of every operation that is traced: no generators here.
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, tensors)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, tensors)


def caches_of(module: nn.Module) -> frozenset[int | str]:
    """The arguments of a module, by position and by name, that take a cache."""
    names = list(inspect.signature(module.forward).parameters)
    positions = (at for at, name in enumerate(names) if name in CACHE_NAMES)
    return frozenset([*CACHE_NAMES, *positions])


def caches_in(outputs: Any) -> list[Any]:
    """Of what a model returns by name the caches, which stay where they are."""
    if not isinstance(outputs, dict):
        return []
    return [outputs[name] for name in CACHE_NAMES if name in outputs]


def stays(key: int | str, value: Any, caches: Iterable[int | str]) -> bool:
    """Whether an argument is a cache with parts, of several blocks."""
    return key in caches and isinstance(value, (tuple, list, dict))


def to_device(value: Any, device: torch.device) -> Any:
    """The inputs of a call on a device, as whoever calls a model brings them there."""
    if is_dataclass(value) and not isinstance(value, (type, MutableMapping)):
        parts = {part.name: to_device(getattr(value, part.name), device) for part in fields(value)}
        return replace(
            value, **{part.name: parts[part.name] for part in fields(value) if part.init}
        )
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)
        for key, item in value.items():
            moved[key] = to_device(item, device)
        return moved
    if isinstance(value, Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if callable(move := getattr(value, "to", None)) and not isinstance(value, (type, nn.Module)):
        return move(device)
    return value
