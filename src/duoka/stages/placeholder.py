"""Placeholders: tensors of another stage, of which a process knows shape, type and device.

Results computed from a placeholder are placeholders: code around the blocks of other stages runs as
if they were here, and computes nothing. Parameters of other stages, which are on the meta device,
count as placeholders. A placeholder reports the process's own device, so that tensors that code
makes there like it (masks, positions) are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from duoka.errors import ModelError
from duoka.runtime.dispatch.arguments import tensors_in


class Placeholder(Tensor):
    """A tensor of another stage; `shape_only` is on the meta device."""

    shape_only: Tensor

    # Everything happens below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shape_only: Tensor, device: torch.device) -> Placeholder:
        """Make a placeholder on a device."""
        wrapped: Placeholder = Tensor._make_wrapper_subclass(
            Placeholder,
            shape_only.shape,
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            device=device,
        )
        wrapped.shape_only = shape_only
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _without_values(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Refuse: the values are unknown here."""
        raise _unknown("tolist")


class AroundBlocks(TorchDispatchMode):
    """The mode of code around blocks: tensors on meta count as placeholders."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_elsewhere, tensors_in([args, kwargs]))):
            return _without_values(func, args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode for a block, whose operations shouldn't pay its overhead."""
        mode: Any = self
        mode.__exit__(None, None, None)
        try:
            yield
        finally:
            mode.__enter__()


def is_elsewhere(value: object) -> bool:
    """Return True for a tensor whose values another process has."""
    return isinstance(value, Tensor) and (isinstance(value, Placeholder) or value.is_meta)


# Operations with an operand of another stage:
#
#     read values (`.item()`, `nonzero`)        refused
#     change a shape in place (`unsqueeze_`)    refused
#     write to a real tensor                    refused: its values would no longer be known
#     write to a placeholder                    return it
#     others                                    return a new placeholder
def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device."""
    operands = tree_flatten((args, kwargs))[0]
    devices = (value.device for value in operands if isinstance(value, Placeholder))
    device = torch.device(kwargs.get("device") or next(devices, "meta"))
    if func is torch.ops.aten._local_scalar_dense.default or torch.Tag.inplace_view in func.tags:
        raise _unknown(str(func))
    try:
        result = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
    except NotImplementedError as error:  # its result depends on values
        raise _unknown(str(func)) from error
    if not func._schema.is_mutable:
        return tree_map(partial(_wrapped, device), result)
    written = kwargs.get("out", args[0])
    if not isinstance(written, Placeholder):  # its values would no longer be known
        raise _unknown(str(func))
    return written


def _bare(value: Any) -> Any:
    """Return an operand on the meta device."""
    if isinstance(value, Placeholder):
        return value.shape_only
    if isinstance(value, torch.device):
        return torch.device("meta")
    # A number mixes with every device.
    if isinstance(value, Tensor) and not value.is_meta and value.dim() > 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _wrapped(device: torch.device, value: Any) -> Any:
    is_bare = isinstance(value, Tensor) and not isinstance(value, Placeholder)
    return Placeholder.of(value, device) if is_bare else value


def _unknown(what: str) -> ModelError:
    return unstageable(
        f"the model's code between its blocks reads values of another stage ({what})"
    )


def unstageable(problem: str) -> ModelError:
    """Return the error for a model that can't run in stages."""
    return ModelError(problem, hint="this model doesn't support pipeline stages; use one GPU")
