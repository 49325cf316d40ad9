"""The closing report of a run: what was measured beside what was forecast, and what to change.

The forecast counts sequences of the full length; shorter samples take less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_seconds
from duoka.stages.schedule import busy_shares, order_passes

from .layout import Layout

# What is left idle by design above this is worth a word.
_LARGE_BUBBLE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device of a run; shares of a step's time, and peaks in bytes."""

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
    """A run: medians over its steps, in seconds and tokens a second."""

    steps: int
    first_loss: float
    last_loss: float
    step_seconds: float
    forecast_step_seconds: float | None
    tokens_per_second: float
    devices: tuple[DeviceReport, ...]
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        return asdict(self)


def make_report(layout: Layout, metrics: Sequence[dict[str, Any]]) -> RunReport:
    """Sum a run up; `metrics` has a line for each step."""
    steps = [entry for entry in metrics if "loss" in entry]
    places = [layout.place(number) for number in range(layout.world_size)]
    # A run may have been moved; and the first step looks for the way of its batches.
    on_these = [
        entry
        for entry in steps
        if [(process["replica"], process["device"]) for process in entry["processes"]] == places
    ]
    steady = on_these[1:] or on_these or steps[-1:]
    seconds = median(entry["seconds"] for entry in steady)
    reports = tuple(_device(layout, number, steady) for number in range(len(places)) if on_these)
    forecast = layout.plans[0].forecast.seconds
    return RunReport(
        steps=steps[-1]["step"],
        first_loss=steps[0]["loss"],
        last_loss=steps[-1]["loss"],
        step_seconds=seconds,
        forecast_step_seconds=None if forecast is None else forecast.total_seconds,
        tokens_per_second=median(entry["tokens"] / entry["seconds"] for entry in steady),
        devices=reports,
        advice=tuple(_advice(layout, reports)),
    )


def _device(layout: Layout, number: int, steps: Sequence[dict[str, Any]]) -> DeviceReport:
    replica, device = layout.place(number)
    plan = layout.plans[replica]
    training = plan.workload.training
    assert training is not None, "the plan is for training"
    forecast = next(stage for stage in plan.forecast.devices if stage.device == device)
    processes = [entry["processes"][number] for entry in steps]
    return DeviceReport(
        device=device,
        replica=replica,
        busy_share=median(process["busy_share"] for process in processes),
        possible_share=busy_shares(plan.devices, order_passes(plan.devices, training))[device],
        allocated_bytes=max(process["allocated_bytes"] for process in processes),
        forecast_allocated_bytes=forecast.allocated_bytes,
        reserved_bytes=max(process["reserved_bytes"] for process in processes),
        forecast_reserved_bytes=forecast.reserved_bytes,
    )


def _advice(layout: Layout, reports: Sequence[DeviceReport]) -> Iterator[str]:
    plan = layout.plans[0]
    training = plan.workload.training
    assert training is not None, "the plan is for training"
    bubble = 1 - min((report.possible_share for report in reports), default=1.0)
    if bubble > _LARGE_BUBBLE:
        yield (
            f"{training.micro_batches} micro-batches leave each of {len(plan.devices)} stages idle "
            f"for {bubble:.0%} of a step at least: a larger --batch, or a smaller --micro-batch, "
            "leaves less"
        )
    shares = [report.busy_share for report in reports if report.replica == 0]
    if len(shares) > 1 and max(shares) - min(shares) > _LARGE_BUBBLE:
        busiest = max(reports[: len(shares)], key=lambda report: report.busy_share)
        yield (
            f"{busiest.device} was busy for {busiest.busy_share:.0%} of a step and another stage "
            f"for {min(shares):.0%}: `duoka bench --calibrate` measures the GPUs, and plans then "
            "cut by their speed"
        )


def render_report(report: RunReport) -> RenderableType:
    """What rich prints."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("GPU", "busy", "possible", "allocated", "forecast", "reserved", "forecast"):
        table.add_column(name, justify="left" if name == "GPU" else "right")
    for device in report.devices:
        sizes = (
            device.allocated_bytes,
            device.forecast_allocated_bytes,
            device.reserved_bytes,
            device.forecast_reserved_bytes,
        )
        table.add_row(
            device.device,
            f"{device.busy_share:.0%}",
            f"{device.possible_share:.0%}",
            *map(format_bytes, sizes),
        )
    seconds = f"a step took {format_seconds(report.step_seconds)}"
    if report.forecast_step_seconds is not None:
        seconds += f", forecast {format_seconds(report.forecast_step_seconds)}"
    return Group(
        Text(
            f"{report.steps} steps, loss {report.first_loss:.4f} → {report.last_loss:.4f}; "
            f"{seconds}; {report.tokens_per_second:,.0f} tokens/s"
        ),
        table,
        *map(Text, report.advice),
    )
