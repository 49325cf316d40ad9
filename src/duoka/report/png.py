"""Pictures for people, drawn with matplotlib, which may not be installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.base.files import why
from duoka.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES_WIDE, _DOTS_PER_INCH = 8.0, 150


def new_figure(inches: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """A figure with a part for each height, one beneath the other."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "pictures need matplotlib, which isn't installed", hint='pip install "duoka[plot]"'
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES_WIDE, sum(inches)), layout="constrained")
    parts = figure.subplots(len(inches), 1, height_ratios=inches, squeeze=False)[:, 0]
    for axes in parts:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(parts)


def save(figure: Figure, file: Path) -> Path:
    """Write a picture."""
    try:
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(
            f"{file} can't be written: {why(error)}",
            hint="name a file in a directory that is there and that you may write to",
        ) from error
    return file
