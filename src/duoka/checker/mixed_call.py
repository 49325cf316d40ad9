"""A call with tensors on several devices: operands, written tensors, fault."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

from duoka.base.model_code import is_model_code
from duoka.report.check_report import Fault
from duoka.runtime.dispatch.arguments import mapped, must_move
from duoka.virtual import MixedDevicesError, VirtualTensor

from .report_names import ReportNames
from .source_map import model_frame

CAUSE = "_duoka_cause"
"""Tensor attribute: the record of the fault that determined the tensor's device."""

Path = tuple[int | str, ...]
"""Path to a tensor in a call: argument position or keyword, then indices in nested lists."""

# Positional and keyword arguments of a call.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MOST_OPERANDS = 8
_METHOD = "torch.Tensor."
_SAME_DEVICE = "same device"
_DEVICE = re.compile(r"\b(?:vgpu|privateuseone):\d+\b|\bcpu\b")


class MixedCall:
    """A call with tensors on several devices, and the device to which they are moved."""

    target: torch.device
    moving_ids: frozenset[int] = frozenset()
    """The tensors that move to the target, by identity."""

    def __init__(
        self, error: Exception, func: Any, args: Args, kwargs: Kwargs, frame: FrameType
    ) -> None:
        # The frames of its traceback refer to this object, and this object to the error: a cycle,
        # which would keep the tensors alive until the next garbage collection.
        self.error = error.with_traceback(None)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.frame = frame
        # PyTorch's own errors, before any ATen operation, are recognized by their text.
        self.is_mix = _SAME_DEVICE in str(error) or len(set(_DEVICE.findall(str(error)))) > 1
        self.kernel = ""
        self.tensors = list(tensors_of(args, kwargs))
        self.written: torch.Tensor | None = None
        self.for_cpu: torch.Tensor | None = None
        if isinstance(error, MixedDevicesError):
            self.is_mix = True
            self.for_cpu = error.for_cpu
            self.written = self._visible(error.written)
            self.kernel = error.func._schema.name.removeprefix("aten::")
        full = op_name(func)
        self.is_method = full.startswith(_METHOD)
        self.op = full.removeprefix("torch.") if self.is_method else full

    def _visible(self, written: torch.Tensor | None) -> torch.Tensor | None:
        """Return the caller's tensor with the storage of the written one; None if there is none."""
        if not isinstance(written, VirtualTensor):
            return written
        for _, tensor in self.tensors:
            if isinstance(tensor, VirtualTensor) and tensor.storage_id == written.storage_id:
                return tensor
        return None

    @cached_property
    def caller(self) -> FrameType | None:
        """Innermost frame of model code around the call; None if there is none."""
        return model_frame(self.frame)

    @property
    def is_direct(self) -> bool:
        """Return True if model code calls the function itself, not through a PyTorch module."""
        # Functions written in Python call `handle_torch_function`: both frames are skipped.
        inner: FrameType | None = self.frame
        if inner is not None and inner.f_code.co_name == "handle_torch_function":
            inner = inner.f_back and inner.f_back.f_back
        return inner is not None and is_model_code(inner.f_code)

    def move_to(self, target: torch.device, *, is_forced: bool = False) -> None:
        """Set the target and select the tensors to move there.

        A CPU-only argument is the only one selected, unless `is_forced`.
        """
        self.target = target
        moving = {id(tensor) for _, tensor in self.tensors if must_move(tensor, target)}
        if self.for_cpu is not None and not is_forced:
            moving &= {id(self.for_cpu)}
        self.moving_ids = frozenset(moving)

    def moved_arguments(self) -> tuple[Args, Kwargs]:
        """Return the arguments with the moving tensors on the target."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.target) if id(tensor) in self.moving_ids else tensor

        args, kwargs = mapped((self.args, self.kwargs), move)
        return args, kwargs

    def sampled_tensors(self) -> list[tuple[Path, torch.Tensor]]:
        """Return the tensors to report; of many the first moving and the first staying tensors."""
        if len(self.tensors) <= _MOST_OPERANDS:
            return self.tensors
        half = _MOST_OPERANDS // 2
        go = [path for path, tensor in self.tensors if id(tensor) in self.moving_ids]
        stay = [path for path, tensor in self.tensors if id(tensor) not in self.moving_ids]
        paths = {*go[:half], *stay[:half]}
        return [(path, tensor) for path, tensor in self.tensors if path in paths]

    # Root-cause attribution. After a fault the check moves tensors to a target device, continues,
    # and marks the result with the fault (`CAUSE`). A later operation that mixes devices is a
    # follow-up if the result, on another device of that fault, would not have caused it. Let m be
    # the result of a fault between cuda:0 and cuda:1 that was settled on cuda:1:
    #
    #   case                       this operation                              example
    #   1 m moves to the target    target cuda:0, a device of that fault       a(x) + m
    #   2 m stays, and draws the   target cuda:1, running module on cuda:0,    m * self.scale
    #     operation away           other operand on cuda:0
    #   3 m is written to          target cuda:1 (a write stays in place),     m.add_(a(x))
    #                              other operand on cuda:0
    #
    # Worked example with `a` on cuda:0 and `b` on cuda:1:
    #
    #   near = a(x)
    #   m = near + b(near)   mixes: b was entered last, so `near` moves, and m is on cuda:1
    #   out = a(x) + m       mixes: a was entered last, so m moves to cuda:0 (case 1). A fix of the
    #                        line above that yields cuda:0 removes both faults.
    #
    # No follow-up: `h = b(x) + scale`, then `h * shift`, with scale and shift on cuda:0, outside of
    # all placed modules. h stays on cuda:1, where b made it, and `shift` needs a fix of its own.
    def earlier_cause(self, names: ReportNames, running: torch.device | None) -> FaultRecord | None:
        """Return the earlier fault from which the new fault follows; None if there is none.

        `running` is the device of the innermost running module that the placement names.
        """
        devices = {names.device(tensor.device) for _, tensor in self.tensors}
        target, home = names.device(self.target), running and names.device(running)
        for _, tensor in self.tensors:
            cause: FaultRecord | None = vars(tensor).get(CAUSE)
            if cause is None:
                continue
            fault_devices = set(cause.first.devices)
            is_moving = id(tensor) in self.moving_ids
            if (
                (is_moving and target in fault_devices)
                or (not is_moving and target != home and home in fault_devices & devices)
                or (tensor is self.written and fault_devices & devices - {target})
            ):
                return cause
        return None


def positions_of(func: Any) -> dict[str, int]:
    """Return the position of each parameter of a function by name; empty without a signature."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: index for index, name in enumerate(names)}


def op_name(func: Any) -> str:
    """Return the name by which source code calls a function, such as "torch.add"."""
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)


# One line met in 3 layers in each of 2 steps: count 3 (the most in one step), not 6. `at_hand`
# keeps the names that held a tensor on the target every time: (x, mask), then (x,) leave (x,).
@dataclass(slots=True, eq=False)
class FaultRecord:
    """A fault under construction; the same line in forty layers is one record."""

    first: Fault
    """The fault at its first occurrence."""
    # The earlier fault without which this one would not occur.
    cause: FaultRecord | None = None
    modules: dict[str, None] = field(default_factory=dict)
    # The most occurrences in one step.
    count: int = 0
    # The faults that this fault causes.
    followups: list[FaultRecord] = field(default_factory=list)
    # Local names that held a tensor on the target at every occurrence; None before the first.
    at_hand: tuple[str, ...] | None = None
    _step: int = -1
    _in_step: int = 0

    def count_in(self, step: int, module: str, at_hand: Iterable[str]) -> None:
        """Count an occurrence in a step, and intersect the names at hand."""
        self._in_step = self._in_step + 1 if step == self._step else 1
        self._step, self.count = step, max(self.count, self._in_step)
        self.modules[module] = None
        now = tuple(at_hand)
        previous = now if self.at_hand is None else self.at_hand
        self.at_hand = tuple(name for name in previous if name in now)

    def fault(self) -> Fault:
        """Return the fault of the report, with its modules, count and follow-ups."""
        return replace(
            self.first,
            modules=tuple(self.modules),
            count=self.count,
            followups=tuple(followup.fault() for followup in self.followups),
            at_hand=self.at_hand or (),
        )


def tensors_of(args: Args, kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a call, also in nested lists, with their paths."""
    steps: Iterable[tuple[int | str, Any]] = (*enumerate(args), *kwargs.items())
    for step, value in steps:
        yield from _tensors_below((step,), value)


def _tensors_below(path: Path, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield a tensor, or the tensors of a nested list or tuple, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_below((*path, index), item)


# ── which fault decided a tensor's device ──
#
# The mark spreads with the device: a result inherits the mark of an argument on its own device. It
# ends where a placed module returns the tensor (`PlacedModule.leave`): from there on the placement
# is the reason for the device.


def cause_of_result(args: Any, device: torch.device) -> FaultRecord | None:
    """Return the fault that moved an argument to the device of the result; None if none did."""
    for value in args:
        if isinstance(value, torch.Tensor):
            cause: FaultRecord | None = vars(value).get(CAUSE)
            if cause is not None and value.device == device:
                return cause
        elif isinstance(value, (list, tuple)):
            cause = cause_of_result(value, device)
            if cause is not None:
                return cause
    return None


def mark_cause(result: Any, finding: FaultRecord) -> None:
    """Mark the tensors of a result: a fault determined their device."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, torch.Tensor):
            vars(tensor)[CAUSE] = finding
