"""Where things are printed: answers on the standard output, all else on the standard error.

rich leaves colours out where the output is no terminal, and where NO_COLOR is set. What a model
or a checkpoint says never reaches a terminal as a command to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment

from duoka.base.text import printable

_NARROWEST = 20
_UNKNOWN = 80  # a terminal that says it has no columns doesn't know how many


def answer(text: str) -> None:
    """Write a piece of an answer at once: as it is into a file or pipe, harmless to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render; names out of a checkpoint or a plan's file can't give commands to a terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Leave it to `main`; rich would end the process."""
        raise BrokenPipeError


def stdout() -> Console:
    """For the answer."""
    return _Console(highlight=False)


def stderr() -> Console:
    """For everything else."""
    return _Console(stderr=True, highlight=False)


def correct_columns() -> None:
    """Let nothing be printed for a terminal that is said to have no columns, or next to none."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST if int(told) else _UNKNOWN)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say that something takes a while, on a terminal only; what is given says something else."""
    console = stderr()
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield status.update


@contextmanager
def progress_bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show progress bars, on a terminal only.

    What is given makes a bar by its label; the bar is driven by (done, total), and is seen from
    the first time on.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def bar(label: str) -> Callable[[int, int], None]:
            task = progress.add_task(label, total=None, visible=False)

            def drive(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total, visible=True)

            return drive

        yield bar
