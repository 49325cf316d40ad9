"""Words for what a report holds: places, modules, devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.style import Style
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.planner.device_map import shorten

from ..check_report import Fault, Operand, Origin, Place

_LONGEST = 60
_FEW = 3
_WITHOUT_NAME = "the model"
_PACKAGES = ("site-packages", "dist-packages")
_EFFECTS = {
    "raises": "CUDA raises an error",
    "copies": "CUDA copies, silently",
    "syncs": "the CPU waits for the GPU",
    "nothing": "it works here",
}


def heading(fault: Fault) -> str:
    """What a fault is and what comes of it, in one line."""
    return f"{what(fault)}: {_EFFECTS[fault.effect]}"


def what(fault: Fault) -> str:
    """What a fault is."""
    devices = joined(fault.devices) if fault.devices else "several devices"
    return {
        "mixed-devices": f"{fault.op} of tensors on {devices}",
        "in-place": f"{fault.op} writes to a tensor on {fault.target}",
        "gradient": f"a gradient on another device than its tensor, in {fault.op}",
        "hard-coded-device": f"{fault.op} with a device that the code fixes",
        "gathered-cache": f"{fault.op} gathers what belongs to several devices on {fault.target}",
    }[fault.kind]


def going(operand: Operand, fault: Fault) -> str:
    """Where a tensor went, if it did; "" otherwise."""
    if not operand.moved:
        return ""
    if fault.effect == "raises":
        return f", moved to {fault.target} to go on"
    return f", copied to {fault.target}"


def joined(texts: Sequence[str]) -> str:
    """Join texts as people do.

    Examples
    --------
    >>> joined(["cuda:0", "cuda:1", "cpu"])
    'cuda:0, cuda:1 and cpu'
    """
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def where(place: Place, *, brief: bool = False) -> str:
    """A place as file and line; with `brief` only the file's own name."""
    return f"{Path(place.file).name if brief else file(place.file)}:{place.line}"


def file(path: str) -> str:
    """A file's path, from where packages are installed on, or from the working directory."""
    given = Path(path)
    packages = (each for each in given.parents if each.name in _PACKAGES)
    for root in (*packages, Path.cwd()):
        if given.is_relative_to(root):
            return str(given.relative_to(root))
    return path


def linked(place: Place, *, brief: bool = False) -> Text:
    """A place as `where` has it, which leads to the file on terminals that can."""
    path = Path(place.file)
    style = Style(link=path.as_uri()) if path.is_absolute() else ""
    return Text(where(place, brief=brief), style=style)


def module(name: str) -> str:
    """A module's name; long ones lose their middle.

    Examples
    --------
    >>> module("")
    'the model'
    """
    return cropped(name or _WITHOUT_NAME)


def modules(names: Sequence[str]) -> str:
    """How many modules, and which.

    Examples
    --------
    >>> modules(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.3.mlp"])
    '4 modules: layers.0-3.mlp'
    """
    if len(names) == 1:
        return module(names[0])
    return f"{format_count(len(names), 'module')}: {shorten(n or _WITHOUT_NAME for n in names)}"


def during(phase: str) -> str:
    """In which step.

    Examples
    --------
    >>> during("prefill"), during("")
    ('in prefill', 'before the first step')
    """
    if phase == "build":
        return "while it was built"
    return f"in {phase}" if phase else "before the first step"


def times(count: int) -> str:
    """How often.

    Examples
    --------
    >>> times(1), times(3)
    ('once', '3 times')
    """
    return "once" if count == 1 else f"{count} times"


def tensor(operand: Operand) -> str:
    """A tensor's type, shape and size; of what stands for several tensors their size."""
    size = format_bytes(operand.num_bytes)
    shape = ", ".join(map(str, operand.shape))
    return f"{operand.dtype} [{shape}], {size}" if operand.dtype else size


def origin(given: Origin) -> str:
    """Where a tensor comes from."""
    named = given.name and f" {given.name}"
    if given.place is None:
        return {
            "operation": "the result of an operation",
            "attribute": f"the plain attribute{named}",
            "constant": "a constant",
        }.get(given.kind, f"the {given.kind}{named}")
    made = f"{cropped(given.place.text)} at {where(given.place, brief=True)}"
    return made if given.kind == "operation" else f"the {given.kind}{named}, {made}"


def cropped(text: str, longest: int = _LONGEST) -> str:
    """A text without its middle, where it is too long.

    Examples
    --------
    >>> cropped("abcdefgh", 5)
    'ab…gh'
    """
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"
