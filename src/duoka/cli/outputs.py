"""Files that a command writes: looked at before the work, written whole after it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from duoka.base.files import write_whole
from duoka.errors import UsageError

from .terminal import stderr

# Another name may do better; of the rest the machine is the cause.
_OF_THE_NAME = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
_HINT = "name a file in a directory that is there and that you may write to"


def check(file: Path | None, what: str) -> None:
    """Refuse a file that can't be written, before minutes are spent on what goes into it.

    Raises
    ------
    UsageError
        If it can't.
    """
    if file is None:
        return
    named = file.name and str(file) != "-"
    why = _obstacle(file) if named else "that is no name of a file"
    if why:
        raise _refusal(file, what, why)


def write(file: Path, text: str, what: str) -> None:
    """Write a file whole or not at all, and say so."""
    try:
        write_whole(file, text)
    except OSError as error:
        if error.errno in _OF_THE_NAME:
            raise _refusal(file, what, str(error.strerror)) from error
        error.filename = error.filename or str(file)  # writing knows of no name
        raise
    stderr().print(f"saved to {file}", markup=False, soft_wrap=True)


def _obstacle(file: Path) -> str:
    try:
        folder = file.parent.stat()
        if not stat.S_ISDIR(folder.st_mode):
            return os.strerror(errno.ENOTDIR)
        if file.is_dir():
            return os.strerror(errno.EISDIR)
        may_write = os.access(file.parent, os.W_OK | os.X_OK)
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:  # a null character
        return str(error)
    return "" if may_write else os.strerror(errno.EACCES)


def _refusal(file: Path, what: str, why: str) -> UsageError:
    return UsageError(f"{what} can't be written to {str(file)!r}: {why}", hint=_HINT)
