"""Available CPU memory, for offloaded weights."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from duoka.base.units import format_bytes
from duoka.errors import FleetError

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d{1,15}) kB$", re.MULTILINE)
_CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_NO_LIMIT = 2**60  # version 1 writes the largest whole page for "no limit"


def refuse_more(num_bytes: int) -> None:
    """Raise FleetError if weights exceed the CPU memory that is available now."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise FleetError(
            f"the plan offloads {format_bytes(num_bytes)} of weights to CPU memory, and only "
            f"{format_bytes(available)} are available",
            hint="free CPU memory, or plan with more or larger GPUs",
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes available without swapping, within a container's limit; None if unknown."""
    limits: list[int] = []
    with suppress(OSError):
        match = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="utf-8"))
        limits += [] if match is None else [int(match[1]) * 1024]
    limited = container_memory(root)
    if limited is not None:
        limits.append(max(limited[0] - limited[1], 0))
    if not limits and root == Path("/"):
        with suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(limits, default=None)


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
