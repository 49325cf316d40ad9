"""The host: how much memory its processor may use, for weights that stay there."""

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
_NO_LIMIT = 2**60  # what the first version writes for none is the largest whole page


def refuse_more(num_bytes: int) -> None:
    """Refuse weights for the host's memory that it hasn't room for."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise FleetError(
            f"the plan keeps {format_bytes(num_bytes)} of weights in the host's memory, and "
            f"{format_bytes(available)} can be had there now",
            hint="free some, or make the plan again with more or larger GPUs",
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping, within the limit of a container; None if unknown."""
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


def container_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """A container's limit of memory and what it has used; None without one that counts.

    It stands in other files in the first version of control groups than in the second.
    """
    group = root / "sys/fs/cgroup"
    for names in _CONTROL_GROUPS:
        with suppress(OSError, ValueError):
            limit, used = (int((group / name).read_text()) for name in names)
            return (limit, used) if limit < _NO_LIMIT else None
    return None
