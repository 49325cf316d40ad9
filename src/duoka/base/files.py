"""Files and directories: read within a size limit, written atomically."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from duoka.errors import DuokaError, UsageError

_NOT_REGULAR = "it is not a regular file"
_SYSTEM = re.compile(r"/(dev|proc|sys)(/(?!shm(/|$)).*)?$")


class Stamp(NamedTuple):
    """Identity of a file's content, which changes if the file is rewritten or replaced."""

    num_bytes: int
    modified_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Make the stamp of a file's status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def why(error: OSError | ValueError) -> str:
    """Describe an error of reading or writing, without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
    return str(getattr(error, "strerror", None) or error)


def cache_directory() -> Path:
    """Return the directory for cached files: DUOKA_CACHE, or `duoka` in the user's cache."""
    if cache := os.environ.get("DUOKA_CACHE"):
        return Path(cache)
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "duoka"
    try:
        return Path.home() / ".cache" / "duoka"
    except RuntimeError:
        # A user without a home directory, as in some containers: a path where no file can be made.
        return Path(os.devnull) / "duoka"


@contextmanager
def reading(name: object, hint: str, kind: type[DuokaError] = UsageError) -> Iterator[None]:
    """Raise an error of a kind, with a hint, if the file `name` can't be read."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise kind(f"{name} can't be read: {why(error)}", hint=hint) from error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; raise ValueError for other kinds, without waiting for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        file = os.fdopen(descriptor, "rb")
    except OSError:  # a directory
        os.close(descriptor)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ValueError(_NOT_REGULAR)
    return file


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """Read a regular file; raise ValueError if larger than `most_bytes`."""
    with open_regular(path) as file:
        # Check the size first: read(n) allocates n bytes even for a small file.
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(size + 1)
    if max(size, len(content)) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content


def read_text(path: Path, *, most_bytes: int) -> str:
    """Read a regular file of text in UTF-8."""
    return read_bytes(path, most_bytes=most_bytes).decode("utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: under another name, then renamed, so no reader sees a part of it.

    An existing file's permissions are kept. A symbolic link is replaced, not followed.
    """
    content = text.encode("utf-8")
    mode = _mode_to_keep(path)
    # `tempfile` would make a file that only its owner can read.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            if mode is not None:
                with suppress(OSError):  # not every file system has permissions
                    os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def keep(path: Path, text: str) -> None:
    """Write a file of the cache, with its directory; errors of the file system are ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def set_new_mode(path: Path) -> None:
    """Set a new file's permissions by the umask; some libraries create files with fewer."""
    sample = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    sample.touch()
    shutil.copymode(sample, path)
    sample.unlink()


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; at the end it is flushed and renamed to `path`.

    `path` may be absent or an empty directory. After an error the temporary directory is removed;
    if the process is killed, ``.NAME.….partial`` remains.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        for entry in (*partial.rglob("*"), partial):
            _sync(entry)
        partial.replace(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode_to_keep(path: Path) -> int | None:
    """Return the permissions that a rewritten file must keep; None for a new file or a directory.

    Raises OSError for paths of the operating system and for special files.
    """
    if _SYSTEM.match(str(path.parent.resolve())):
        # /dev/stdout may be a link to a regular file: renaming would replace the link.
        raise OSError(errno.EINVAL, "that path belongs to the operating system", str(path))
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode)
    if stat.S_ISDIR(mode):
        return None
    raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
