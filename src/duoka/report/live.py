"""Live memory of duoka processes, published in one small file per process.

The files are in ``/tmp/duoka-UID``, the same directory for every session, job and service of a
user. The directory must belong to the user and be private, otherwise nothing is read or written. A
process replaces its file atomically about once a second. A reader removes the files of ended
processes and files older than a minute.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from duoka.base.files import read_bytes
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import FormatError, MachineError
from duoka.forecast.stage_bytes import StageBytes

_ROOT = Path("/tmp")
_FILE_NAME = re.compile(r"(\d{1,7})-[0-9a-z]{1,20}\.(json|partial)", re.ASCII)
_MAX_BYTES = 2**20
# An older file is stale: its process hangs, or its pid now belongs to another process.
_STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """Memory of a process on a device: `measured` now, `forecast` at the peak of its plan.

    `uuid` is empty for a virtual GPU. `busy_share` is the share of recent time in which the device
    computed; None if unknown.
    """

    pid: int
    model: str
    uuid: str
    measured: StageBytes
    forecast: StageBytes
    busy_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """Content of one process's file."""

    devices: tuple[LiveDevice, ...]


def live_directory() -> Path:
    """Return the directory with the files of this user's processes."""
    return _ROOT / f"duoka-{os.getuid()}"


def publish_memory(devices: Sequence[LiveDevice], name: str) -> None:
    """Write the memory of this process; `name` distinguishes several files of one process."""
    with suppress(FileExistsError):
        live_directory().mkdir(mode=0o700)
    _require_private_directory()
    file = live_directory() / f"{os.getpid()}-{name}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(to_dict(_File(devices=tuple(devices)))), encoding="utf-8")
    partial.replace(file)


def withdraw_memory(name: str) -> None:
    """Remove the file that this process published under a name."""
    with suppress(OSError, MachineError):
        _require_private_directory()
        (live_directory() / f"{os.getpid()}-{name}.json").unlink()


def read_memory() -> list[LiveDevice]:
    """Read the published memory of all processes of this user; remove stale files."""
    devices: list[LiveDevice] = []
    if os.path.lexists(live_directory()):
        _require_private_directory()
        for file in live_directory().iterdir():
            # The file may have just been removed, or may not be duoka's.
            with suppress(OSError, ValueError, FormatError):
                devices += _read(file)
    return sorted(devices, key=lambda device: (device.pid, device.measured.device))


def _require_private_directory() -> None:
    """Raise MachineError unless the directory is private and owned by this user.

    ``/tmp`` is sticky, so other users can't replace a directory that passed this test.
    """
    status = live_directory().lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise MachineError(
            f"the state of duoka processes can't be read: {live_directory()} belongs to another "
            "user, is open to others, or is no directory",
            hint="delete it; duoka creates it again",
        )


def _read(file: Path) -> Iterator[LiveDevice]:
    """Yield the devices of a file; remove the file if it is stale or its process has ended."""
    match = _FILE_NAME.fullmatch(file.name)
    if match is None:
        return
    pid = int(match[1])
    if time.time() - file.lstat().st_mtime > _STALE_SECONDS or not _is_ours(pid):
        file.unlink()
    elif file.suffix == ".json":
        content = parse_json_object(read_bytes(file, most_bytes=_MAX_BYTES), file.name)
        devices = from_dict(_File, content).devices
        yield from (device for device in devices if device.pid == pid)


def _is_ours(pid: int) -> bool:
    """Return True if a process exists and belongs to this user."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
