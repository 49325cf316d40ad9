"""Picture of a recording of `duoka top --csv`: each GPU's memory by kind over time."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.base.files import read_text, why
from duoka.base.units import unit_for
from duoka.errors import UsageError
from duoka.forecast.stage_bytes import KIND_FIELDS
from duoka.report.picture import new_figure, save_picture

from .record import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BYTES = 2**28
_MOST_GPUS = 32
_INCHES = 2.4
_KINDS = {**KIND_FIELDS, "others": "others_bytes"}
_SHADES = ("#2f6db5", "#4f9d5d", "#e0b040", "#45b0b8", "#8f6bb0", "#b9b9c4", "#c4563a")
_COLOURS = dict(zip(_KINDS, _SHADES, strict=True))
_LIMITS = ("plan's peak", "forecast_bytes", "#d9822b"), ("capacity", "total_bytes", "#444444")


def plot_recording(recording: Path, file: Path | None = None) -> Path:
    """Draw a recording into a PNG file, by default beside the recording."""
    gpus = _read(recording)
    figure, parts = new_figure([_INCHES] * len(gpus))
    begin = min(rows[0]["time"] for rows in gpus.values())
    end = max(rows[-1]["time"] for rows in gpus.values())
    columns = _KINDS.values()
    present = {
        column for rows in gpus.values() for row in rows for column in columns if row[column]
    }
    kinds = [kind for kind, column in _KINDS.items() if column in present]
    for axes, (name, rows) in zip(parts, gpus.items(), strict=True):
        _draw(axes, name, rows, kinds, begin)
        axes.set_xlim(0, max((end - begin) / 60, 1e-3))
    parts[-1].set_xlabel("minutes")
    parts[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
    return save_picture(figure, recording.with_suffix(".png") if file is None else file)


def _read(recording: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the rows of each GPU."""
    gpus: dict[str, list[dict[str, Any]]] = {}
    try:
        reader = csv.DictReader(read_text(recording, most_bytes=_MOST_BYTES).splitlines())
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError("its first line isn't that of a recording")
        for row in reader:
            if None in row.values():  # a line cut off
                continue
            sizes = {name: int(row[name] or 0) for name in COLUMNS if name.endswith("_bytes")}
            moment = datetime.fromisoformat(row["time"]).timestamp()
            gpus.setdefault(row["gpu"], []).append({"time": moment, **sizes})
        if not 0 < len(gpus) <= _MOST_GPUS:
            raise ValueError(f"it has {len(gpus)} GPUs, and 1 to {_MOST_GPUS} can be drawn")
    except (OSError, ValueError, TypeError, csv.Error) as error:
        reason = why(error) if isinstance(error, (OSError, ValueError)) else "a line is damaged"
        raise UsageError(
            f"{recording} can't be drawn: {reason}", hint="`duoka top --csv FILE` makes one"
        ) from error
    return gpus


def _draw(
    axes: Axes, name: str, rows: Sequence[dict[str, Any]], kinds: Sequence[str], begin: float
) -> None:
    """Draw stacked layers of memory by kind, the plan's peak, and the GPU's capacity."""
    unit, divisor = unit_for(max(row["total_bytes"] for row in rows))
    minutes = [(row["time"] - begin) / 60 for row in rows]
    if kinds:
        layers = [[row[_KINDS[kind]] / divisor for row in rows] for kind in kinds]
        axes.stackplot(minutes, *layers, labels=kinds, colors=[_COLOURS[kind] for kind in kinds])
    for label, column, colour in _LIMITS:
        values = [row[column] / divisor for row in rows]
        axes.plot(minutes, values, "--", color=colour, linewidth=1.2, label=label)
    axes.set(ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.set_title(f"GPU {name}" if name.isdecimal() else name, loc="left", fontsize="medium")
