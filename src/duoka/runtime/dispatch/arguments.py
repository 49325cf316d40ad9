"""The rule by which tensors are brought to a block, for dispatch, tracing and the check.

A tensor is brought from any device, from the CPU too (a mask that model code made there), at any
depth of tuples, lists and dictionaries. A `UserDict` counts as a dictionary: transformers uses one
to hand shared keys and values from block to block.

Three kinds of tensors stay where they are: a 0-dim tensor on the CPU, which mixes with any device;
tensors inside of other objects, as in a cache object; and, for a container of blocks, a cache made
of tuples or lists with a part for each block: every part stays on the device of its block.
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
    """Return True if a tensor must be brought to a device; a 0-dim CPU tensor mixes with any."""
    return tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu")


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, by the rule of `must_move`."""
    return carry(tensor, device) if must_move(tensor, device) else tensor


def mapped(
    value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None
) -> Any:
    """Apply `change` to every tensor inside tuples, lists and dictionaries; return the new value.

    If no tensor changes, the very same object is returned. `other` is applied to values that are
    neither tensors nor containers.
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
    """Return a copy of a dictionary with changed entries, or itself if none is changed."""
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
    """A shared dictionary's entries on a block's device; new entries are written to both."""

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
    """Apply `change` to every tensor among a call's arguments, but not inside `caches`."""

    def of(key: int | str, value: Any) -> Any:
        stays = key in caches and isinstance(value, (tuple, list, dict))
        return value if stays else mapped(value, change)

    # Dispatch copies in this order, which decides on the addresses of the copies.
    changed = {key: of(key, value) for key, value in kwargs.items()}
    return tuple([of(at, value) for at, value in enumerate(args)]), changed


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists and dictionaries, in order."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    """Append the tensors in nested containers to a list."""
    # Called for every argument of every traced operation: generators would be slow here, and so
    # is the test of a number for `UserDict`.
    if type(tree) in NO_TENSORS:
        return
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
    """Return the positions and names of a module's arguments that take a cache."""
    names = list(inspect.signature(module.forward).parameters)
    positions = (at for at, name in enumerate(names) if name in CACHE_NAMES)
    return frozenset([*CACHE_NAMES, *positions])


def caches_in(outputs: Any) -> list[Any]:
    """Return the caches among a model's outputs, found by name; in older code, as nested tuples."""
    if isinstance(outputs, dict):
        return [cache for name, cache in outputs.items() if name in CACHE_NAMES]
    parts = outputs if isinstance(outputs, tuple) else ()
    return [p for p in parts if isinstance(p, tuple) and all(isinstance(x, tuple) for x in p)]


def to_device(value: Any, device: torch.device) -> Any:
    """Move a call's inputs to a device, dataclasses and objects with `to` included; keep leaves."""

    def move(tensor: Tensor) -> Tensor:
        return carry(tensor.detach(), device).requires_grad_(tensor.requires_grad)

    def other(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            parts = (part.name for part in fields(value) if part.init)
            return replace(value, **{n: to_device(getattr(value, n), device) for n in parts})
        is_movable = hasattr(value, "to") and not isinstance(value, (type, nn.Module))
        return value.to(device) if is_movable else value

    return mapped(value, move, other)
