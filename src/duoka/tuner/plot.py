"""Plot of a run: loss and speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.errors import UsageError
from duoka.report.picture import BLUE, ORANGE, new_figure, save_picture

from .run import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Curves of long runs are smoothed by a moving mean over 1/50 of the steps.
_SMOOTHING_POINTS = 50
_CURVE_INCHES = 2.6


def plot_run(directory: RunDirectory, file: Path | None = None) -> Path:
    """Plot the steps so far into a PNG file, by default ``plot.png`` in the run's directory.

    Raises
    ------
    UsageError
        If matplotlib isn't installed, the run has no step yet, or the file can't be written.
    """
    metrics = list(directory.read_metrics())
    directory.read()  # refuses another directory
    if not any("loss" in entry for entry in metrics):
        raise UsageError(f"{directory.path} has no step yet", hint="try again after the first step")
    figure, (loss, speed) = new_figure([_CURVE_INCHES, _CURVE_INCHES])
    _draw_curve(loss, [(e["step"], e["loss"]) for e in metrics if "loss" in e], "training")
    if measured := [(e["step"], e["eval_loss"]) for e in metrics if "eval_loss" in e]:
        loss.plot(*zip(*measured, strict=True), "o-", color=ORANGE, label="evaluation")
    loss.set(ylabel="loss (nats per token)")
    loss.legend(frameon=False)
    speeds = [(e["step"], e["tokens"] / e["seconds"]) for e in metrics if "loss" in e]
    _draw_curve(speed, speeds, "")
    speed.set(xlabel="step", ylabel="speed (tokens/s)")
    speed.set_ylim(bottom=0)
    return save_picture(figure, directory.path / "plot.png" if file is None else file)


def _draw_curve(axes: Axes, points: Sequence[tuple[int, float]], label: str) -> None:
    """Draw a point for each step and, in long runs, the moving mean."""
    from matplotlib.ticker import MaxNLocator

    steps, values = zip(*points, strict=True)
    window = len(steps) // _SMOOTHING_POINTS
    if window < 2:
        axes.plot(steps, values, ".-", color=BLUE, label=label)
    else:
        axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=0.8)
        parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
        means = [sum(part) / len(part) for part in parts]
        name = f"{label}, mean of {window} steps" if label else f"mean of {window} steps"
        axes.plot(steps, means, color=BLUE, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)  # otherwise the axis has no integer tick
    if label or window >= 2:
        axes.legend(frameon=False)
