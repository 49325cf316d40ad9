"""Explaining a lack of memory: the code that allocated, the memory in use, and the plan's."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from duoka.base.units import format_bytes
from duoka.forecast.stage_bytes import StageBytes

from . import devices
from .publisher import Publisher

_PACKAGES = Path(torch.__file__).parents[1]
# Frames that pass a call on; the frame of the model's code is reported.
_BETWEEN = (str(_PACKAGES / "torch"), *(
    str(Path(__file__).parents[1] / name) for name in ("runtime", "virtual", "engine", "stages")
))  # fmt: skip
_DEVICE = re.compile(r"\bGPU (\d+) has a total")


def explain(error: Exception, publisher: Publisher | None) -> Exception:
    """Add an explanation to an out-of-memory error; other errors stay as they are.

    Call it where the error is caught, while its traceback still holds the tensors on the device.
    `__notes__` gets the text, and `available_bytes` the bytes that this process could have on each
    device in all; both go with the error to another process.
    """
    if isinstance(error, torch.OutOfMemoryError) and publisher is not None:
        # Other threads change the caches that are looked at: that must not hide the error.
        with suppress(Exception):
            _explain(error, publisher)
    return error


def describe(error: Exception) -> str:
    """Return the text of an error without PyTorch's advice on its allocator, and its notes."""
    sentences = str(error).split(". ")[:3]
    return "\n".join([". ".join(sentences), *getattr(error, "__notes__", ())])


def _explain(error: Exception, publisher: Publisher) -> None:
    match = _DEVICE.search(str(error))
    looks = publisher.look()
    failed = [k for k in looks if match and k.measured.device.endswith(f":{match[1]}")] or looks
    available = {}
    for look in looks:
        free = devices.free_bytes(look.measured.device)
        available[look.measured.device] = look.measured.reserved_bytes + free
    lines = [_request(error, publisher)]
    for look in failed:
        lines.append(_filled(look.measured, look.forecast))
        missing = look.forecast.budget_bytes - available[look.measured.device]
        if missing > 0:
            lines.append(f"other programs use {format_bytes(missing)} of the planned memory")
    error.add_note("\n".join(lines))
    error.available_bytes = available  # type: ignore[attr-defined]


def _request(error: Exception, publisher: Publisher) -> str:
    """Name the allocating line of the model's code, and its module."""
    names = {id(module): name for name, module in publisher.model.named_modules()}
    line, module = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN):
            line = f"{_short(file)}:{number}"
        module = names.get(id(frame.f_locals.get("self")), module)
    return f"requested by {line or 'duoka'}" + (f", in {module}" if module else "")


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_PACKAGES)) if path.is_relative_to(_PACKAGES) else path.name


def _filled(measured: StageBytes, forecast: StageBytes) -> str:
    """Describe the memory of a device, by kind, beside the forecast."""
    planned = {**forecast.kinds, "reserved": forecast.reserved_bytes}
    kinds = [
        f"{kind} {format_bytes(size)} ({format_bytes(planned[kind])})"
        for kind, size in {**measured.kinds, "reserved": measured.reserved_bytes}.items()
        if size or planned[kind]
    ]
    return f"on {measured.device} now (planned): {', '.join(kinds)}"
