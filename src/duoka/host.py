"""The host: how much memory its processor may use, for modules that a device map puts there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .errors import FleetError
from .fleet import Device, Fleet
from .maps import DeviceMap
from .units import format_bytes

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d{1,15}) kB$", re.MULTILINE)


def fleet_for(fleet: Fleet, device_map: DeviceMap | None, *, offload: bool = False) -> Fleet:
    """The fleet, with the CPU where it is needed and nobody gave it a budget.

    That is where a device map names it; and, for weights that are offloaded, where the GPUs are
    this machine's: of another one it isn't known how much memory its processor has.

    Raises
    ------
    FleetError
        If it isn't known how much memory there is.
    """
    named = device_map is not None and device_map.names_cpu
    here = offload and any(device.uuid for device in fleet.devices)
    if "cpu" in fleet.names or not (named or here):
        return fleet
    budget = available_bytes()
    if not budget:
        raise FleetError(
            "how much memory the CPU may use isn't known",
            hint='give it a budget: Fleet.from_max_memory({0: "24GiB", "cpu": "30GiB"})',
        )
    return replace(fleet, devices=(*fleet.devices, Device(name="cpu", budget_bytes=budget)))


def refuse_more(num_bytes: int) -> None:
    """Refuse weights for the host's memory that it hasn't room for.

    Raises
    ------
    FleetError
        With both numbers.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise FleetError(
            f"the plan keeps {format_bytes(num_bytes)} of weights in the host's memory, and "
            f"{format_bytes(available)} can be had there now",
            hint="free some, or make the plan again with more or larger GPUs",
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping, within the limit of a container; None if unknown.

    Parameters
    ----------
    root : Path
        Where Linux's `proc` and `sys` are.
    """
    found: list[int] = []
    with suppress(OSError):
        match = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="utf-8"))
        found += [] if match is None else [int(match[1]) * 1024]
    with suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(limit - used, 0))
    if not found and root == Path("/"):
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(found, default=None)
