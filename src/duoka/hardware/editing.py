"""Editing: the text of a fleet with a card more, or with one in the place of another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from duoka.base.units import exact_bytes

from .device import Device
from .parse import devices_in


def with_more(text: str, devices: Sequence[Device], entry: str, count: int = 1) -> str:
    """Write a fleet with more devices at its end.

    Examples
    --------
    >>> with_more("2xRTX4090", (), "RTX 3060")
    '2xRTX4090,RTX 3060'
    """
    prefix, entries = _entries(text, devices)
    return prefix + _joined([*entries, *[entry] * count])


def with_replaced(text: str, devices: Sequence[Device], index: int, entry: str) -> str:
    """Write a fleet with something else in the place of one device.

    Examples
    --------
    >>> with_replaced("virtual:2x24GiB,12GiB", (), 1, "RTX 5090")
    'virtual:24GiB,RTX 5090,12GiB'
    """
    prefix, entries = _entries(text, devices)
    entries[index] = entry
    return prefix + _joined(entries)


def _entries(text: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """What the text begins with, and an entry for each device."""
    declared = devices_in(text)
    if declared is not None:
        return declared
    virtual = any(device.name.startswith("vgpu") for device in devices)
    return "virtual:" if virtual else "", [exact_bytes(device.budget_bytes) for device in devices]


def _joined(entries: Sequence[str]) -> str:
    groups = [(entry, len(list(group))) for entry, group in groupby(entries)]
    texts = [entry if count == 1 else f"{count}x{entry}" for entry, count in groups]
    # Commas that follow a card with figures would belong to it.
    return ("+" if any(":" in entry for entry in entries) else ",").join(texts)
