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

_REFRESH_SECONDS = 1.0  # as often as processes publish their memory


@with_groups
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once, print JSON.")] = False,
) -> None:
    """Watch every GPU: memory by process and kind beside the forecast, and activity.

    [bold]duoka top[/]

    [bold]duoka top[/] --once --json
    """
    if json and not once:
        raise UsageError("--json prints one snapshot", hint="add --once")
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
                    time.sleep(_REFRESH_SECONDS)
                    snapshot = monitor.look()
            signals.forget()
