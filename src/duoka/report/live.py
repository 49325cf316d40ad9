"""What processes of duoka say of their memory while they run: a small file for each.

The files lie in ``/tmp/duoka-UID``, which is the same whatever session, job or service a process is
of. That directory has to be this user's own and closed to all others, or nothing is written or read
there. A file is replaced whole, about once a second; one whose process is gone, or that nobody has
replaced for long, is removed by whoever looks next.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import FormatError, MachineError
from duoka.forecast.stage_bytes import StageBytes

_ROOT = Path("/tmp")
_NAME = re.compile(r"(\d{1,7})-[0-9a-z]{1,20}\.(?:json|partial)", re.ASCII)
_MOST_BYTES = 2**20
# Its process hangs, or its number is another one's by now.
_STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """The memory of a process on one device.

    `measured` is now, `forecast` the plan's peak, both by kind. `uuid` is the GPU's, empty for a
    virtual one; `busy_share` how much of the last seconds the device has computed, where that is
    known.
    """

    uuid: str
    measured: StageBytes
    forecast: StageBytes
    peak_reserved_bytes: int
    busy_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """What a process says of itself."""

    pid: int
    model: str
    devices: tuple[LiveDevice, ...]


def directory() -> Path:
    """Where the files of this user's processes lie."""
    return _ROOT / f"duoka-{os.getuid()}"


def publish(process: LiveProcess, name: str) -> None:
    """Write what a process says, whole or not at all; `name` tells apart what one process writes.

    Raises
    ------
    OSError, MachineError
        If that can't be.
    """
    with suppress(FileExistsError):
        directory().mkdir(mode=0o700)
    with _opened() as folder:
        partial = f"{process.pid}-{name}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=folder), "w") as file:
            json.dump(to_dict(process), file)
        os.replace(partial, f"{process.pid}-{name}.json", src_dir_fd=folder, dst_dir_fd=folder)


def withdraw(name: str) -> None:
    """Remove what this process has written under a name."""
    with suppress(OSError, MachineError), _opened() as folder:
        os.unlink(f"{os.getpid()}-{name}.json", dir_fd=folder)


def read() -> list[LiveProcess]:
    """What all processes of this user say, by their numbers; what is stale is removed.

    Raises
    ------
    MachineError
        If the directory isn't this user's own, or is open to others.
    """
    if not directory().exists():
        return []
    processes = []
    with _opened() as folder:
        for name in os.listdir(folder):  # noqa: PTH208  (a path could be exchanged)
            with suppress(OSError, ValueError, FormatError):  # it goes this moment, or isn't ours
                process = _read(name, folder)
                processes += [] if process is None else [process]
    return sorted(processes, key=lambda process: process.pid)


@contextmanager
def _opened() -> Iterator[int]:
    """The directory, by a descriptor: nobody can put another one in its place meanwhile."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(directory(), flags)
    except OSError as error:
        raise _untrusted(f"can't be opened: {error.strerror}") from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid():
            raise _untrusted("belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _untrusted("is open to other users")
        yield folder
    finally:
        os.close(folder)


def _untrusted(what: str) -> MachineError:
    return MachineError(
        f"{directory()} {what}: processes of duoka can't say there what memory they have",
        hint="remove it; duoka makes it anew",
    )


def _read(name: str, folder: int) -> LiveProcess | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
    )
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        pid = int(match[1])
        if not _is_alive(pid) or time.time() - status.st_mtime > _STALE_SECONDS:
            os.unlink(name, dir_fd=folder)
            return None
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_size > _MOST_BYTES or not name.endswith(".json"):
            return None
        process = from_dict(LiveProcess, parse_json_object(file.read(_MOST_BYTES), name))
    return process if process.pid == pid else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
