"""A recording of `duoka top --csv` as a picture: each GPU's memory by kind over time."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.base.files import read_text, why
from duoka.base.units import unit_for
from duoka.errors import UsageError

from .record import COLUMNS, KIND_COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BYTES = 2**28
_MOST_GPUS = 32
_INCHES_WIDE, _INCHES_HIGH = 8.0, 2.4
_DOTS_PER_INCH = 150
_COLOURS = ("#2f6db5", "#4f9d5d", "#e0b040", "#45b0b8", "#8f6bb0", "#b9b9c4", "#c4563a")
_ORANGE = "#d9822b"
Row = dict[str, str]


def plot_recording(recording: Path, file: Path | None = None) -> Path:
    """Draw a recording into a PNG file, by default beside it.

    Raises
    ------
    UsageError
        If matplotlib isn't installed, there is nothing in the recording, or it isn't one, or the
        picture can't be written.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "pictures need matplotlib, which isn't installed", hint='pip install "duoka[plot]"'
        )
    from matplotlib.figure import Figure

    gpus = _read(recording)
    height = _INCHES_HIGH * len(gpus)
    figure = Figure(figsize=(_INCHES_WIDE, height), layout="constrained")
    columns = figure.subplots(len(gpus), 1, sharex=True, squeeze=False)[:, 0]
    begin = min(_moment(rows[0]) for rows in gpus.values())
    for axes, (name, rows) in zip(columns, gpus.items(), strict=True):
        _draw(axes, name, rows, begin)
    columns[-1].set_xlabel("minutes")
    columns[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
    file = recording.with_suffix(".png") if file is None else file
    try:
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(
            f"{file} can't be written: {why(error)}",
            hint="name a file in a directory that is there and that you may write to",
        ) from error
    return file


def _read(recording: Path) -> dict[str, list[Row]]:
    """The rows of each GPU; virtual ones of different processes are different ones."""
    gpus: dict[str, list[Row]] = {}
    try:
        reader = csv.DictReader(read_text(recording, most_bytes=_MOST_BYTES).splitlines())
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError("its first line isn't that of a recording")
        for row in reader:
            _moment(row)
            [_number(row, name) for name in COLUMNS if name.endswith("_bytes")]
            is_virtual = not row["gpu"].isdecimal()
            name = f"{row['gpu']} (pid {row['pids']})" if is_virtual else f"GPU {row['gpu']}"
            gpus.setdefault(name, []).append(row)
    except (OSError, ValueError, TypeError, csv.Error) as error:
        reason = why(error) if isinstance(error, (OSError, ValueError)) else str(error)
        raise UsageError(
            f"{recording} can't be drawn: {reason}", hint="`duoka top --csv FILE` makes one"
        ) from error
    if not 0 < len(gpus) <= _MOST_GPUS:
        raise UsageError(
            f"{recording} has {len(gpus)} GPUs; 1 to {_MOST_GPUS} can be drawn",
            hint="`duoka top --csv FILE` appends to what is there: begin a new file",
        )
    return gpus


def _draw(axes: Axes, name: str, rows: Sequence[Row], begin: float) -> None:
    """What fills a GPU, one kind upon the other, and how far its plan and its memory go."""
    unit, divisor = unit_for(max(int(_number(row, "total_bytes")) for row in rows))
    minutes = [(_moment(row) - begin) / 60 for row in rows]
    kinds = {**KIND_COLUMNS, "others": "others_bytes"}
    colours = dict(zip(kinds, _COLOURS, strict=True))
    layers = {
        kind: [_number(row, column) / divisor for row in rows] for kind, column in kinds.items()
    }
    layers = {kind: layer for kind, layer in layers.items() if any(layer)}
    if layers:
        shades = [colours[kind] for kind in layers]
        axes.stackplot(minutes, *layers.values(), labels=list(layers), colors=shades)
    for column, colour, label in (
        ("forecast_bytes", _ORANGE, "plan's peak"),
        ("total_bytes", "#444444", "capacity"),
    ):
        values = [_number(row, column) / divisor for row in rows]
        axes.plot(minutes, values, "--", color=colour, linewidth=1.2, label=label)
    axes.set(ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.set_title(name, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _moment(row: Row) -> float:
    return datetime.fromisoformat(row["time"]).timestamp()


def _number(row: Row, column: str) -> float:
    """A number of a row; 0 where it wasn't known."""
    return float(row[column] or 0)
