"""Figures with matplotlib, which is imported only when a figure is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.base.files import why
from duoka.base.requirements import require_package
from duoka.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES_WIDE = 8.0
BLUE, ORANGE = "#2f6db5", "#d9822b"
_DOTS_PER_INCH = 150
# Distance from the middle of a row to the edge of its bar, and to the end of its mark.
_HALF_BAR, _HALF_MARK = 0.25, 0.38


def new_figure(inches: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes of the given heights, stacked vertically.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    """
    require_package("matplotlib", "plot", "plots need")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES_WIDE, sum(inches)), layout="constrained")
    axes = figure.subplots(len(inches), 1, height_ratios=inches, squeeze=False)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def draw_bars(
    axes: Axes,
    labels: Sequence[str],
    measured: Sequence[float],
    forecasts: Sequence[float],
) -> None:
    """Draw a row per label: a bar for the measurement, a mark for the forecast.

    NaN draws no bar or no mark. `names` are the legend labels of bars and marks.
    """
    rows = range(len(labels))
    axes.barh(rows, measured, height=2 * _HALF_BAR, color=BLUE, label="measured peak")
    lows = [row - _HALF_MARK for row in rows]
    highs = [row + _HALF_MARK for row in rows]
    label = "forecast for sequences of full length"
    axes.vlines(forecasts, lows, highs, color=ORANGE, linewidth=3, label=label)
    axes.set_yticks(rows, labels)
    largest = max((value for value in (*measured, *forecasts) if value == value), default=0.0)
    axes.set(xlim=(0, 1.1 * largest or 1.0), ylim=(len(labels) - 0.5, -0.5))


def save_picture(figure: Figure, file: Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix of the file, and return the path.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    kind = file.suffix.lower().removeprefix(".")
    try:
        figure.savefig(file, format=kind or "png", dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:  # ValueError: matplotlib doesn't know the format
        hint = "give a .png, .svg or .pdf file in an existing, writable directory"
        raise UsageError(f"{file} can't be written: {why(error)}", hint=hint) from error
    return file
