"""Detect custom autograd functions whose backward returns a gradient on the wrong device.

Autograd refuses such gradients on CUDA but accepts them for tensor subclasses, including virtual
GPUs', so every custom function is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction

# Called with the function's class, the input's index, the gradient, and the expected device.
Misplaced = Callable[[type, int, torch.Tensor, torch.device], None]


@contextmanager
def check_gradients(misplaced: Misplaced) -> Iterator[None]:
    """Call `misplaced` for each gradient on a wrong device inside the scope, and move it."""
    applied = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = applied.__func__(cls, *args, **kwargs)
        for output in result if isinstance(result, tuple) else (result,):
            node = output.grad_fn if isinstance(output, torch.Tensor) else None
            if isinstance(node, BackwardCFunction):
                node.register_hook(_hook(cls, _expected_devices(node), misplaced))
                break  # all outputs have the same node
        return result

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _expected_devices(node: Any) -> list[torch.device | None]:
    """Return the device of each input of a function; None for an input without a gradient."""
    return [
        None if source is None else source._input_metadata[index].device
        for source, index in node.next_functions
    ]


def _hook(cls: type, expected: list[torch.device | None], misplaced: Misplaced) -> Any:
    """Return the autograd hook that reports and moves misplaced gradients."""

    def hook(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        moved_gradients = list(gradients)
        for index, (gradient, device) in enumerate(zip(gradients, expected, strict=True)):
            if gradient is not None and device is not None and gradient.device != device:
                misplaced(cls, index, gradient, device)
                moved_gradients[index] = gradient.to(device)
        return tuple(moved_gradients)

    return hook
