"""Placeholders: tensors of another stage, of which a process knows shape, dtype and device.

Results computed from a placeholder are placeholders: code around the blocks of other stages runs,
but only infers shapes. Parameters of other stages, which are on the meta device, count as
placeholders. A placeholder reports this process's device, so that masks and positions that model
code makes on the placeholder's device are real tensors.
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
    """A stand-in for a tensor of another stage; `shape_only` is its shape on the meta device."""

    shape_only: Tensor

    # Everything happens below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shape_only: Tensor, device: torch.device) -> Placeholder:
        """Make a placeholder with the geometry of a meta tensor, which reports a device."""
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
        return _run_on_meta(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Refuse: the values are unknown here."""
        raise _unknown_values("tolist")


class AroundBlocks(TorchDispatchMode):
    """The dispatch mode for code around blocks, in which meta tensors count as placeholders."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_elsewhere, tensors_in([args, kwargs]))):
            return _run_on_meta(func, args, kwargs)
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
    """Return True for a placeholder or meta tensor: its values are in another process."""
    return isinstance(value, Tensor) and (isinstance(value, Placeholder) or value.is_meta)


# Operations with an operand of another stage:
#
#     read values (`.item()`, `nonzero`)        refused
#     change a shape in place (`unsqueeze_`)    refused
#     write to a real tensor                    refused: its values would become unknown
#     write to a placeholder                    return it
#     others                                    return a new placeholder
def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device; wrap its results as placeholders."""
    operands = tree_flatten((args, kwargs))[0]
    devices = (value.device for value in operands if isinstance(value, Placeholder))
    device = torch.device(kwargs.get("device") or next(devices, "meta"))
    if func is torch.ops.aten._local_scalar_dense.default or torch.Tag.inplace_view in func.tags:
        raise _unknown_values(str(func))
    try:
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    except NotImplementedError as error:  # the result's shape depends on values
        raise _unknown_values(str(func)) from error
    if not func._schema.is_mutable:
        return tree_map(partial(_wrap, device), result)
    written = kwargs.get("out", args[0])
    if not isinstance(written, Placeholder):  # a real tensor's values would become unknown
        raise _unknown_values(str(func))
    return written


def _to_meta(value: Any) -> Any:
    """Return an operand on the meta device; values that aren't tensors stay."""
    if isinstance(value, Placeholder):
        return value.shape_only
    if isinstance(value, torch.device):
        return torch.device("meta")
    # A single number may mix with every device, and stays.
    if isinstance(value, Tensor) and not value.is_meta and value.dim() > 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _wrap(device: torch.device, value: Any) -> Any:
    """Wrap a plain tensor as a placeholder; return other values as they are."""
    is_bare = isinstance(value, Tensor) and not isinstance(value, Placeholder)
    return Placeholder.of(value, device) if is_bare else value


def _unknown_values(what: str) -> ModelError:
    return unstageable(
        f"the model's code between its blocks reads values of another stage ({what})"
    )


def unstageable(problem: str) -> ModelError:
    """Return the error for a model that can't run in stages."""
    return ModelError(problem, hint="this model doesn't support pipeline stages; use one GPU")
