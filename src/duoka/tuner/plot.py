"""A run as a picture: its loss, its speed, and each GPU's memory beside the forecast."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.base.units import GIB, MIB
from duoka.errors import UsageError

from .layout import Layout
from .report import DeviceReport, make_report
from .run import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the recent past, as far as a speed or a loss is smoothed; so many points stand for a run.
_SMOOTHING_POINTS = 50
_INCHES_WIDE, _CURVE_INCHES, _ROW_INCHES = 8.0, 2.6, 0.34
_DOTS_PER_INCH = 150
_BLUE, _ORANGE, _GRAY = "#2f6db5", "#d9822b", "#9aa0a6"


def plot_run(directory: RunDirectory, file: Path | None = None) -> Path:
    """Draw a run so far into a PNG file, by default ``plot.png`` in its directory.

    Raises
    ------
    UsageError
        If matplotlib isn't installed, or the run has no step yet.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "pictures need matplotlib, which isn't installed", hint='pip install "duoka[plot]"'
        )
    from matplotlib.figure import Figure

    metrics = list(directory.read_metrics())
    run = directory.read()
    layout = Layout(run.plans, run.machines)
    if not any("loss" in entry for entry in metrics):
        raise UsageError(f"{directory.path} has no step yet", hint="look again after its first one")
    reports = make_report(layout, metrics).devices
    memory_inches = 1.1 + _ROW_INCHES * len(reports)
    figure = Figure(figsize=(_INCHES_WIDE, 2 * _CURVE_INCHES + memory_inches), layout="constrained")
    loss, speed, memory = figure.subplots(
        3, 1, height_ratios=[_CURVE_INCHES, _CURVE_INCHES, memory_inches]
    )
    _draw_loss(loss, metrics)
    _draw_speed(speed, [entry for entry in metrics if "loss" in entry])
    _draw_memory(memory, reports, replicas=len(layout.plans))
    for axes in (loss, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    file = directory.path / "plot.png" if file is None else file
    figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    return file


def _draw_loss(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    steps = [entry["step"] for entry in metrics if "loss" in entry]
    _draw_curve(axes, steps, [entry["loss"] for entry in metrics if "loss" in entry], "training")
    measured = [entry for entry in metrics if "eval_loss" in entry]
    if measured:
        losses = [entry["eval_loss"] for entry in measured]
        axes.plot([e["step"] for e in measured], losses, "o-", color=_ORANGE, label="evaluation")
    axes.set(ylabel="loss (nats per token)")
    axes.legend(frameon=False)


def _draw_speed(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    speeds = [entry["tokens"] / entry["seconds"] for entry in steps]
    _draw_curve(axes, [entry["step"] for entry in steps], speeds, "tokens/s")
    axes.set(xlabel="step", ylabel="speed (tokens/s)")
    axes.set_ylim(bottom=0)


def _draw_curve(axes: Axes, steps: Sequence[int], values: Sequence[float], label: str) -> None:
    """Each step, and over long runs the mean of the steps before it."""
    from matplotlib.ticker import MaxNLocator

    window = len(steps) // _SMOOTHING_POINTS
    if window < 2:
        axes.plot(steps, values, ".-", color=_BLUE, label=label)
    else:
        axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=0.8)
        parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
        means = [sum(part) / len(part) for part in parts]
        axes.plot(steps, means, color=_BLUE, label=f"{label}, mean of {window} steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, reports: Sequence[DeviceReport], *, replicas: int) -> None:
    """The peak that each GPU has reserved, and a mark where the forecast has it."""
    forecasts = [report.forecast_reserved_bytes for report in reports]
    unit, name = (GIB, "GiB") if max(forecasts, default=0) >= GIB else (MIB, "MiB")
    rows = range(len(reports))
    labels = [
        f"{report.device} (copy {report.replica + 1})" if replicas > 1 else report.device
        for report in reports
    ]
    measured = [report.reserved_bytes / unit for report in reports]
    axes.barh(rows, measured, height=0.45, color=_BLUE, label="measured peak")
    marks = [size / unit for size in forecasts]
    axes.plot(marks, rows, "|", color=_ORANGE, markersize=16, markeredgewidth=3, label="forecast")
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.set(xlabel=f"reserved memory ({name})", xlim=(0, 1.1 * max(measured + marks, default=1.0)))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
