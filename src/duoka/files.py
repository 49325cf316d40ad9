"""Files: read within a limit, written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def read_text(path: Path, *, most_bytes: int) -> str:
    """Read a regular file of text.

    Raises
    ------
    OSError
        If it can't be read.
    ValueError
        If it is too long, not a regular file (opening a pipe would wait for ever), or not UTF-8.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content.decode("utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, then rename it, so that it is never seen half-written."""
    content = text.encode("utf-8")
    # Not from `tempfile`, whose files only their owner can read.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
