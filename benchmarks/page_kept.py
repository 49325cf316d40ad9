"""Rows of archived tables that the benchmark page shows again: they need the CUDA rig."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).resolve().parent / "archive"
MIB = 2**20
Row = dict[str, Any]


def table_rows(name: str, title: str) -> Iterator[list[str]]:
    """Yield the cells of an archived table's rows; the table's first title is given."""
    is_inside = False
    for text in (ARCHIVE / name).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if not text.startswith("|"):
            is_inside = False
        elif cells[0] == title:
            is_inside = True
        elif is_inside and not text.startswith("|---"):
            yield cells


def _memory(case: str, device: str, sizes: list[str]) -> Row:
    forecast, measured, _, reserved_forecast, reserved_measured, _ = sizes
    return {
        "case": case,
        "device": device,
        "forecast_allocated_bytes": round(float(forecast) * MIB),
        "measured_allocated_bytes": round(float(measured) * MIB),
        "forecast_reserved_bytes": round(float(reserved_forecast) * MIB),
        "measured_reserved_bytes": round(float(reserved_measured) * MIB),
    }


def rig_rows() -> list[Row]:
    """Return the peaks of inference on the CUDA rig."""
    rows = table_rows("rig_pairs_cpu-2-cores_2026-11-24.md", "case")
    return [_memory(case, device, sizes) for case, device, *sizes in rows if len(sizes) == 6]


def rig_training_rows() -> list[Row]:
    """Return the peaks of fine-tuning on the CUDA rig."""
    rows = table_rows("rig_tune_2026-11-29.md", "run")
    return [
        _memory(f"{case} ({segments} segments)", device, sizes)
        for case, segments, device, *sizes in rows
        if len(sizes) == 6
    ]


def host_rows() -> list[Row]:
    """Return the host's work for each kind of step and each way to run it."""
    rows = []
    for step, way, launches, copies, waits, cpu, busiest, ratio in table_rows(
        "host_rig_2026-11-29.md", "step"
    ):
        counts = {"launches": int(launches), "copies": int(copies), "waits": int(waits)}
        times = {"cpu_ms": float(cpu), "busiest_ms": float(busiest), "ratio": float(ratio)}
        rows.append({"step": step, "way": way, **counts, **times})
    return rows
