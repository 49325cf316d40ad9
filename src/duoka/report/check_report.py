"""Result of a check as frozen data: faults, memory, transfers, synchronizations.

`checker` creates a `CheckReport` from one run of a model's code on virtual GPUs; `terminal` prints
it and `sarif` converts it for code hosts. This module does not depend on torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from duoka.base.serialization import to_dict
from duoka.errors import Faults
from duoka.forecast.workload import Workload

from .measured import PeakBytes

VERSION = 1
"""Version of the JSON form of a report."""

Effect = Literal["raises", "nothing"]
"""Behavior of CUDA at a fault: it raises an error, or it continues without one."""

FaultKind = Literal[
    "mixed-devices",  # an operation on tensors of several GPUs, or of a GPU and the CPU
    "in-place",  # a write into a tensor on another device
    "gradient",  # a backward function returns it on another device than its tensor
    "hard-coded-device",  # .cuda(), device="cuda:0", device=0 in model code
]

OriginKind = Literal["parameter", "buffer", "attribute", "operation", "input", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A range of source text.

    `file` is an absolute path. Lines count from 1 and columns in characters from 0; the end is
    exclusive. `text` is the source on one line with whitespace collapsed, and `function` the
    qualified name of the enclosing function.
    """

    file: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    text: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """One call on the path from the model to a fault.

    `place` is the running line and the expression in it. `module` is the name of the module whose
    method runs, as in `named_modules`; "" for the model itself and for code outside of modules.
    """

    place: Place
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a tensor: a parameter, buffer, plain attribute, input, constant or operation.

    `name` is the qualified name in the model, such as "encoder.layers.1.table". For the result of
    an operation `place` is the expression that created it.
    """

    kind: OriginKind
    name: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor operand of a faulty operation.

    `argument` names the argument of the call ("self", "tensors[1]"). `expression` is the source
    text at `place` that passes the tensor, such as "self.mlp(h)"; "" if there is none, as for a
    tensor in a list. `device` is its device before the operation, as the placement names it. If
    `moved`, the tensor was on another device than the operation: the check moved it to continue,
    and a repair does the same.
    """

    argument: str
    expression: str = ""
    place: Place | None = None
    device: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_bytes: int = 0
    moved: bool = False
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A line of model code with a failure or misbehavior on several devices.

    The same line reached in many layers, steps or chunks is one fault.

    `op` is the operation as called ("torch.cat", "Tensor.__add__"), `operands` its tensors in
    order, and `target` the device on which the check ran the operation. `place` is the expression:
    the innermost one outside of PyTorch, and the last of `path`, which starts at the model's call.
    `message` is CUDA's error with the placement's device names. `phase` is the first step with the
    fault ("forward", "prefill", "decode", "loss" or "backward"), `modules` lists the modules in
    order of their first occurrence, and `count` is the maximum number of occurrences in one step.
    `followups` are faults that only this fault causes. `at_hand` are names that a repair can use to
    get the target device: local variables and attributes of `self` that hold a tensor on the target
    whenever the line is reached.
    """

    kind: FaultKind
    effect: Effect
    op: str
    operands: tuple[Operand, ...]
    target: str
    place: Place
    message: str
    path: tuple[CallSite, ...] = ()
    phase: str = "forward"
    modules: tuple[str, ...] = ()
    count: int = 1
    followups: tuple[Fault, ...] = ()
    at_hand: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Path of the source file."""
        return self.place.file

    @property
    def line(self) -> int:
        """Line number, from 1."""
        return self.place.line

    @property
    def function(self) -> str:
        """Qualified name of the function."""
        return self.place.function

    @property
    def source(self) -> str:
        """Source text of the expression."""
        return self.place.text

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the operands, in order, without repetition."""
        return tuple(dict.fromkeys(operand.device for operand in self.operands))

    @property
    def expressions(self) -> tuple[str, ...]:
        """Source texts of the operands in call order, or argument names; without repetition."""
        texts = (operand.expression or operand.argument for operand in self.operands)
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory(PeakBytes):
    """Peak memory of one device, by kind.

    `kinds` splits `allocated_bytes` at its peak: "weights", "inputs", "cache", "gradients",
    "activations", and "rounding" for the remainder. `place` and `module` are the line of model code
    and the module whose allocation reached the peak.
    """

    budget_bytes: int | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    place: Place | None = None
    module: str = ""
    overflows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTransfer:
    """Copies from one device to another in one step of a phase.

    `hops` is the number of copies per step; `hops` and `num_bytes` are the maximum over `steps`
    steps.
    """

    phase: str
    source: str
    target: str
    hops: int
    num_bytes: int
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A line where the CPU waits for a GPU, `count` times per step.

    `op` is the operation as called: "Tensor.item", "Tensor.nonzero", "Tensor.cpu".
    """

    op: str
    place: Place
    phase: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Error that ended the model's code early, for a reason unrelated to devices.

    `message` is the error with its type, `place` the innermost line outside of PyTorch and duoka.
    """

    message: str
    place: Place | None
    phase: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of `duoka.check` for a model on a placement.

    Parameters
    ----------
    model : str
        Class of the model, or name of its checkpoint.
    code : str
        Code that ran: the class, with its file or package.
    not_run : tuple of str
        Code files of the checkpoint that did not run, and therefore were not checked.
    devices : tuple of str
        Devices in the order of the placement.
    completeness : Faults
        Errors of the device map itself: missing, unknown, doubled, split or misplaced names.
    faults : tuple of Fault
        Faults at which CUDA raises an error, each line once, in the order of occurrence.
    warnings : tuple of Fault
        Faults without an error on this placement, which raise an error on other placements.
    memory : tuple of PeakMemory
        Peak memory of each device, beside its budget.
    transfers : tuple of DeviceTransfer
        Copies between devices, by line of code.
    syncs : tuple of Sync
        Lines of code that wait for a GPU.
    notes : tuple of str
        Differences between the check and a normal run, such as compiled code that ran eagerly.
    stop : Stop, optional
        Error that ended the run early; None if it ran to its end.
    train : bool
        True if the loss and the backward pass ran.
    workload : Workload, optional
        Workload that ran; None if example inputs were given, or nothing ran.
    seconds : float
        Duration of the check.
    subject : object
        Model and placement for `duoka.repair`; not part of the JSON form.
    """

    model: str
    devices: tuple[str, ...]
    code: str = ""
    not_run: tuple[str, ...] = ()
    completeness: Faults = field(default_factory=Faults)
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    memory: tuple[PeakMemory, ...] = ()
    transfers: tuple[DeviceTransfer, ...] = ()
    syncs: tuple[Sync, ...] = ()
    notes: tuple[str, ...] = ()
    stop: Stop | None = None
    train: bool = False
    workload: Workload | None = None
    seconds: float = 0.0
    subject: Any = field(default=None, repr=False, compare=False)

    @property
    def complete(self) -> bool:
        """Return True if the map names every parameter and buffer once and splits no block."""
        return not self.completeness

    @property
    def fits(self) -> bool:
        """Return True if the peak of every device is within its budget."""
        return not any(peak.overflows for peak in self.memory)

    @property
    def ok(self) -> bool:
        """Return True if the map is complete and the model runs without faults within memory."""
        return self.complete and not self.faults and self.fits and self.stop is None

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dict without `subject`; `ok` is the verdict."""
        names = [field.name for field in fields(self) if field.name != "subject"]
        values = {name: to_dict(getattr(self, name)) for name in names}
        return {"version": VERSION, "ok": self.ok, **values}

    def to_json(self) -> str:
        """Convert to JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
