"""Recording of snapshots as rows of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duoka.errors import UsageError
from duoka.forecast.stage_bytes import KIND_FIELDS

from .snapshot import GpuNow, GpuSnapshot

_OF_GPU = ("total_bytes", "free_bytes", "reserved_bytes", "forecast_bytes", "others_bytes",
           "spare_bytes")  # fmt: skip
_OF_ACTIVITY = ("utilization", "temperature_celsius", "power_watts")
COLUMNS = ("time", "gpu", *KIND_FIELDS.values(), "busy_share", *_OF_GPU, *_OF_ACTIVITY)


@contextmanager
def csv_file(path: Path) -> Iterator[Callable[[GpuSnapshot], None]]:
    """Open a file, and yield a function to append a row per GPU of a snapshot; see `COLUMNS`."""
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
            writer.writerows(_row(snapshot.time, gpu) for gpu in snapshot.gpus)
            file.flush()

        yield append


def _row(moment: str, gpu: GpuNow) -> dict[str, Any]:
    stages = [process.measured for process in gpu.processes]
    shares = [p.busy_share for p in gpu.processes if p.busy_share is not None]
    return {
        "time": moment,
        "gpu": gpu.label,
        "busy_share": max(shares, default=None),
        **{name: sum(getattr(stage, name) for stage in stages) for name in KIND_FIELDS.values()},
        **{name: getattr(gpu, name) for name in _OF_GPU},
        **{name: getattr(gpu.activity, name, None) for name in _OF_ACTIVITY},
    }
