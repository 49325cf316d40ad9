"""Deployments as a picture: their speeds and each GPU's memory, the forecast beside them."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from duoka.base.text import printable
from duoka.base.units import unit_for
from duoka.report.picture import draw_bars, new_figure

from .deployments import Bench, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_INCHES, _AXIS_INCHES = 0.3, 0.75
_NAMES = "measured", "forecast"


def draw_bench(bench: Bench) -> Figure:
    """Draw bars for what was measured, and marks for what was forecast."""
    cases = [case for case in bench.deployments if case.plans]
    memory = [(title(case), gpu) for case in cases for gpu in case.memory()]
    rows = [len(cases)] * 3 + [len(memory)]
    figure, (*speeds, bytes_axes) = new_figure([_AXIS_INCHES + _ROW_INCHES * row for row in rows])
    at_once = f"of {bench.workload.batch} at once (tokens/s)"
    for axes, name, text in zip(
        speeds,
        ("one_tokens_per_second", "many_tokens_per_second", "prefill_tokens_per_second"),
        ("answer of one user (tokens/s)", f"answers {at_once}", f"prompts {at_once}"),
        strict=True,
    ):
        measured = [_value(getattr(case.measured, name, None)) for case in cases]
        forecasts = [_value(getattr(case.forecast, name)) for case in cases]
        draw_bars(axes, [title(case) for case in cases], measured, forecasts, _NAMES)
        axes.set(xlabel=text)
    unit, divisor = unit_for(max(gpu["forecast_bytes"] for _, gpu in memory))
    draw_bars(
        bytes_axes,
        [f"{text} {gpu['device']}" for text, gpu in memory],
        [_value(gpu["measured_bytes"]) / divisor for _, gpu in memory],
        [gpu["forecast_bytes"] / divisor for _, gpu in memory],
        _NAMES,
    )
    bytes_axes.set(xlabel=f"reserved memory ({unit})")
    speeds[0].set_title(printable(bench.model), loc="left")
    bytes_axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure


def _value(number: float | None) -> float:
    return nan if number is None else float(number)
