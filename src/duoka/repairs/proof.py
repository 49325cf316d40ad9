"""The proof of a repair: on several devices it computes what the original computes on one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..checker import Numbers, Subject, compute, is_computable
from ..units import format_bytes


def why_not_equal(subject: Subject, patched: Callable[[], AbstractContextManager[None]]) -> str:
    """Say why a repair isn't proved; "" when it is.

    Parameters
    ----------
    subject : Subject
        The model and what it is asked to do, on its placement.
    patched : callable
        Gives a scope in which the model runs the patched code.
    """
    if not is_computable(subject):
        weights = sum(each.numel() * each.element_size() for each in subject.model.parameters())
        return (
            f"checked again it is clean, but {format_bytes(weights)} of weights are too much to "
            "compute with real numbers here"
        )
    original = compute(subject, on_one=True)
    if original.stop is not None:
        return f"the original doesn't run on one device with real numbers: {original.stop.message}"
    with patched():
        repaired = compute(subject)
    if repaired.stop is not None:
        return f"the patched code doesn't run with real numbers: {repaired.stop.message}"
    if repaired.num_faults:
        return "with real numbers the patched code still mixes devices"
    return _difference(original, repaired)


def _difference(original: Numbers, repaired: Numbers) -> str:
    """The first difference between two runs, in words."""
    if not original.tensors:
        return "the model returns no tensor that could be compared"
    missing = original.tensors.keys() ^ repaired.tensors.keys()
    if missing:
        return f"only one of original and patched code gives {min(missing)}"
    for name, tensor in original.tensors.items():
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            return f"{name} is not a number in the original: there is nothing to compare"
        difference = _apart(tensor, repaired.tensors[name])
        if difference:
            return f"{name} isn't the original's: {difference}"
    return ""


def _apart(one: Tensor, other: Tensor) -> str:
    """How two tensors differ beyond rounding; bit by bit they are equal where the kernels are."""
    try:
        torch.testing.assert_close(other, one, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""
