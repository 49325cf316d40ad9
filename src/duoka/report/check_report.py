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
"""The version of a report's JSON form."""

Effect = Literal["raises", "nothing"]
"""What CUDA does: raises an error, or goes on."""

FaultKind = Literal[
    "mixed-devices",  # an operation on tensors of several GPUs, or of a GPU and the CPU
    "in-place",  # a write into a tensor on another device
    "gradient",  # a gradient that comes back on another device than its tensor's
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
    method runs, as in `named_modules`; "" for the model itself and outside of modules.
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

    `argument` is what it is to the operation ("self", "tensors[1]"), `expression` the source text
    at `place` that gives it to the operation ("self.mlp(h)"; "" if it doesn't stand there, as in a
    list). It was on `device`, by the name that the placement uses. Where it was `moved`, it isn't
    where the operation runs: the check moved it to go on, and so does a repair.
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

    The same place in forty layers, steps or chunks is one fault. `op` is the operation as it was
    called ("torch.cat", "Tensor.__add__"), `operands` its tensors in their order, `target` the
    device that the check let it run on, to go on. `place` is the expression at fault, innermost in
    code that is not PyTorch's, and the last of the `path` from the model's top; `message` is what
    CUDA says, with the placement's devices. `phase` is the step in which it was met first
    ("forward", "prefill", "decode", "loss" or "backward"), `modules` where, in the order of their
    first time, and `count` how often in the step where that was most. `followups` are those that
    this one alone causes. `at_hand` is what a repair can name the target by: local names, and
    attributes of `self`, that hold a tensor there whenever the place is reached.
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
        """Source texts of the operands, in the order of the call."""
        texts = (operand.expression or operand.argument for operand in self.operands)
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory(PeakBytes):
    """Peak memory of one device, by kind.

    `kinds` splits `allocated_bytes` at its peak: "weights", "inputs", "cache", "gradients",
    "activations", and "rounding" for the rest. `place` and `module` are the line of model code and
    the module of the last allocation at the peak.
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
    """Location where the model's code failed for a reason unrelated to devices.

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
        Its class, or its checkpoint.
    code : str
        Whose code ran: the class, and the file or package that it is from.
    not_run : tuple of str
        Files with code that came with the checkpoint, about which nothing is said here.
    devices : tuple of str
        In the order of the placement.
    completeness : Faults
        What is wrong with the map itself: names that are missing, unknown, doubled, split.
    faults : tuple of Fault
        Where CUDA would raise an error, each once, in the order in which they were met.
    warnings : tuple of Fault
        What works by luck on this placement alone.
    notes : tuple of str
        What the check did otherwise than the model would: compiled code run eagerly, say.
    stop : Stop, optional
        Why it could not run to its end.
    train : bool
        The loss and backward were run.
    workload : Workload, optional
        What was run; None where example inputs said it, or nothing was.
    seconds : float
        How long the check took.
    subject : object
        What was checked, for `duoka.repair`. It has no JSON form.
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
