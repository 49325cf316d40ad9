"""Words for what plans and reports hold: modules, places, devices, faults. It lays nothing out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.style import Style
from rich.text import Text

from duoka.base.text import containing
from duoka.base.units import format_bytes, format_count
from duoka.errors import Faults
from duoka.forecast.tensor_names import layer_of, main_list
from duoka.planner.device_map import corrections, runs, shorten

from ..check_report import Fault, Operand, Origin, Place

_LONGEST = 60
_WITHOUT_NAME = "the model"
_PACKAGES = ("site-packages", "dist-packages")
_EFFECTS = {"raises": "CUDA raises an error", "nothing": "it works here"}


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
    }[fault.kind]


def going(operand: Operand, fault: Fault) -> str:
    """Where a tensor went, if it did; "" otherwise."""
    return f", moved to {fault.target} to go on" if operand.moved else ""


def joined(texts: Sequence[str]) -> str:
    """Join texts as people do."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def where(place: Place, *, brief: bool = False) -> str:
    """A place as file and line; with `brief` only the file's own name."""
    return f"{Path(place.file).name if brief else file(place.file)}:{place.line}"


def file(path: str) -> str:
    """A file's path, from where packages are installed on, or from the working directory."""
    full_path = Path(path)
    packages = (parent for parent in full_path.parents if parent.name in _PACKAGES)
    for root in (*packages, Path.cwd()):
        if full_path.is_relative_to(root):
            return str(full_path.relative_to(root))
    return path


def linked(place: Place, *, brief: bool = False) -> Text:
    """A place as `where` has it, which leads to the file on terminals that can."""
    path = Path(place.file)
    style = Style(link=path.as_uri()) if path.is_absolute() else ""
    return Text(where(place, brief=brief), style=style)


def module(name: str) -> str:
    """A module's name; long ones lose their middle."""
    return cropped(name or _WITHOUT_NAME)


def modules(names: Sequence[str]) -> str:
    """How many modules, and which."""
    if len(names) == 1:
        return module(names[0])
    return f"{format_count(len(names), 'module')}: {shorten(n or _WITHOUT_NAME for n in names)}"


def during(phase: str) -> str:
    """In which step."""
    if phase == "build":
        return "while it was built"
    return f"in {phase}" if phase else "before the first step"


def times(count: int) -> str:
    """How often."""
    return "once" if count == 1 else f"{count} times"


def tensor(operand: Operand) -> str:
    """A tensor's type, shape and size."""
    size = format_bytes(operand.num_bytes)
    shape = ", ".join(map(str, operand.shape))
    return f"{operand.dtype} [{shape}], {size}"


def origin(source: Origin) -> str:
    """Where a tensor comes from."""
    named = source.name and f" {source.name}"
    if source.place is None:
        return {
            "operation": "the result of an operation",
            "attribute": f"the plain attribute{named}",
            "constant": "a constant",
        }.get(source.kind, f"the {source.kind}{named}")
    expression = f"{cropped(source.place.text)} at {where(source.place, brief=True)}"
    return expression if source.kind == "operation" else f"the {source.kind}{named}, {expression}"


def cropped(text: str, longest: int = _LONGEST) -> str:
    """A text without its middle, where it is too long."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def name_modules(names: Sequence[str]) -> str:
    """Shorten the modules of a stage: a run of numbered ones becomes its ends."""
    return ", ".join(runs(without_prefix(name) for name in names))


def modules_of(entries: Sequence[tuple[str, str]], device: str) -> list[str]:
    """The modules of a device, where all of a tower is there the tower's own name instead.

    The model's main layers are always named: people look for them.
    """
    names = [name for name, at in entries if at == device]
    main = main_list([name for name, _ in entries])
    if main is None:
        return names
    apart = {main, *containing(main)}
    apart.update(part for name, at in entries if at != device for part in containing(name))
    whole = ([name, *(part for part in containing(name) if part not in apart)] for name in names)
    return list(dict.fromkeys(parts[-1] for parts in whole))


def count_layers(parts: Sequence[Sequence[str]]) -> list[int] | None:
    """How many of the model's layers each part has; None where the model has no list of them."""
    main = main_list([name for part in parts for name in part])
    if main is None:
        return None
    return [
        len({at[1] for name in part if (at := layer_of(name)) and at[0] == main}) for part in parts
    ]


def without_prefix(name: str) -> str:
    """A module's name without what most names begin with."""
    for prefix in ("model.", "transformer.", "language_model."):
        name = name.removeprefix(prefix)
    return name or "everything"


def map_faults(faults: Faults) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with names, and which; those that differ in a number are one."""
    for what, names in (
        ("no device for", runs(faults.missing)),
        ("not there", corrections(faults)),
        ("two devices for", runs(faults.doubled)),
        ("cut in two", runs(faults.split)),
        ("no such device, for", runs(faults.misplaced)),
    ):
        if names:
            yield what, names
