"""What is said of a run in the end: measurement beside forecast."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trainers import make_layout, renamed
from trainers import make_report as make_step

from duoka import TuneSettings
from duoka.base.units import MIB
from duoka.forecast.latency import Seconds
from duoka.forecast.workload import Schedule
from duoka.tuner.layout import Layout
from duoka.tuner.report import RunReport, make_report, render_report

Make = Callable[..., Layout]


@pytest.fixture
def make(llama: Path) -> Make:
    """A layout on GPUs of a kind, whose plans may have forecast seconds."""

    def make(
        kind: str = "vgpu",
        *,
        stages: int = 2,
        replicas: int = 1,
        seconds: float = 0,
        **options: Any,
    ) -> Layout:
        settings = TuneSettings(seq_length=32, **options)
        plans = make_layout(llama, settings, stages=stages, replicas=replicas).plans
        names = {f"vgpu:{number}": f"{kind}:{number}" for number in range(stages * replicas)}
        plans = tuple(renamed(plan, names) for plan in plans)
        if seconds:
            times = Seconds(
                stages=(),
                total_seconds=seconds,
                slowest_seconds=seconds,
                first_token_seconds=None,
                token_seconds=None,
                tokens_per_second=0,
            )
            forecast = replace(plans[0].forecast, seconds=times)
            plans = (replace(plans[0], forecast=forecast), *plans[1:])
        return Layout(plans)

    return make


def metrics(
    layout: Layout, number: int = 4, busy: Sequence[float] = (), **changes: Any
) -> list[dict[str, Any]]:
    """The lines of a run, with the busy share of each process."""
    lines = [asdict(make_step(layout, step, **changes)) for step in range(1, number + 1)]
    for line in lines:
        for process, share in zip(line["processes"], busy, strict=False):
            process["busy_share"] = share
    return lines


def printed(report: RunReport, columns: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=columns).print(render_report(report))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_measurement_lies_beside_the_forecast(make: Make) -> None:
    layout = make(stages=2, replicas=2, seconds=3.0)
    lines = metrics(layout)
    for line, seconds, busy in zip(lines, [9.0, 1.0, 4.0, 2.0], [0.1, 0.5, 0.7, 0.6], strict=True):
        line["seconds"] = seconds
        line["processes"][2]["busy_share"] = busy
    lines[2]["processes"][2].update(allocated_bytes=11, reserved_bytes=2**40)
    lines.insert(2, {"step": 2, "eval_loss": 3.5})
    lines.append({"step": 4, "eval_loss": 2.5})
    report = make_report(layout, lines)
    # The first step is not like the others.
    assert (report.step_seconds, report.tokens_per_second) == (2.0, 50.0)
    assert report.forecast_step_seconds == 3.0
    assert (report.steps, report.skipped_steps) == (4, 0)
    assert (report.first_loss, report.last_loss, report.eval_loss) == (4.0, 1.0, 2.5)
    forecasts = [stage for plan in layout.plans for stage in plan.forecast.devices]
    assert [(d.label, d.device, d.replica) for d in report.devices] == [
        (f"vgpu:{number} (copy {1 + number // 2})", f"vgpu:{number}", number // 2)
        for number in range(4)
    ]
    for device, forecast in zip(report.devices, forecasts, strict=True):
        assert device.forecast_allocated_bytes == forecast.allocated_bytes
        assert device.forecast_reserved_bytes == forecast.reserved_bytes
    third, fourth = report.devices[2:]
    assert third.busy_share == 0.6
    assert fourth.busy_share == 0.75
    assert third.reserved_bytes == 2**40
    assert third.allocated_bytes == fourth.allocated_bytes == forecasts[3].allocated_bytes - MIB


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
@pytest.mark.parametrize(("stages", "replicas", "batch"), [(1, 1, 8), (4, 1, 3), (2, 2, 8)])
def test_what_the_schedule_allows(
    make: Make, schedule: Schedule, stages: int, replicas: int, batch: int
) -> None:
    layout = make(stages=stages, replicas=replicas, batch=batch, schedule=schedule)
    number = batch // replicas
    expected = 1 / stages if schedule == "sequential" else number / (number + stages - 1)
    report = make_report(layout, metrics(layout))
    assert [device.possible_share for device in report.devices] == pytest.approx(
        [expected] * stages * replicas
    )


@pytest.mark.parametrize(("number", "skipped"), [(20, 3), (2, 2)])
def test_skipped_steps_are_counted(make: Make, number: int, skipped: int) -> None:
    layout = make()
    lines = metrics(layout, number)
    for line in lines[:skipped]:
        line["is_skipped"] = True
    report = make_report(layout, lines)
    assert report.skipped_steps == skipped
    assert printed(report, 80)[0].startswith(f"{number} steps ({skipped} skipped), loss 4.0000 →")


# ── runs that are unlike others ──


def test_a_run_that_was_moved(make: Make) -> None:
    """Times, peaks and shares are those of the GPUs that it ended on."""
    before, after = make(stages=2, seconds=7.0), make(stages=4, seconds=3.0, batch=64)
    lines = metrics(before, 5, seconds=8.0)
    for step in (6, 7, 8):
        lines.append(asdict(make_step(after, step, seconds=4.0 if step > 6 else 9.0)))
    report = make_report(after, lines)
    assert (report.steps, report.step_seconds, report.forecast_step_seconds) == (8, 4.0, 3.0)
    assert report.first_loss == 4.0
    assert [device.device for device in report.devices] == list(after.plans[0].devices)

    # Moved, and nothing was left to do.
    report = make_report(after, lines[:5])
    assert (report.steps, report.step_seconds, report.forecast_step_seconds) == (5, 8.0, None)
    assert report.devices == ()
    assert printed(report, 80) == ["5 steps, loss 4.0000 → 0.8000; step time 8.0 s; 12 tokens/s"]


def test_a_run_of_one_step(make: Make) -> None:
    layout = make(seconds=0.05)
    assert printed(make_report(layout, metrics(layout, 1)), 120)[0] == (
        "1 step, loss 4.0000; step time 2.0 s, forecast 50 ms; 50 tokens/s"
    )


# ── as it is printed ──


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("sizes", [2**20, 2**33])
def test_it_is_readable_in_a_terminal(make: Make, columns: int, sizes: int) -> None:
    layout = make("cuda", stages=2, replicas=2, batch=16)
    lines = metrics(layout, busy=[0.6, 0.9])
    for line in lines:
        for process in line["processes"]:
            process["reserved_bytes"] = sizes
    _, empty, head, rule, *rows = printed(make_report(layout, lines), columns)
    assert empty == ""
    assert head.split() == [
        *("GPU", "busy", "possible", "allocated", "forecast", "reserved", "forecast")
    ]
    assert set(rule) == {"─"}
    size = sizes / 2**30
    for number, (row, busy) in enumerate(zip(rows[:4], [60, 90, 75, 75], strict=True)):
        label = f"cuda:{number} (copy {1 + number // 2})"
        assert row.split() == [
            *label.split(), f"{busy}%", "89%", "1.00", "1.00", f"{size:.2f}", "1.00",
        ]  # fmt: skip
    text = " ".join(rows[4:])
    assert text.startswith("in GiB; busy: fraction of time not waiting for other stages")
    assert all(len(line) <= columns for line in (head, rule, *rows))
    assert not any("…" in line for line in (head, *rows))
