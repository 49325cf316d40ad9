"""``duoka plot``: draw a run of ``duoka tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duoka.base.progress import say_import

from .groups import with_groups
from .terminal import stdout


@with_groups
def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file; by default in RUN.")
    ] = None,
) -> None:
    """Plot the loss and the speed of a run of `duoka tune`.

    [bold]duoka plot[/] run
    """
    say_import("torch")
    from duoka.tuner.plot import plot_run
    from duoka.tuner.run import RunDirectory

    file = plot_run(RunDirectory(run), output)
    stdout().print(f"saved to {file}", markup=False, soft_wrap=True)
