"""The host: how much memory its processor may use, for weights that stay there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from duoka.base.units import format_bytes
from duoka.errors import FleetError

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d{1,15}) kB$", re.MULTILINE)


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
    with suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        limits.append(max(limit - used, 0))
    if not limits and root == Path("/"):
        with suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(limits, default=None)
