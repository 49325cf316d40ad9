"""A call in which tensors of several devices meet: its operands, what it writes, and its fault.

It doesn't know where in the source the call stands, nor where its tensors should be.
"""

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
    """What an operation writes into, if the caller can see that."""
    if isinstance(written, VirtualTensor):
        for _, tensor in tensors_of(args, kwargs):
            if isinstance(tensor, VirtualTensor) and tensor.storage_id == written.storage_id:
                return tensor
        return None
    return written


def positions_of(func: Any) -> dict[str, int]:
    """The parameters of an operation in their order, where Python knows them."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: at for at, name in enumerate(names)}


def op_name(func: Any) -> str:
    """The name by which code calls an operation."""
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)


def is_direct(frame: FrameType) -> bool:
    """Whether model code calls the function itself, not by way of a module of PyTorch's."""
    # Functions in Python pass their arguments on as they are to whoever overrides them.
    inner: FrameType | None = frame
    if inner is not None and inner.f_code.co_name == "handle_torch_function":
        inner = inner.f_back and inner.f_back.f_back
    return inner is not None and is_model_code(inner.f_code)


@dataclass(slots=True, eq=False)
class FaultRecord:
    """A fault in the making: the same place in forty layers is met forty times."""

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
        """Count one more time in a step; only what is at hand each time is at hand."""
        self._in_step = self._in_step + 1 if step == self._step else 1
        self._step, self.count = step, max(self.count, self._in_step)
        self.modules[module] = None
        now = tuple(at_hand)
        before = now if self.at_hand is None else self.at_hand
        self.at_hand = tuple(name for name in before if name in now)

    def fault(self) -> Fault:
        """The frozen form."""
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
    """The tensors of a call, each with its place in it."""
    for index, value in enumerate(args):
        yield from _within((index,), value)
    for name, value in kwargs.items():
        yield from _within((name,), value)


def _within(path: Path, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _within((*path, index), item)


def moved_to(value: Any, moved: set[int], target: torch.device) -> Any:
    """Arguments, with the tensors of these identities on the target."""
    return mapped(value, lambda tensor: tensor.to(target) if id(tensor) in moved else tensor)


def sampled(
    tensors: list[tuple[Path, torch.Tensor]], moved: set[int]
) -> list[tuple[Path, torch.Tensor]]:
    """Not forty caches: the first of those that move, and of those that stay."""
    if len(tensors) <= _MOST_OPERANDS:
        return tensors
    half = _MOST_OPERANDS // 2
    go = [pair for pair in tensors if id(pair[1]) in moved][:half]
    stay = [pair for pair in tensors if id(pair[1]) not in moved][:half]
    chosen = {id(tensor) for _, tensor in (*go, *stay)}
    return [pair for pair in tensors if id(pair[1]) in chosen]


# ── which fault decided a tensor's device ──


def cause_of_result(args: Any, device: torch.device) -> FaultRecord | None:
    """The fault that brought an argument to the device that it shares with the result."""
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
    moved: set[int],
    target: str,
    written: torch.Tensor | None,
    devices: frozenset[str],
    home: str | None,
) -> FaultRecord | None:
    """The earlier fault without which this one would not be.

    `home` is the device of the placed module whose code is running: what an earlier fault took
    away from there causes a fault where it meets something of that module.
    """
    for _, tensor in tensors:
        cause: FaultRecord | None = vars(tensor).get(CAUSE)
        if cause is None:
            continue
        met = set(cause.first.devices)
        if id(tensor) in moved and target in met:
            return cause
        if id(tensor) not in moved and target != home and home in met & devices:
            return cause
        if tensor is written and met & devices - {target}:
            return cause
    return None


def mark_cause(result: Any, finding: FaultRecord) -> None:
    """Remember that a fault decided where a result is."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, torch.Tensor):
            vars(tensor)[CAUSE] = finding
