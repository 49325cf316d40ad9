"""``duoka plot``: draw a run of ``duoka tune``, or a recording of ``duoka top``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duoka.base.progress import say_import

from .groups import with_groups
from .terminal import stdout


@with_groups
def plot(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a run, or a file of duoka top --csv."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to draw it; by default in RUN or beside it."),
    ] = None,
) -> None:
    """Draw a run of `duoka tune`: loss, speed, each GPU's memory beside its forecast.

    Or what `duoka top` recorded: each GPU's memory by kind over time.

    [bold]duoka plot[/] run

    [bold]duoka plot[/] run.csv
    """
    if run.is_file():
        from duoka.tools.top.plot import plot_recording

        file = plot_recording(run, output)
    else:
        say_import("torch")
        from duoka.tuner.plot import plot_run
        from duoka.tuner.run import RunDirectory

        file = plot_run(RunDirectory(run), output)
    stdout().print(f"drawn: {file}", markup=False, soft_wrap=True)
