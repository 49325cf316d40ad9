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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import FormatError, MachineError
from duoka.forecast.stage_bytes import StageBytes

_ROOT = Path("/tmp")
_NAME = re.compile(r"(\d{1,7})-[0-9a-z]{1,20}\.(json|partial)", re.ASCII)
_MOST_BYTES = 2**20
# Its process hangs, or its number is another one's by now.
_STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """The memory that a process has on a device: now, and at its plan's peak.

    `uuid` is the GPU's, empty for a virtual one; `busy_share` how much of the last seconds the
    device has computed, where that is known.
    """

    pid: int
    model: str
    uuid: str
    measured: StageBytes
    forecast: StageBytes
    busy_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    devices: tuple[LiveDevice, ...]


def directory() -> Path:
    """Where the files of this user's processes lie."""
    return _ROOT / f"duoka-{os.getuid()}"


def publish(devices: Sequence[LiveDevice], name: str) -> None:
    """Write what this process has; `name` tells apart what one process writes.

    Raises
    ------
    OSError, MachineError
        If that can't be.
    """
    with suppress(FileExistsError):
        directory().mkdir(mode=0o700)
    with _opened() as folder:
        stem = f"{os.getpid()}-{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(f"{stem}.partial", flags, 0o600, dir_fd=folder), "w") as file:
            json.dump(to_dict(_File(devices=tuple(devices))), file)
        os.replace(f"{stem}.partial", f"{stem}.json", src_dir_fd=folder, dst_dir_fd=folder)


def withdraw(name: str) -> None:
    """Remove what this process has written under a name."""
    with suppress(OSError, MachineError), _opened() as folder:
        os.unlink(f"{os.getpid()}-{name}.json", dir_fd=folder)


def read() -> list[LiveDevice]:
    """What all processes of this user have; files that are stale are removed.

    Raises
    ------
    MachineError
        If the directory isn't this user's own, or is open to others.
    """
    devices: list[LiveDevice] = []
    if os.path.lexists(directory()):
        with _opened() as folder:
            for name in os.listdir(folder):  # noqa: PTH208  (of the descriptor)
                # It goes this moment, or isn't what duoka writes.
                with suppress(OSError, ValueError, FormatError):
                    devices += _read(name, folder)
    return sorted(devices, key=lambda device: (device.pid, device.measured.device))


@contextmanager
def _opened() -> Iterator[int]:
    """The directory, by a descriptor: nobody can put another one in its place meanwhile."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(directory(), flags)
    except OSError as error:
        raise _untrusted(f"can't be opened: {error.strerror}") from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise _untrusted("belongs to another user, or is open to others")
        yield folder
    finally:
        os.close(folder)


def _untrusted(what: str) -> MachineError:
    return MachineError(
        f"what processes of duoka say isn't known: {directory()} {what}",
        hint="remove it; duoka makes it anew",
    )


def _read(name: str, folder: int) -> tuple[LiveDevice, ...]:
    match = _NAME.fullmatch(name)
    if match is None:
        return ()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        status, pid = os.fstat(file.fileno()), int(match[1])
        if not _is_alive(pid) or time.time() - status.st_mtime > _STALE_SECONDS:
            os.unlink(name, dir_fd=folder)
            return ()
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_size > _MOST_BYTES or match[2] != "json":
            return ()
        devices = from_dict(_File, parse_json_object(file.read(_MOST_BYTES), name)).devices
    return tuple(device for device in devices if device.pid == pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's, whose file this isn't
        pass
    return True
