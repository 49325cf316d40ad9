"""Output: answers on the standard output, all else on the standard error.

rich leaves colours out where the output is no terminal, and where NO_COLOR is set. What a model
or a checkpoint says never reaches a terminal as a command to it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import typer
from rich import box
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
from rich.table import Table
from rich.text import Text

from duoka.base.files import write_whole
from duoka.base.progress import heard_by
from duoka.base.text import printable
from duoka.errors import UsageError

_HINT = "give a file in an existing, writable directory"


def answer(text: str) -> None:
    """Write a part of an answer at once: unchanged to a file or pipe, harmless to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def answer_stream(pieces: Iterator[str], waiting: str) -> None:
    """Write the pieces of an answer, and until the first of them show that work goes on."""
    with working(waiting):
        first_piece = next(pieces, "")
    for piece in chain([first_piece], pieces):
        answer(piece)
    answer("\n")


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render; names out of a checkpoint or a plan's file can't give commands to a terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to `main`; rich would end the process."""
        raise BrokenPipeError


def stdout() -> Console:
    """Return the console for answers."""
    return _Console(highlight=False)


def stderr() -> Console:
    """Return the console for everything else."""
    return _Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print a line on the standard error, unwrapped."""
    stderr().print(text, markup=False, soft_wrap=True)


def print_json(data: object) -> None:
    """Print data as JSON on the standard output."""
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False))


def new_table(*columns: str, num_text_columns: int = 1, caption: str = "") -> Table:
    """Make a table of figures: columns of text on the left, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        is_text = place < num_text_columns
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold" if is_text else "ellipsis",
        )
    table.caption, table.caption_justify = Text(caption) if caption else None, "left"
    return table


@contextmanager
def working(what: str = "") -> Iterator[None]:
    """Show the current work: in place on a terminal, else line by line."""
    console = stderr()
    if console.is_terminal:
        with console.status(Text(what)) as status, heard_by(lambda text: status.update(Text(text))):
            yield
        return

    printed: set[str] = set()

    def show(text: str) -> None:
        if text not in printed:
            printed.add(text)
            console.print(text, markup=False, soft_wrap=True)

    if what:
        show(what)
    with heard_by(show):
        yield


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


def check_file(file: Path | None, what: str) -> None:
    """Refuse an unwritable file, before minutes are spent on its content."""
    if file is None:
        return
    why = _obstacle(file)
    if why:
        raise UsageError(f"{what} can't be written to {str(file)!r}: {why}", hint=_HINT)


def write_file(file: Path, text: str) -> None:
    """Write a file whole or not at all, and say so."""
    try:
        write_whole(file, text)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe or a device
            raise UsageError(
                f"{str(file)!r} can't be written: {error.strerror}", hint=_HINT
            ) from error
        error.filename = error.filename or str(file)  # writing knows of no name
        raise
    note(f"saved to {file}")


def _obstacle(file: Path) -> str:
    if not file.name or str(file) == "-":
        return "that is not a file name"
    if file.is_dir():
        return os.strerror(errno.EISDIR)
    if not file.parent.is_dir():
        return os.strerror(errno.ENOTDIR if file.parent.exists() else errno.ENOENT)
    return "" if os.access(file.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
