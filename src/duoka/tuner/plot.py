"""Plot of a run: loss, speed, and each GPU's memory beside the forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.base.units import unit_for
from duoka.errors import UsageError
from duoka.report.picture import BLUE, ORANGE, draw_bars, new_figure, save_picture

from .layout import Layout
from .report import DeviceReport, make_report
from .run import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Curves of long runs are smoothed by a moving mean over 1/50 of the steps.
_SMOOTHING_POINTS = 50
_CURVE_INCHES, _ROW_INCHES, _AXIS_INCHES = 2.6, 0.34, 1.0


def plot_run(directory: RunDirectory, file: Path | None = None) -> Path:
    """Plot the steps so far into a PNG file, by default ``plot.png`` in the run's directory.

    Raises
    ------
    UsageError
        If matplotlib isn't installed, the run has no step yet, or the file can't be written.
    """
    metrics = list(directory.read_metrics())
    run = directory.read()
    layout = Layout(run.plans)
    if not any("loss" in entry for entry in metrics):
        raise UsageError(f"{directory.path} has no step yet", hint="try again after the first step")
    # There are no reports before the first step after a move; a CPU has no peaks.
    reports = [report for report in make_report(layout, metrics).devices if report.reserved_bytes]
    inches = [_CURVE_INCHES, _CURVE_INCHES]
    inches += [_AXIS_INCHES + _ROW_INCHES * len(reports)] if reports else []
    figure, (loss, speed, *memory) = new_figure(inches)
    _draw_curve(loss, [(e["step"], e["loss"]) for e in metrics if "loss" in e], "training")
    if measured := [(e["step"], e["eval_loss"]) for e in metrics if "eval_loss" in e]:
        loss.plot(*zip(*measured, strict=True), "o-", color=ORANGE, label="evaluation")
    loss.set(ylabel="loss (nats per token)")
    loss.legend(frameon=False)
    speeds = [(e["step"], e["tokens"] / e["seconds"]) for e in metrics if "loss" in e]
    _draw_curve(speed, speeds, "")
    speed.set(xlabel="step", ylabel="speed (tokens/s)")
    speed.set_ylim(bottom=0)
    for axes in memory:
        _draw_memory(axes, reports)
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


def _draw_memory(axes: Axes, reports: Sequence[DeviceReport]) -> None:
    """Draw each GPU's peak of reserved memory, and a mark at the forecast."""
    forecasts = [report.forecast_reserved_bytes for report in reports]
    name, unit = unit_for(max(forecasts))
    draw_bars(
        axes,
        [report.label for report in reports],
        [report.reserved_bytes / unit for report in reports],
        [size / unit for size in forecasts],
    )
    axes.set(xlabel=f"reserved memory ({name})")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
