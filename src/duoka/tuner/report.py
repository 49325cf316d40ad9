"""Closing report of a run: measurements beside the forecast, and advice.

The forecast counts sequences of the full length; shorter samples take less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_count, format_seconds, unit_for
from duoka.stages.schedule import busy_shares, order_passes

from .layout import Layout

# A few steps at the start find the scale of losses in float16; a larger share gets advice.
_MANY_SKIPPED = 0.1
_SIZES = (
    "allocated_bytes",
    "forecast_allocated_bytes",
    "reserved_bytes",
    "forecast_reserved_bytes",
)
_CAPTION = (
    "in {unit}; busy: fraction of time not waiting for other stages; possible: maximum of the "
    "schedule; forecasts assume sequences of full length"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """A device of a run: shares of a step's time, and peak bytes. `label` is for people."""

    label: str
    device: str
    replica: int
    busy_share: float
    possible_share: float
    allocated_bytes: int
    forecast_allocated_bytes: int
    reserved_bytes: int
    forecast_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Summary of a run, with medians over its steps.

    Devices and times are of the GPUs at the end of the run; without a step on these there are no
    devices and no forecast.
    """

    steps: int
    skipped_steps: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    step_seconds: float
    forecast_step_seconds: float | None
    tokens_per_second: float
    devices: tuple[DeviceReport, ...]
    advice: tuple[str, ...]


def make_report(layout: Layout, metrics: Sequence[dict[str, Any]]) -> RunReport:
    """Summarize a run; `metrics` has a line for each step."""
    steps = [entry for entry in metrics if "loss" in entry]
    places = [layout.place(number) for number in range(layout.world_size)]
    # A run may have been moved to other GPUs, and its first step there is slower than the others.
    on_these = [
        entry
        for entry in steps
        if [(process["replica"], process["device"]) for process in entry["processes"]] == places
    ]
    steady = on_these[1:] or on_these or steps[-1:]
    reports = tuple(_device(layout, number, steady) for number in range(len(places)) if on_these)
    forecast = layout.plans[0].forecast.seconds if on_these else None
    skipped = sum(entry["is_skipped"] for entry in steps)
    return RunReport(
        steps=steps[-1]["step"],
        skipped_steps=skipped,
        first_loss=steps[0]["loss"],
        last_loss=steps[-1]["loss"],
        eval_loss=next((e["eval_loss"] for e in reversed(metrics) if "eval_loss" in e), None),
        step_seconds=median(entry["seconds"] for entry in steady),
        forecast_step_seconds=None if forecast is None else forecast.total_seconds,
        tokens_per_second=median(entry["tokens"] / entry["seconds"] for entry in steady),
        devices=reports,
        advice=_advice(skipped / len(steps)),
    )


def _device(layout: Layout, number: int, steps: Sequence[dict[str, Any]]) -> DeviceReport:
    replica, device = layout.place(number)
    plan = layout.plans[replica]
    training = plan.workload.training
    assert training is not None, "the plan is for training"
    forecast = layout.forecast(number)
    processes = [entry["processes"][number] for entry in steps]
    return DeviceReport(
        label=layout.label(number),
        device=device,
        replica=replica,
        busy_share=median(process["busy_share"] for process in processes),
        possible_share=busy_shares(plan.devices, order_passes(plan.devices, training))[device],
        allocated_bytes=max(process["allocated_bytes"] for process in processes),
        forecast_allocated_bytes=forecast.allocated_bytes,
        reserved_bytes=max(process["reserved_bytes"] for process in processes),
        forecast_reserved_bytes=forecast.reserved_bytes,
    )


def _advice(skipped_share: float) -> tuple[str, ...]:
    if skipped_share <= _MANY_SKIPPED:
        return ()
    share = "nothing was trained: all" if skipped_share == 1 else f"{skipped_share:.0%} of all"
    overflow = "because gradients overflowed float16; use --dtype bfloat16"
    return (f"{share} steps were skipped {overflow}",)


def render_report(report: RunReport) -> RenderableType:
    """Make the report's renderable."""
    lines: list[RenderableType] = [Text("; ".join(_summary(report)))]
    if report.devices:
        lines += ["", *_table(report.devices), ""]
    hints = (Text.assemble(("hint: ", "bold"), advice) for advice in report.advice)
    return Group(*lines, *hints)


def _summary(report: RunReport) -> Iterator[str]:
    losses = dict.fromkeys(f"{loss:.4f}" for loss in (report.first_loss, report.last_loss))
    skipped = f" ({report.skipped_steps} skipped)" if report.skipped_steps else ""
    yield f"{format_count(report.steps, 'step')}{skipped}, loss {' → '.join(losses)}"
    if report.eval_loss is not None:
        yield f"evaluation loss {report.eval_loss:.4f}"
    seconds = f"step time {format_seconds(report.step_seconds)}"
    if report.forecast_step_seconds is not None:
        seconds += f", forecast {format_seconds(report.forecast_step_seconds)}"
    yield seconds
    yield f"{report.tokens_per_second:,.0f} tokens/s"


def _table(devices: Sequence[DeviceReport]) -> Iterator[RenderableType]:
    """Yield the table of the GPUs, with a common unit for all sizes."""
    sizes = [[getattr(device, name) for name in _SIZES] for device in devices]
    unit, unit_bytes = unit_for(max(map(max, sizes)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in ("GPU", "busy", "possible", "allocated", "forecast", "reserved", "forecast"):
        table.add_column(name, justify="left" if name == "GPU" else "right", no_wrap=True)
    for device, row in zip(devices, sizes, strict=True):
        table.add_row(
            Text(device.label),
            f"{device.busy_share:.0%}",
            f"{device.possible_share:.0%}",
            # Peaks of a processor are unknown.
            *(f"{size / unit_bytes:.2f}" if size else "?" for size in row),
        )
    yield table
    yield Text(_CAPTION.format(unit=unit))
