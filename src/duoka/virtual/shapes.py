"""Shapes: what an operator returns on meta tensors, worked out once for each combination of shapes.

A model's layers make the same calls again and again, and PyTorch's shape rules are Python code
that takes longer than all the rest of a call. Neither values nor writes come here (a write may
resize what it writes to), and what shares memory with an argument isn't remembered.
"""

from __future__ import annotations

from typing import Any

import torch

_MOST_CALLS = 2**14

_results: dict[Any, Any] = {}
_direct: set[Any] = set()
"""Operators whose results may share an operand's memory (``_unsafe_view``), or are no tensors."""


class _Uncountable(Exception):
    """A call that can't be told apart from others by its shapes."""


def infer(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator on meta tensors, or make what the same call made before."""
    if func in _direct:
        return func(*args, **kwargs)
    try:
        key = (
            func,
            tuple([_picture(value) for value in args]),
            tuple([(name, _picture(value)) for name, value in kwargs.items()]),
        )
    except _Uncountable:
        return func(*args, **kwargs)
    known = _results.get(key)
    if known is not None:
        return _rebuild(known)
    result = func(*args, **kwargs)
    try:
        recipe = _recipe(result, args)
    except _Uncountable:
        _direct.add(func)
        return result
    if len(_results) >= _MOST_CALLS:
        _results.clear()
    _results[key] = recipe
    return result


def _picture(value: Any) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        return value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple([_picture(item) for item in value])
    if kind is int or kind is float or kind is bool:
        # 1, 1.0 and True are one key otherwise.
        return kind, value
    if value is None or kind in _PLAIN:
        return value
    raise _Uncountable


_PLAIN = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def _recipe(result: Any, args: list[Any]) -> Any:
    if type(result) is torch.Tensor:
        storage = result.untyped_storage()._cdata
        if any(_shares(value, storage) for value in args):
            raise _Uncountable
        return result.shape, result.stride(), result.dtype
    if type(result) in (tuple, list):
        return type(result), [_recipe(item, args) for item in result]
    raise _Uncountable


def _shares(value: Any, storage: int) -> bool:
    if type(value) is list or type(value) is tuple:
        return any(_shares(item, storage) for item in value)
    return type(value) is torch.Tensor and value.untyped_storage()._cdata == storage


def _rebuild(recipe: Any) -> Any:
    if len(recipe) == 2:
        kind, items = recipe
        return kind([_rebuild(item) for item in items])
    shape, stride, dtype = recipe
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
