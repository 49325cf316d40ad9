"""What a check found: faults, memory, transfers and synchronisations, as frozen data.

A `Report` is made by `checker` from one run of a model's own code on virtual GPUs. It knows nothing
of torch; `render` prints it, `sarif` turns it into what code hosts annotate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from duoka.base.serialization import json_schema, to_dict
from duoka.errors import Faults

VERSION = 1
"""The version of a report's JSON form."""

Effect = Literal["raises", "copies", "syncs", "nothing"]
"""What CUDA does: raises an error, copies silently, waits for the GPU, or none of these."""

Kind = Literal[
    "mixed-devices",  # an operation on tensors of several GPUs, or of a GPU and the CPU
    "in-place",  # a write into a tensor on another device
    "gradient",  # a gradient that comes back on another device than its tensor's
    "hard-coded-device",  # .cuda(), device="cuda:0", device=0 in model code
    "gathered-cache",  # what belongs to several devices' layers, kept on one of them
]

OriginKind = Literal["parameter", "buffer", "attribute", "operation", "input", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A piece of source text: where it begins and ends.

    Parameters
    ----------
    file : str
        An absolute path.
    line, end_line : int
        From 1.
    column, end_column : int
        Characters (not bytes) from 0; the end is exclusive.
    text : str
        The piece itself; of several lines as one, blanks folded.
    function : str
        The qualified name of the function that it stands in.
    """

    file: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    text: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One step of the way from the model's top to a fault.

    Parameters
    ----------
    place : Place
        The line that is being run, and in it the expression.
    module : str
        The name of the module whose method runs, as `named_modules` has it; "" for the model
        itself and outside of modules.
    """

    place: Place
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a tensor comes from.

    Parameters
    ----------
    kind : OriginKind
    name : str
        Of a parameter, a buffer, or an attribute of a module that is neither: its name in the
        model, such as "encoder.layers.1.table".
    place : Place, optional
        Of the result of an operation: the expression that made it.
    """

    kind: OriginKind
    name: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One tensor that took part in an operation at fault.

    Parameters
    ----------
    argument : str
        What it is to the operation: "self", "other", "tensors[1]", "weight".
    expression : str
        The source text that gives it to the operation, such as "self.mlp(h)"; "" if it doesn't
        stand there (a tensor inside a list or a partial).
    place : Place, optional
        Where that text stands.
    device : str
        Where it was, by the name that the placement uses.
    shape : tuple of int
    dtype : str
        As torch prints it, without "torch.".
    num_bytes : int
        Of its elements.
    moved : bool
        It isn't where the operation runs on: going on, the check moved it, and so does a repair.
    origin : Origin, optional
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
    """One place in model code that fails or misbehaves on several devices.

    The same place in forty layers, steps or chunks is one fault.

    Parameters
    ----------
    kind : Kind
    effect : Effect
        What CUDA does there.
    op : str
        The operation as it was called: "torch.cat", "Tensor.__add__",
        "torch.nn.functional.cross_entropy".
    operands : tuple of Operand
        The tensors of the call, in its order.
    target : str
        The device that the check let the operation run on, to go on.
    place : Place
        The expression that is at fault: innermost in code that is not PyTorch's.
    message : str
        What CUDA says, with the placement's devices.
    path : tuple of Call
        From the model's top to `place`, which is the last.
    phase : str
        In which step it was met first: "forward", "prefill", "decode", "loss" or "backward".
    modules : tuple of str
        The modules in which it was met, in the order of their first time.
    count : int
        How often it was met in one step, in the one where it was met most often.
    followups : tuple of Fault
        Those that this one alone causes.
    at_hand : tuple of str
        What a repair can name the target by: local names, and attributes of `self`, that hold a
        tensor on `target` whenever `place` is reached, such as "hidden_states", "self.weight".
    """

    kind: Kind
    effect: Effect
    op: str
    operands: tuple[Operand, ...]
    target: str
    place: Place
    message: str
    path: tuple[Call, ...] = ()
    phase: str = "forward"
    modules: tuple[str, ...] = ()
    count: int = 1
    followups: tuple[Fault, ...] = ()
    at_hand: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file that it stands in."""
        return self.place.file

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self.place.line

    @property
    def function(self) -> str:
        """The qualified name of the function."""
        return self.place.function

    @property
    def source(self) -> str:
        """The expression at fault."""
        return self.place.text

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that meet, in the order of the operands."""
        return tuple(dict.fromkeys(operand.device for operand in self.operands))

    @property
    def expressions(self) -> tuple[str, ...]:
        """The source texts of the tensors that meet, in the order of the call."""
        texts = (operand.expression or operand.argument for operand in self.operands)
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak of one device.

    Parameters
    ----------
    device : str
    budget_bytes : int, optional
        None where nobody said one.
    allocated_bytes, reserved_bytes : int
        The peaks; they need not be at the same moment.
    kinds : mapping of str to int
        What `allocated_bytes` was made of at its moment: "weights", "inputs", "cache",
        "gradients", "activations". They add up to it, with rounding as "rounding".
    phase : str
        The step of the peak, as in `Fault`.
    place : Place, optional
        The line of model code that allocated last at the peak.
    module : str
        The module whose code that was.
    """

    device: str
    budget_bytes: int | None = None
    allocated_bytes: int
    reserved_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    place: Place | None = None
    module: str = ""
    overflows: bool = False

    @property
    def free_bytes(self) -> int | None:
        """What the budget leaves; negative where it isn't enough, None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What goes from one device to another in one step of a phase.

    Parameters
    ----------
    phase : str
    source, target : str
        Devices; "cpu" is one.
    hops : int
        Copies a step.
    num_bytes : int
        Their bytes a step.
    steps : int
        The steps of that phase that were run; `hops` and `num_bytes` are of the dearest.
    """

    phase: str
    source: str
    target: str
    hops: int
    num_bytes: int
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A place where the CPU waits for a GPU.

    Parameters
    ----------
    op : str
        As it was called: "Tensor.item", "Tensor.nonzero", "Tensor.cpu".
    place : Place
    phase : str
    count : int
        How often in one step.
    """

    op: str
    place: Place
    phase: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where the model's own code could not go on, for a reason that has nothing to do with devices.

    Parameters
    ----------
    message : str
        The error, with its type.
    place : Place, optional
        The innermost line of code that is neither PyTorch's nor duoka's.
    phase : str
    hint : str
        What to do; "" where nothing better is known than to look.
    """

    message: str
    place: Place | None
    phase: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `duoka.check` decided about a model on a placement.

    Parameters
    ----------
    model : str
        Its class, or its checkpoint.
    devices : tuple of str
        In the order of the placement.
    completeness : Faults
        What is wrong with the map itself: names that are missing, unknown, doubled, split.
    faults : tuple of Fault
        Where CUDA would raise an error, each once, in the order in which they were met.
    warnings : tuple of Fault
        What works, and costs memory or time, or works by luck on this placement alone.
    memory : tuple of PeakMemory
        One for each device.
    transfers : tuple of Transfer
    syncs : tuple of Sync
    notes : tuple of str
        What the check did otherwise than the model would: compiled code run eagerly, say.
    stop : Stop, optional
        Why it could not run to its end.
    train : bool
        The loss and backward were run.
    seconds : float
        How long the check took.
    subject : object
        What was checked, for `duoka.repair`. It has no JSON form.
    """

    model: str
    devices: tuple[str, ...]
    completeness: Faults = field(default_factory=Faults)
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    memory: tuple[PeakMemory, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    syncs: tuple[Sync, ...] = ()
    notes: tuple[str, ...] = ()
    stop: Stop | None = None
    train: bool = False
    seconds: float = 0.0
    subject: Any = field(default=None, repr=False, compare=False)

    @property
    def complete(self) -> bool:
        """Whether the map names every parameter and buffer once, and splits nothing."""
        return not self.completeness

    @property
    def fits(self) -> bool:
        """Whether every device's peak is within its budget."""
        return not any(peak.overflows for peak in self.memory)

    @property
    def ok(self) -> bool:
        """Whether the model runs on this placement: complete, without faults, within memory."""
        return self.complete and not self.faults and self.fits and self.stop is None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: one key per field, without `subject`; `ok` is the verdict."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["subject"]
        return {"version": VERSION, "ok": self.ok, **{k: to_dict(v) for k, v in own.items()}}

    def to_json(self) -> str:
        """The JSON form as text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of the JSON form, and of what `duoka check --fix` adds to it."""
        schema = json_schema(
            cls, title="A report of duoka", version={"const": VERSION}, ok={"type": "boolean"}
        )
        del schema["properties"]["subject"]
        schema["required"].remove("subject")
        schema["properties"] |= {
            "patches": _objects(file="string", diff="string", proved="boolean", reason="string"),
            "uncured": _objects(file="string", line="integer", op="string", reason="string"),
        }
        return schema


def _objects(**types: str) -> dict[str, Any]:
    """The schema of a list of flat objects."""
    properties = {name: {"type": each} for name, each in types.items()}
    required = list(properties)
    item = {"type": "object", "properties": properties, "required": required}
    return {"type": "array", "items": {**item, "additionalProperties": False}}
