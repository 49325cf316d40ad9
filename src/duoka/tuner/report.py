"""Final report of a run: measurements beside the forecast.

The forecast assumes sequences of the full length; shorter samples take less time and memory.
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
from duoka.report.measured import PeakBytes
from duoka.stages.schedule import busy_shares, order_passes

from .layout import Layout

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
class DeviceReport(PeakBytes):
    """A device of a run: its busy share of step times, and peak bytes, measured and forecast.

    `label` is the display name; `possible_share` is the busy share that the schedule allows.
    """

    label: str
    replica: int
    busy_share: float
    possible_share: float
    forecast_allocated_bytes: int
    forecast_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Summary of a run, with medians over its steps.

    Devices and times are those of the GPUs in the current plans, to which the run may have been
    moved. Before the first step on these GPUs `devices` is empty and the forecast None.
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


def make_report(layout: Layout, metrics: Sequence[dict[str, Any]]) -> RunReport:
    """Summarize a run of at least a step; `metrics` has an entry for each step and evaluation."""
    steps = [entry for entry in metrics if "loss" in entry]
    places = [layout.place(number) for number in range(layout.world_size)]
    # Steps before a move to other GPUs don't count, nor does the first step, which is slower.
    current = [
        entry
        for entry in steps
        if [(process["replica"], process["device"]) for process in entry["processes"]] == places
    ]
    steady = current[1:] or current or steps[-1:]
    reports = tuple(_report_device(layout, rank, steady) for rank in range(len(places)) if current)
    forecast = layout.plans[0].forecast.seconds if current else None
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
    )


def _report_device(layout: Layout, rank: int, steps: Sequence[dict[str, Any]]) -> DeviceReport:
    """Summarize a process: medians of shares and maxima of bytes over steps, and its forecast."""
    replica, device = layout.place(rank)
    plan = layout.plans[replica]
    training = plan.workload.training
    assert training is not None, "the plan is for training"
    forecast = layout.forecast(rank)
    processes = [entry["processes"][rank] for entry in steps]
    return DeviceReport(
        label=layout.label(rank),
        device=device,
        replica=replica,
        busy_share=median(process["busy_share"] for process in processes),
        possible_share=busy_shares(plan.devices, order_passes(plan.devices, training))[device],
        allocated_bytes=max(process["allocated_bytes"] for process in processes),
        forecast_allocated_bytes=forecast.allocated_bytes,
        reserved_bytes=max(process["reserved_bytes"] for process in processes),
        forecast_reserved_bytes=forecast.reserved_bytes,
    )


def render_report(report: RunReport) -> RenderableType:
    """Render a report for a terminal."""
    lines: list[RenderableType] = [Text("; ".join(_summary(report)))]
    if report.devices:
        lines += ["", *_table(report.devices), ""]
    return Group(*lines)


def _summary(report: RunReport) -> Iterator[str]:
    """Yield the phrases of the first line: steps, losses, times, and speed."""
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
    """Yield the table of the GPUs, with a common unit for all sizes, and its caption."""
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
            # A CPU has no peaks.
            *(f"{size / unit_bytes:.2f}" if size else "?" for size in row),
        )
    yield table
    yield Text(_CAPTION.format(unit=unit))
