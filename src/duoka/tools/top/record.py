"""Append snapshots to a CSV file, one row per GPU."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duoka.errors import UsageError
from duoka.forecast.stage_bytes import KIND_FIELDS

from .snapshot import GpuNow, GpuSnapshot

_GPU_FIELDS = ("total_bytes", "free_bytes", "reserved_bytes", "forecast_bytes", "others_bytes",
           "spare_bytes")  # fmt: skip
_ACTIVITY_FIELDS = ("utilization", "temperature_celsius", "power_watts")
COLUMNS = ("time", "gpu", *KIND_FIELDS.values(), "busy_share", *_GPU_FIELDS, *_ACTIVITY_FIELDS)


@contextmanager
def csv_file(path: Path) -> Iterator[Callable[[GpuSnapshot], None]]:
    """Open a file, and yield a function that appends a snapshot: one row of `COLUMNS` per GPU."""
    head = ",".join(COLUMNS)
    with path.open("a+", encoding="utf-8", errors="replace", newline="") as file:
        file.seek(0)
        old_head = file.readline(len(head) + 2)
        if old_head and old_head.rstrip("\r\n") != head:
            raise UsageError(
                f"{path} is not a recording of this version of duoka", hint="give another file"
            )
        writer = csv.DictWriter(file, COLUMNS)
        if not old_head:
            writer.writeheader()

        def append(snapshot: GpuSnapshot) -> None:
            writer.writerows(_csv_row(snapshot.time, gpu) for gpu in snapshot.gpus)
            file.flush()

        yield append


def _csv_row(moment: str, gpu: GpuNow) -> dict[str, Any]:
    """Build the row of a GPU: memory by kind of all its duoka processes, then the GPU's fields."""
    stages = [process.measured for process in gpu.processes]
    shares = [p.busy_share for p in gpu.processes if p.busy_share is not None]
    return {
        "time": moment,
        "gpu": gpu.label,
        "busy_share": max(shares, default=None),
        **{name: sum(getattr(stage, name) for stage in stages) for name in KIND_FIELDS.values()},
        **{name: getattr(gpu, name) for name in _GPU_FIELDS},
        **{name: getattr(gpu.activity, name, None) for name in _ACTIVITY_FIELDS},
    }
