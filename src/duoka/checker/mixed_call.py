"""A call with tensors on several devices: operands, written tensors, fault."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

from duoka.base.model_code import is_model_code
from duoka.report.check_report import Fault
from duoka.runtime.dispatch.arguments import mapped
from duoka.virtual import MixedDevicesError, VirtualTensor

CAUSE = "_duoka_cause"
"""The attribute of a tensor that names the fault which decided its device."""

Path = tuple[int | str, ...]
"""A tensor's place in a call: a position or a keyword, then positions in lists."""

_MOST_OPERANDS = 8
_METHOD = "torch.Tensor."
_SAME_DEVICE = "same device"
_DEVICE = re.compile(r"\b(?:vgpu|privateuseone):\d+\b|\bcpu\b")


class MixedCall:
    """A call that mixes devices."""

    def __init__(
        self,
        error: Exception,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> None:
        # Its frames hold this, which holds it: nothing would let go of the tensors.
        self.error = error.with_traceback(None)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.frame = frame
        # What PyTorch itself refuses before it comes to an ATen operation has only a text.
        self.is_mix = _SAME_DEVICE in str(error) or len(set(_DEVICE.findall(str(error)))) > 1
        self.kernel = ""
        self.written: torch.Tensor | None = None
        self.for_cpu: torch.Tensor | None = None
        if isinstance(error, MixedDevicesError):
            self.is_mix = True
            self.for_cpu = error.for_cpu
            self.written = _visible(error.written, args, kwargs)
            self.kernel = error.func._schema.name.removeprefix("aten::")
        full = op_name(func)
        self.is_method = full.startswith(_METHOD)
        self.op = full.removeprefix("torch.") if self.is_method else full


def _visible(
    written: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the written tensors that the caller can see."""
    if isinstance(written, VirtualTensor):
        for _, tensor in tensors_of(args, kwargs):
            if isinstance(tensor, VirtualTensor) and tensor.storage_id == written.storage_id:
                return tensor
        return None
    return written


def positions_of(func: Any) -> dict[str, int]:
    """Return the parameters of an operation in order, if Python knows them."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: at for at, name in enumerate(names)}


def op_name(func: Any) -> str:
    """Return the name by which code calls an operation."""
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)


def is_direct(frame: FrameType) -> bool:
    """Return True if model code calls the function itself, not through a PyTorch module."""
    # Functions in Python pass their arguments on as they are to whoever overrides them.
    inner: FrameType | None = frame
    if inner is not None and inner.f_code.co_name == "handle_torch_function":
        inner = inner.f_back and inner.f_back.f_back
    return inner is not None and is_model_code(inner.f_code)


@dataclass(slots=True, eq=False)
class FaultRecord:
    """A fault under construction; the same line in forty layers is one record."""

    first: Fault
    """It, as it was met first."""
    cause: FaultRecord | None = None
    modules: dict[str, None] = field(default_factory=dict)
    count: int = 0
    followups: list[FaultRecord] = field(default_factory=list)
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
        """Return the frozen fault."""
        return replace(
            self.first,
            modules=tuple(self.modules),
            count=self.count,
            followups=tuple(followup.fault() for followup in self.followups),
            at_hand=self.at_hand or (),
        )


def tensors_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a call with their positions."""
    for index, value in enumerate(args):
        yield from _is_within((index,), value)
    for name, value in kwargs.items():
        yield from _is_within((name,), value)


def _is_within(path: Path, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _is_within((*path, index), item)


def move_operands(value: Any, moving_ids: set[int], target: torch.device) -> Any:
    """Return the arguments with the given tensors moved to the target."""
    return mapped(value, lambda tensor: tensor.to(target) if id(tensor) in moving_ids else tensor)


def sample_operands(
    tensors: list[tuple[Path, torch.Tensor]], moving_ids: set[int]
) -> list[tuple[Path, torch.Tensor]]:
    """Limit many operands of a list: the first moving and the first staying ones."""
    if len(tensors) <= _MOST_OPERANDS:
        return tensors
    half = _MOST_OPERANDS // 2
    go = [pair for pair in tensors if id(pair[1]) in moving_ids][:half]
    stay = [pair for pair in tensors if id(pair[1]) not in moving_ids][:half]
    selected_ids = {id(tensor) for _, tensor in (*go, *stay)}
    return [pair for pair in tensors if id(pair[1]) in selected_ids]


# ── which fault decided a tensor's device ──


def cause_of_result(args: Any, device: torch.device) -> FaultRecord | None:
    """Return the fault that moved an argument to the device of the result."""
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


def earlier_cause(
    tensors: list[tuple[Path, torch.Tensor]],
    moving_ids: set[int],
    target: str,
    written: torch.Tensor | None,
    devices: frozenset[str],
    home: str | None,
) -> FaultRecord | None:
    """Return the earlier fault that causes this one, if any.

    `home` is the device of the placed module whose code is running: tensors that an earlier fault
    took away from there cause a fault when they meet tensors of that module.
    """
    for _, tensor in tensors:
        cause: FaultRecord | None = vars(tensor).get(CAUSE)
        if cause is None:
            continue
        fault_devices = set(cause.first.devices)
        if id(tensor) in moving_ids and target in fault_devices:
            return cause
        if id(tensor) not in moving_ids and target != home and home in fault_devices & devices:
            return cause
        if tensor is written and fault_devices & devices - {target}:
            return cause
    return None


def mark_cause(result: Any, finding: FaultRecord) -> None:
    """Store that a fault determined the device of a result."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, torch.Tensor):
            vars(tensor)[CAUSE] = finding
