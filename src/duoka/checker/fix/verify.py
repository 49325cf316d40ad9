"""The proof of a repair: on several devices it computes what the original computes on one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duoka.base.units import format_bytes, format_count
from duoka.report.check_report import Report

from .. import Numbers, Subject, check_subject, compute, is_computable
from .twins import twin_of

Patched = Callable[[nn.Module], AbstractContextManager[None]]
"""Gives a scope in which a model runs the patched code."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a repair is proved.

    Parameters
    ----------
    holds : bool
    reason : str
        Why not; or on what, where that isn't the model itself.
    """

    holds: bool
    reason: str = ""


def prove(report: Report, subject: Subject, patched: Patched) -> Proof:
    """Hold patched code on several devices against the original on one."""
    if is_computable(subject):
        return _result(why_not_equal(subject, patched))
    twin = twin_of(subject)
    if twin is None:
        weights = sum(each.numel() * each.element_size() for each in subject.model.parameters())
        return Proof(
            False,
            f"checked again it is clean, but {format_bytes(weights)} of weights are too much to "
            "compute with real numbers here",
        )
    told = f"on a twin with {format_count(twin.num_layers, 'layer')} of the same code"
    missing = _places(report) - _places(check_subject(twin.subject))
    if missing:
        return Proof(False, f"{told} there is no fault at line {min(missing)[1]}")
    with patched(twin.subject.model):
        again = check_subject(twin.subject)
    if again.faults or again.stop is not None:
        return Proof(False, f"{told} the patched code isn't clean")
    difference = why_not_equal(twin.subject, patched)
    return Proof(not difference, f"{told}: {difference}" if difference else told)


def _result(reason: str) -> Proof:
    return Proof(not reason, reason)


def _places(report: Report) -> set[tuple[str, int, str]]:
    return {(fault.file, fault.line, fault.op) for fault in report.faults}


def why_not_equal(subject: Subject, patched: Patched) -> str:
    """Say how patched code on several devices isn't the original on one; "" where it is."""
    original = compute(subject, on_one=True)
    if original.stop is not None:
        return f"the original doesn't run on one device with real numbers: {original.stop.message}"
    with patched(subject.model):
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
