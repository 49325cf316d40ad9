"""``duoka top``: live view of every GPU."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import Annotated

import typer
from rich.live import Live

from duoka.base.serialization import to_dict
from duoka.errors import UsageError

from . import signals
from .groups import with_groups
from .terminal import print_json, stdout


@with_groups
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once, print JSON.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds between refreshes.")
    ] = 1.0,
) -> None:
    """Watch every GPU: memory by process and kind beside the forecast, and activity.

    [bold]duoka top[/]

    [bold]duoka top[/] --once --json
    """
    if json and not once:
        raise UsageError("--json prints one snapshot", hint="add --once")
    if not 0.1 <= interval <= 86400:
        raise UsageError(
            f"--interval {interval:g} is out of range", hint="use 0.1 to 86400 seconds"
        )
    from duoka.tools.top.show import View
    from duoka.tools.top.snapshot import Monitor

    console = stdout()
    with closing(Monitor()) as monitor:
        snapshot = monitor.look()
        if json:
            print_json(to_dict(snapshot))
        elif once or not console.is_terminal:
            console.print(View(snapshot))
        else:
            with (
                suppress(KeyboardInterrupt),
                Live(console=console, auto_refresh=False, screen=True) as screen,
            ):
                while True:
                    screen.update(View(snapshot, " · Ctrl-C quits"), refresh=True)
                    time.sleep(interval)
                    snapshot = monitor.look()
            signals.forget()
