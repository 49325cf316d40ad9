"""Directories: where a checkpoint's files lie, and which of them may be read.

A local directory may hold anything: links that lead elsewhere, pipes, files that a download hasn't
filled, pointers that git-lfs left in place of files. Here that is noticed and named before a file
is believed. Nothing here knows what the files mean.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from duoka.base.files import Stamp, read_bytes
from duoka.errors import CheckpointError

from .headers import TensorInfo, is_plain_name, read_header, reading

if TYPE_CHECKING:
    from .hub.snapshot import HubSnapshot

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes there are."""

# What belongs to a checkpoint: other files in the directory are nobody's business.
_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".json",
    ".model",
    ".txt",
    ".py",
    ".jinja",
    ".tiktoken",
    ".vocab",
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # what git-lfs allows
CHAT_TEMPLATES = "additional_chat_templates"

Folder: TypeAlias = "LocalFolder | HubSnapshot"
"""Files of one checkpoint, here or on a server."""


class LocalFolder:
    """A directory on this machine.

    CheckpointError is raised for a file in it that is a link that leads elsewhere, no regular file,
    or not filled yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = _survey(path)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def source(self) -> str:
        """Its path."""
        return str(self._path)

    def names(self) -> frozenset[str]:
        """The files that belong to a checkpoint, as far as they are there."""
        return self._names

    def size(self, name: str) -> int:
        """Bytes of a file; none of them is read, unless it is so short that it is suspicious."""
        return self._whole(name).num_bytes

    def fetch(self, name: str) -> Path:
        """The path of a file that is no pointer and has been filled."""
        self._whole(name)
        return self._path / name

    def headers(self, names: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
        """What safetensors files hold."""
        return {name: self._header(name) for name in names}

    def _header(self, name: str) -> dict[str, TensorInfo]:
        self._whole(name)
        return read_header(self._path / name)

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of these files are not there."""
        return tuple(name for name in names if name not in self._names)

    def download(self, names: Sequence[str], progress: Progress | None = None) -> None:
        """Nothing is downloaded into a local directory; its files are looked at once more."""
        for name in names:
            self._whole(name)

    def _whole(self, name: str) -> Stamp:
        path = self._path / name
        with reading(path, hint="put the file itself there"):
            stamp = Stamp.of(path.stat())
            is_short = stamp.num_bytes <= _POINTER_BYTES
            start = read_bytes(path, most_bytes=_POINTER_BYTES) if is_short else b""
        if start.startswith(_POINTER):
            raise CheckpointError(
                f"{path} is not the file, but the pointer that git-lfs puts in its place",
                hint=f"fetch the files: git -C {self._path} lfs pull",
            )
        # aria2 makes a file in its full length, and fills it.
        if (self._path / f"{name}.aria2").exists():
            raise CheckpointError(
                f"{path} is not complete: {name}.aria2 lies beside it",
                hint="wait until the download is done, or start it again",
            )
        return stamp


def _survey(root: Path) -> frozenset[str]:
    """The checkpoint's files in a directory."""
    names: set[str] = set()
    allowed = _allowed(root)
    with reading(root), os.scandir(root) as scanned:
        entries = list(scanned)
    for entry in entries:
        path = root / entry.name
        if entry.name.endswith(_SUFFIXES) and is_plain_name(entry.name):
            if entry.is_symlink():
                _refuse_foreign(path, allowed)
            if _is_regular(path):
                names.add(entry.name)
    for path in (root / CHAT_TEMPLATES).glob("*.jinja"):
        _refuse_foreign(path, allowed)
        _is_regular(path)
    return frozenset(names)


def _allowed(root: Path) -> tuple[str, ...]:
    """Where links of a directory may lead: into it, or into the Hub cache's blobs if it lies there.

    In the Hub cache, ``models--org--name/snapshots/COMMIT`` holds links into
    ``models--org--name/blobs``, and those may be links into ``blobs``, which models share.
    """
    real = root.resolve()
    places = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        places += [real.parents[1] / "blobs", real.parents[2] / "blobs"]
    return tuple(f"{place}{os.sep}" for place in places)


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path, with all links followed, stays in a directory or its Hub cache."""
    return str(path.resolve()).startswith(_allowed(root))


def _refuse_foreign(path: Path, allowed: tuple[str, ...]) -> None:
    try:
        target = str(path.resolve())
    except (OSError, RuntimeError) as error:  # links in a circle
        raise CheckpointError(
            f"{path} is a link that leads nowhere: {error}", hint="put the file itself there"
        ) from error
    if not target.startswith(allowed):
        raise CheckpointError(
            f"{path} is a link to {target}, which is outside of the checkpoint's directory",
            hint="copy the file there, or give the directory that holds it",
        )


def _is_regular(path: Path) -> bool:
    """Whether a file is there; what is neither file nor directory is refused."""
    try:
        mode = path.stat().st_mode
    except OSError:  # a link to nothing, or gone since: as good as not there
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{path} is not a regular file", hint="put the file itself there, or remove it"
        )
    return stat.S_ISREG(mode)
