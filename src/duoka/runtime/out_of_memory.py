"""Explains out-of-memory errors: the code that allocated, the memory in use and as planned."""

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
# Frames of these packages only pass a call on; the innermost frame of other code is reported.
_BETWEEN = (str(_PACKAGES / "torch"), *(
    str(Path(__file__).parents[1] / name) for name in ("runtime", "virtual", "engine", "stages")
))  # fmt: skip
_DEVICE = re.compile(r"\bGPU (\d+) has a total")


def explain(error: Exception, publisher: Publisher | None) -> Exception:
    """Add an explanation to an out-of-memory error; other errors stay as they are.

    Call this where the error is caught, while its traceback still holds the tensors on the device.
    The text is added to the error's `__notes__`. Its new attribute `available_bytes` has, for each
    device, the bytes that this process has reserved plus the free ones. Both are pickled with it.
    """
    if isinstance(error, torch.OutOfMemoryError) and publisher is not None:
        # The publisher may fail, as other threads change the caches: that must not hide the error.
        with suppress(Exception):
            _explain(error, publisher)
    return error


def describe(error: Exception) -> str:
    """Return the text of an error without PyTorch's advice on its allocator, and its notes."""
    sentences = str(error).split(". ")[:3]
    return "\n".join([". ".join(sentences), *getattr(error, "__notes__", ())])


def _explain(error: Exception, publisher: Publisher) -> None:
    """Add the note for the device in the error's text, or for all devices if none is named."""
    match = _DEVICE.search(str(error))
    looks = publisher.look()
    failed = [k for k in looks if match and k.measured.device.endswith(f":{match[1]}")] or looks
    available = {}
    for look in looks:
        free = devices.free_bytes(look.measured.device)
        available[look.measured.device] = look.measured.reserved_bytes + free
    lines = [_describe_request(error, publisher)]
    for look in failed:
        lines.append(_describe_memory(look.measured, look.forecast))
        missing = look.forecast.budget_bytes - available[look.measured.device]
        if missing > 0:
            lines.append(f"other programs use {format_bytes(missing)} of the planned memory")
    error.add_note("\n".join(lines))
    error.available_bytes = available  # type: ignore[attr-defined]


def _describe_request(error: Exception, publisher: Publisher) -> str:
    """Return the line of model code that allocated, and the innermost module that was running."""
    names = {id(module): name for name, module in publisher.model.named_modules()}
    line, module = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN):
            line = f"{_short_path(file)}:{number}"
        module = names.get(id(frame.f_locals.get("self")), module)
    return f"requested by {line or 'duoka'}" + (f", in {module}" if module else "")


def _short_path(file: str) -> str:
    """Return a file's path inside site-packages, or its name alone elsewhere."""
    path = Path(file)
    return str(path.relative_to(_PACKAGES)) if path.is_relative_to(_PACKAGES) else path.name


def _describe_memory(measured: StageBytes, forecast: StageBytes) -> str:
    """Describe a device's memory now by kind, each with the forecast in parentheses."""
    planned = {**forecast.kinds, "reserved": forecast.reserved_bytes}
    kinds = [
        f"{kind} {format_bytes(size)} ({format_bytes(planned[kind])})"
        for kind, size in {**measured.kinds, "reserved": measured.reserved_bytes}.items()
        if size or planned[kind]
    ]
    return f"on {measured.device} now (planned): {', '.join(kinds)}"
