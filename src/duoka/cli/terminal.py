"""Output: answers on the standard output, everything else on the standard error.

rich prints no colours if the output is not a terminal or NO_COLOR is set. Text of a model or a
checkpoint can't send control sequences to a terminal: control characters are escaped.
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
    """Write and flush a part of an answer; on a terminal escape its control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def answer_stream(pieces: Iterator[str], waiting: str) -> None:
    """Write the parts of an answer as they come; show the status `waiting` until the first."""
    with working(waiting):
        first_piece = next(pieces, "")
    for piece in chain([first_piece], pieces):
        answer(piece)
    answer("\n")


class _Console(Console):
    """Console that escapes control characters and reports a broken pipe to `main`."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render with control characters escaped, as in names from a checkpoint or plan file."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Let `main` handle a broken pipe; rich would exit the process."""
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
    """Create a table: `num_text_columns` columns of text, then columns of numbers."""
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
    """Show the current work: one updated line on a terminal, else a line per new message."""
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

    Yields a function that creates a bar with a label and returns the bar's `update(done, total)`.
    A bar is visible from its first update.
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
    """Raise UsageError for an unwritable file, before its content is computed."""
    if file is None:
        return
    why = _why_unwritable(file)
    if why:
        raise UsageError(f"{what} can't be written to {str(file)!r}: {why}", hint=_HINT)


def write_file(file: Path, text: str) -> None:
    """Write a file atomically, and report it."""
    try:
        write_whole(file, text)
    except OSError as error:
        error.filename = error.filename or str(file)  # errors of write() have no file name
        raise
    note(f"saved to {file}")


def _why_unwritable(file: Path) -> str:
    """Return why a file can't be created or replaced; "" if it can."""
    if not file.name or str(file) == "-":
        return "that is not a file name"
    if file.is_dir():
        return os.strerror(errno.EISDIR)
    if not file.parent.is_dir():
        return os.strerror(errno.ENOTDIR if file.parent.exists() else errno.ENOENT)
    return "" if os.access(file.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
