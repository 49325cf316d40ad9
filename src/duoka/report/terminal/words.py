"""Descriptions of modules, places, devices and faults, without layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from duoka.base.text import containing
from duoka.base.units import format_bytes, format_count
from duoka.errors import Faults
from duoka.forecast.tensor_names import main_list
from duoka.planner.device_map import corrections, runs, shorten

from ..check_report import Fault, Operand, Origin, Place

_LONGEST = 60
_WITHOUT_NAME = "the model"
_PACKAGES = ("site-packages", "dist-packages")
_EFFECTS = {"raises": "CUDA raises an error", "nothing": "works on this placement"}


def describe_fault(fault: Fault) -> str:
    """Describe a fault and its effect in one line."""
    return f"{describe_operation(fault)}: {_EFFECTS[fault.effect]}"


def describe_operation(fault: Fault) -> str:
    """Describe the faulty operation of a fault."""
    devices = join_words(fault.devices) if fault.devices else "several devices"
    return {
        "mixed-devices": f"{fault.op} of tensors on {devices}",
        "in-place": f"{fault.op} writes to a tensor on {fault.target}",
        "gradient": f"a gradient on another device than its tensor, in {fault.op}",
        "hard-coded-device": f"{fault.op} with a hard-coded device",
    }[fault.kind]


def join_words(texts: Sequence[str]) -> str:
    """Join texts with commas and "and"."""
    *head, tail = texts
    return f"{', '.join(head)} and {tail}" if head else tail


def format_place(place: Place, *, brief: bool = False) -> str:
    """Format a place as file and line; with `brief` only the file name."""
    return f"{Path(place.file).name if brief else shorten_path(place.file)}:{place.line}"


def shorten_path(path: str) -> str:
    """Shorten a path to its part below site-packages or the working directory."""
    full_path = Path(path)
    packages = (parent for parent in full_path.parents if parent.name in _PACKAGES)
    for root in (*packages, Path.cwd()):
        if full_path.is_relative_to(root):
            return str(full_path.relative_to(root))
    return path


def format_module(name: str) -> str:
    """Format a module name, shortening the middle of long names."""
    return crop(name or _WITHOUT_NAME)


def format_modules(names: Sequence[str]) -> str:
    """Format the number of modules and their names."""
    if len(names) == 1:
        return format_module(names[0])
    return f"{format_count(len(names), 'module')}: {shorten(n or _WITHOUT_NAME for n in names)}"


def describe_phase(phase: str) -> str:
    """Describe the phase of a step."""
    if phase == "build":
        return "during construction"
    return f"in {phase}" if phase else "before the first step"


def format_times(count: int) -> str:
    """Format a count of occurrences."""
    return "once" if count == 1 else f"{count} times"


def format_tensor(operand: Operand) -> str:
    """Format dtype, shape and size of a tensor."""
    size = format_bytes(operand.num_bytes)
    shape = ", ".join(map(str, operand.shape))
    return f"{operand.dtype} [{shape}], {size}"


def describe_origin(source: Origin) -> str:
    """Describe the origin of a tensor."""
    name_suffix = source.name and f" {source.name}"
    if source.place is None:
        return {
            "operation": "the result of an operation",
            "attribute": f"the plain attribute{name_suffix}",
            "constant": "a constant",
        }.get(source.kind, f"the {source.kind}{name_suffix}")
    expression = f"{crop(source.place.text)} at {format_place(source.place, brief=True)}"
    is_operation = source.kind == "operation"
    return expression if is_operation else f"the {source.kind}{name_suffix}, {expression}"


def crop(text: str, longest: int = _LONGEST) -> str:
    """Remove the middle of a text longer than `longest`."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def name_modules(names: Sequence[str]) -> str:
    """Join module names; consecutive numbers become a range, such as layers.0-13."""
    return ", ".join(runs(without_prefix(name) for name in names))


def modules_of(entries: Sequence[tuple[str, str]], device: str) -> list[str]:
    """Return the modules of a device; a tower that is entirely on the device is one name.

    The layers of the model's main list are always listed individually.
    """
    names = [name for name, at in entries if at == device]
    main = main_list([name for name, _ in entries])
    if main is None:
        return names
    split_names = {main, *containing(main)}
    split_names.update(part for name, at in entries if at != device for part in containing(name))
    towers = (
        [name, *(part for part in containing(name) if part not in split_names)] for name in names
    )
    return list(dict.fromkeys(parts[-1] for parts in towers))


def without_prefix(name: str) -> str:
    """Remove common prefixes from a module name."""
    for prefix in ("model.", "transformer.", "language_model."):
        name = name.removeprefix(prefix)
    return name or "everything"


def describe_map_errors(faults: Faults) -> Iterator[tuple[str, list[str]]]:
    """Yield each kind of error in a device map with its names; numbered names are merged."""
    for describe_operation, names in (
        ("no device for", runs(faults.missing)),
        ("not there", corrections(faults)),
        ("two devices for", runs(faults.doubled)),
        ("split in two", runs(faults.split)),
        ("no such device for", runs(faults.misplaced)),
    ):
        if names:
            yield describe_operation, names
