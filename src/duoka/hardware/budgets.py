"""Budgets as transformers' ``max_memory`` states them: a mapping from devices to sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from duoka.base.units import parse_bytes
from duoka.errors import FleetError, UsageError

from .device import Device

_GPU = re.compile(r"(?:(?:cuda:)?|(?P<virtual>vgpu:))(?P<number>[0-9]{1,4})", re.ASCII)
_NOTHING = re.compile(r"0+(\.0+)?\s*[A-Za-z]*", re.ASCII)
_FORM = '{0: "10GiB", 1: "20GiB", "cpu": "30GiB"} is one'


def read(max_memory: object) -> tuple[Device, ...]:
    """Read a mapping; a device with nothing is left out."""
    if not isinstance(max_memory, Mapping):
        raise UsageError(
            f"max_memory is a mapping from devices to sizes, not {type(max_memory).__name__}",
            hint=_FORM,
        )
    sizes = {key: _size(key, value) for key, value in max_memory.items()}
    return tuple(Device(name=_name(key), budget_bytes=size) for key, size in sizes.items() if size)


def _name(key: object) -> str:
    text = key if isinstance(key, str) else str(key) if type(key) is int else repr(key)
    match = _GPU.fullmatch(text)
    if match is not None:
        kind = "vgpu" if match["virtual"] else "cuda"
        return f"{kind}:{int(match['number'])}"
    if text == "cpu":
        return text
    if text == "disk":
        raise FleetError("max_memory names disk, and duoka doesn't offload", hint="leave it out")
    raise FleetError(f"max_memory names {text[:60]!r}, which is no device", hint=_FORM)


def _size(key: object, value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str):
        return 0 if _NOTHING.fullmatch(value.strip()) else parse_bytes(value)
    raise UsageError(
        f"max_memory of {str(key)[:60]!r} is {str(value)[:60]}, which is no size",
        hint="write bytes as a number, or a text like 10GiB or 10GB",
    )
