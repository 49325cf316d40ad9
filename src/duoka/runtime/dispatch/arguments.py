"""The rule by which tensors are brought to a block, for dispatch, tracing and the check.

A tensor is brought from any device, from the CPU too (a mask that model code made there), at any
depth of tuples, lists and dictionaries. A `UserDict` is a dictionary as well: in one transformers
hands the keys and values that layers share from block to block.

Three kinds of tensors stay where they are: a single number on the CPU, which mixes with any device;
tensors inside of other objects, as in a cache; and where a module holds several blocks, a cache
with a part for each block: every part lies with the block that made it.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from duoka.models.cache_argument import CACHE_NAMES

from .copies import carry

NO_TENSORS = frozenset({type(None), bool, int, float, str})


def must_move(tensor: Tensor, device: torch.device) -> bool:
    """Return True if a tensor must be brought to a device; a number on the CPU mixes with any."""
    return tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu")


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor to the device, as movers do."""
    return carry(tensor, device) if must_move(tensor, device) else tensor


def mapped(
    value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value with every tensor in it changed; the very same object where none was.

    `other` changes values that are neither tensors nor containers.
    """
    if type(value) in NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data, sizes, *indices = value  # the batch sizes stay on the CPU
        changed, *indices = mapped((data, *indices), change)
        return value if changed is data else PackedSequence(changed, sizes, *indices)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, other) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (dict, UserDict)):
        return _with_entries(value, {key: mapped(it, change, other) for key, it in value.items()})
    return value if other is None else other(value)


def _with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    if all(entries[key] is item for key, item in value.items()):
        return value
    # A shallow copy keeps the class and its attributes: transformers' outputs are dicts.
    result = copy.copy(value)
    if isinstance(value, UserDict):
        result.data, entries = _Entries(entries), {}
        result.data.shared = value
    for key, item in entries.items():
        result[key] = item
    return result


class _Entries(dict[Any, Any]):
    """Entries of a shared dictionary on a block's device; the block's new entries go to both."""

    shared: UserDict[Any, Any]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.shared[key] = value


def mapped_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[Tensor], Tensor],
    caches: Collection[int | str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with every tensor changed, but those of the caches."""

    def of(key: int | str, value: Any) -> Any:
        stays = key in caches and isinstance(value, (tuple, list, dict))
        return value if stays else mapped(value, change)

    # In this order dispatch moves them, on which the addresses of its copies depend.
    changed = {key: of(key, value) for key, value in kwargs.items()}
    return tuple([of(at, value) for at, value in enumerate(args)]), changed


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists and dictionaries, in order."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    # Called for every argument of every operation that is traced: no generators here.
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, tensors)
    elif isinstance(tree, (dict, UserDict)):
        for item in tree.values():
            _collect(item, tensors)


def shared_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[UserDict[Any, Any]]:
    """List the dictionaries among a call's arguments that a block may write to for later blocks."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, UserDict)]


def caches_of(module: nn.Module) -> frozenset[int | str]:
    """Return the arguments of a module, by position and by name, that take a cache."""
    names = list(inspect.signature(module.forward).parameters)
    positions = (at for at, name in enumerate(names) if name in CACHE_NAMES)
    return frozenset([*CACHE_NAMES, *positions])


def caches_in(outputs: Any) -> list[Any]:
    """Return the caches among a model's outputs: by name, or tuples of tuples in older code."""
    if isinstance(outputs, dict):
        return [cache for name, cache in outputs.items() if name in CACHE_NAMES]
    parts = outputs if isinstance(outputs, tuple) else ()
    return [p for p in parts if isinstance(p, tuple) and all(isinstance(x, tuple) for x in p)]


def to_device(value: Any, device: torch.device) -> Any:
    """Return the inputs of a call on a device, as the caller of a model brings them there."""

    def move(tensor: Tensor) -> Tensor:
        return carry(tensor.detach(), device).requires_grad_(tensor.requires_grad)

    def other(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            parts = (part.name for part in fields(value) if part.init)
            return replace(value, **{n: to_device(getattr(value, n), device) for n in parts})
        is_movable = hasattr(value, "to") and not isinstance(value, (type, nn.Module))
        return value.to(device) if is_movable else value

    return mapped(value, move, other)
