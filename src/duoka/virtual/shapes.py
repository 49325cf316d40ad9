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


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shape of grouped matrix products; PyTorch's own rule knows only bfloat16.

    left [tokens, in] or [groups, tokens, in]; right [groups, in, out] or [in, out].
    """
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None, "groups of two matrices are given by offsets"
        shape = [offs.shape[0], left.shape[0], right.shape[1]]
    elif right.dim() == 2:
        shape = [*left.shape[1:2], right.shape[1]]
    else:
        shape = [*left.shape[:-1], right.shape[-1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


_RULES: dict[Any, Any] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


class _Uncountable(Exception):
    """A call that can't be told apart from others by its shapes."""


def infer(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator on meta tensors, or make what the same call made before."""
    if func in _direct:
        return func(*args, **kwargs)
    func = _RULES.get(func, func)
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
