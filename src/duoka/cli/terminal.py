"""Where things are printed: answers on the standard output, all else on the standard error.

rich leaves colours out where the output is no terminal, and where NO_COLOR is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`; rich would end the process."""
        raise BrokenPipeError


def stdout() -> Console:
    """For the answer."""
    return _Console(highlight=False)


def stderr() -> Console:
    """For everything else."""
    return _Console(stderr=True, highlight=False)


@contextmanager
def loading() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, on a terminal only, and give what it is driven by: (done, total)."""
    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
