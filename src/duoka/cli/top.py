"""``duoka top``: live view of every GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from duoka.base.serialization import to_dict
from duoka.errors import UsageError

from . import signals
from .groups import with_groups
from .terminal import check_file, print_json, stdout

if TYPE_CHECKING:
    from duoka.tools.top.snapshot import GpuSnapshot, Monitor


@with_groups
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once, print JSON.")] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append one row per GPU to a CSV file.")
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds between refreshes.")
    ] = 1.0,
) -> None:
    """Watch every GPU: memory by process and kind beside the forecast, and activity.

    [bold]duoka top[/]

    [bold]duoka top[/] --once --json

    [bold]duoka top[/] --csv run.csv --interval 5
    """
    if json and not once:
        raise UsageError("--json prints one snapshot", hint="add --once")
    if not 0.1 <= interval <= 86400:
        raise UsageError(
            f"--interval {interval:g} is out of range", hint="use 0.1 to 86400 seconds"
        )
    check_file(csv, "the recording")
    from duoka.tools.top.record import csv_file
    from duoka.tools.top.show import View
    from duoka.tools.top.snapshot import Monitor

    console = stdout()
    with ExitStack() as opened:
        monitor = opened.enter_context(closing(Monitor()))
        takers: list[Callable[[GpuSnapshot], None]] = []
        if csv is not None:
            takers.append(opened.enter_context(csv_file(csv)))
        ends = once or not (console.is_terminal or takers)
        if console.is_terminal and not ends:
            screen = opened.enter_context(Live(console=console, auto_refresh=False, screen=True))
            takers.append(lambda now: screen.update(View(now, " · Ctrl-C quits"), refresh=True))
        snapshot = _take_snapshots(monitor, takers, None if ends else interval)
    if json:
        print_json(to_dict(snapshot))
    elif ends:
        console.print(View(snapshot))


def _take_snapshots(
    monitor: Monitor, takers: Sequence[Callable[[GpuSnapshot], None]], interval: float | None
) -> GpuSnapshot:
    """Pass snapshots to `takers` until Ctrl-C, or one if `interval` is None; return the last."""
    snapshot = monitor.look()
    try:
        while True:
            for take in takers:
                take(snapshot)
            if interval is None:
                break
            time.sleep(interval)
            snapshot = monitor.look()
    except KeyboardInterrupt:
        signals.forget()
    return snapshot
