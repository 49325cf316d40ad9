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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from duoka.base.files import read_bytes
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
    """Write what this process has; `name` tells apart what one process writes."""
    with suppress(FileExistsError):
        directory().mkdir(mode=0o700)
    _refuse_untrusted()
    file = directory() / f"{os.getpid()}-{name}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(to_dict(_File(devices=tuple(devices)))), encoding="utf-8")
    partial.replace(file)


def withdraw(name: str) -> None:
    """Remove what this process has written under a name."""
    with suppress(OSError, MachineError):
        _refuse_untrusted()
        (directory() / f"{os.getpid()}-{name}.json").unlink()


def read() -> list[LiveDevice]:
    """What all processes of this user have; files that are stale are removed."""
    devices: list[LiveDevice] = []
    if os.path.lexists(directory()):
        _refuse_untrusted()
        for file in directory().iterdir():
            # It goes this moment, or isn't what duoka writes.
            with suppress(OSError, ValueError, FormatError):
                devices += _read(file)
    return sorted(devices, key=lambda device: (device.pid, device.measured.device))


def _refuse_untrusted() -> None:
    """Refuse a directory of another's; in ``/tmp`` nobody else can put one in the place of ours."""
    status = directory().lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise MachineError(
            f"what processes of duoka say isn't known: {directory()} belongs to another user, is "
            "open to others, or is no directory",
            hint="remove it; duoka makes it anew",
        )


def _read(file: Path) -> Iterator[LiveDevice]:
    match = _NAME.fullmatch(file.name)
    if match is None:
        return
    pid = int(match[1])
    if time.time() - file.lstat().st_mtime > _STALE_SECONDS or not _is_ours(pid):
        file.unlink()
    elif file.suffix == ".json":
        content = parse_json_object(read_bytes(file, most_bytes=_MOST_BYTES), file.name)
        devices = from_dict(_File, content).devices
        yield from (device for device in devices if device.pid == pid)


def _is_ours(pid: int) -> bool:
    """Whether a process is there, and this user's."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
