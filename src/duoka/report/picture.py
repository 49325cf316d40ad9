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
