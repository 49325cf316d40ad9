"""Host memory: its size, the available bytes, and the device for weights that stay on the host."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import nvml
from .calibration import read_calibration
from .device import Device

HOST_PRODUCT = "host memory"
"""Product of a device ``cpu`` that only holds weights; another ``cpu`` can run modules."""
_CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_NO_LIMIT = 2**60  # version 1 writes the largest whole page for "no limit"


def is_wsl(root: Path = Path("/")) -> bool:
    """Return True in the Windows Subsystem for Linux, where the GPUs are those of Windows."""
    with suppress(OSError):
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text("utf-8").lower()
    return False


def refuse_more(num_bytes: int) -> None:
    """Raise FleetError if weights exceed the CPU memory that is available now."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise FleetError(
            f"the plan keeps {format_bytes(num_bytes)} of weights in host memory, and only "
            f"{format_bytes(available)} are available",
            hint="free CPU memory, or plan with more or larger GPUs",
        )


def host_device(budget: int, rate: float | None = None) -> Device:
    """Make the device of host memory for weights, of its bytes and its bytes per second."""
    return Device(
        name="cpu", product=HOST_PRODUCT, budget_bytes=budget, memory_bytes_per_second=rate
    )


def host_of_this_machine() -> Device:
    """Return this machine's host memory: the available bytes, and the measured bandwidth.

    The bandwidth is None unless `duoka bench --calibrate` measured it. Raises FleetError if the
    available memory is unknown.
    """
    budget, total = available_bytes(), total_bytes()
    if not budget:
        raise FleetError("the host's memory is unknown", hint="declare it: --host-memory 64GiB")
    figures = read_calibration(nvml.driver_version()).host
    is_measured = figures is not None and figures.is_of(total or 0)
    rate = figures.memory_bytes_per_second if figures is not None and is_measured else None
    measured = ("memory_bytes_per_second",) if is_measured else ()
    return replace(host_device(budget, rate), memory_bytes=total, measured=measured)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes available without swapping, within a container's limit; None if unknown."""
    container = container_memory(root)
    free = None if container is None else max(container[0] - container[1], 0)
    least = _least_bytes("MemAvailable", root, free)
    if least is None and root == Path("/"):
        with suppress(OSError, ValueError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return least


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the size of the host's memory, within a container's limit; None if unknown."""
    container = container_memory(root)
    return _least_bytes("MemTotal", root, None if container is None else container[0])


def _least_bytes(name: str, root: Path, in_container: int | None) -> int | None:
    """Return the bytes of a line of Linux's meminfo, or of the container if they are fewer."""
    sizes = [] if in_container is None else [in_container]
    with suppress(OSError):
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        sizes += [int(kib) * 1024 for kib in re.findall(rf"(?m)^{name}:\s+(\d{{1,15}}) kB$", text)]
    return min(sizes, default=None)


# Control groups limit a container's memory: version 2 has memory.max ("max" for no limit) and
# memory.current, version 1 memory/memory.limit_in_bytes (a huge number for no limit) and
# memory.usage_in_bytes. The usage includes the page cache, although the kernel would free it.
def container_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return a container's memory limit and usage (control groups 1 or 2); None if unlimited."""
    group = root / "sys/fs/cgroup"
    for names in _CONTROL_GROUPS:
        with suppress(OSError, ValueError):
            limit, used = (int((group / name).read_text()) for name in names)
            return (limit, used) if limit < _NO_LIMIT else None
    return None
