"""Directories: the files of a local checkpoint, each checked before reading.

A local directory may contain anything: links that lead out of it, pipes, files of an unfinished
download, git-lfs pointers. Files of a checkpoint are not parsed here.
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
"""Called with the bytes done so far, and the total bytes."""

# Files with other endings don't belong to a checkpoint, and are ignored.
_SUFFIXES = (
    *(".safetensors", ".bin", ".json", ".model", ".txt", ".py"),
    *(".jinja", ".tiktoken", ".vocab"),
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # the maximum size of a git-lfs pointer
CHAT_TEMPLATES = "additional_chat_templates"

Folder: TypeAlias = "LocalFolder | HubSnapshot"
"""The files of one checkpoint, on this machine or on the Hub."""


class LocalFolder:
    """A directory on this machine.

    CheckpointError is raised for a link that leads out of the directory, for an irregular file, and
    for a file that isn't completely downloaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = str(path)
        self._names = _list_names(path)

    def names(self) -> frozenset[str]:
        """Return the names of the checkpoint's files."""
        return self._names

    def size(self, name: str) -> int:
        """Return the size of a complete file in bytes."""
        return self._check_complete(name).num_bytes

    def fetch(self, name: str) -> Path:
        """Return the path of a file; raise CheckpointError for an incomplete file."""
        self._check_complete(name)
        return self.path / name

    def headers(self, names: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
        """Read the headers of safetensors files."""
        return {name: read_header(self.fetch(name)) for name in names}

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of absent files."""
        return tuple(name for name in names if name not in self._names)

    def download(self, names: Sequence[str], progress: Progress | None = None) -> None:
        """Check the files once more; nothing is downloaded into a local directory."""
        for name in names:
            self._check_complete(name)

    def _check_complete(self, name: str) -> Stamp:
        """Return the stamp of a file; raise CheckpointError for a pointer or a partial download."""
        path = self.path / name
        with reading(path, hint="replace the link or pointer by the file itself"):
            stamp = Stamp.of(path.stat())
            is_short = stamp.num_bytes <= _POINTER_BYTES
            start = read_bytes(path, most_bytes=_POINTER_BYTES) if is_short else b""
        if start.startswith(_POINTER):
            hint = f"download the files: git -C {self.path} lfs pull"
            raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself", hint=hint)
        # aria2 creates a file in its full length and fills it; until then NAME.aria2 exists.
        if (self.path / f"{name}.aria2").exists():
            hint = "wait until the download ends, or start it again"
            raise CheckpointError(f"{path} is incomplete: {name}.aria2 exists beside it", hint=hint)
        return stamp


def _list_names(root: Path) -> frozenset[str]:
    """Return the names of a checkpoint's files in a directory; refuse links to other places."""
    with reading(root):
        entries = list(root.iterdir())
    files = [f for f in entries if f.name.endswith(_SUFFIXES) and is_plain_name(f.name)]
    files += (root / CHAT_TEMPLATES).glob("*.jinja")
    allowed = _allowed_roots(root)
    for path in files:
        target = os.path.realpath(path)
        if not target.startswith(allowed):
            raise CheckpointError(
                f"{path} is a link to {target}, outside the checkpoint's directory",
                hint="copy the file there, or give the directory that contains it",
            )
    return frozenset(path.name for path in filter(_is_regular, files) if path.parent == root)


def _allowed_roots(root: Path) -> tuple[str, ...]:
    """Return the directories to which links may lead: the root, and in the Hub's cache its blobs.

    In the Hub's cache, ``models--org--name/snapshots/COMMIT`` contains links to files in
    ``models--org--name/blobs``, which may be links to files in ``blobs``, which models share.
    """
    real = root.resolve()
    places = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        places += [real.parents[1] / "blobs", real.parents[2] / "blobs"]
    return tuple(f"{place}{os.sep}" for place in places)


def is_inside(path: Path, root: Path) -> bool:
    """Return True if a path, links resolved, is in a directory or in the blobs of its Hub cache."""
    return str(path.resolve()).startswith(_allowed_roots(root))


def _is_regular(path: Path) -> bool:
    """Return True for a regular file; False for a directory or dangling link; refuse others."""
    try:
        mode = path.stat().st_mode
    except OSError:  # a dangling link, or removed meanwhile
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        hint = "replace the link or pointer by the file itself, or remove it"
        raise CheckpointError(f"{path} is not a regular file", hint=hint)
    return stat.S_ISREG(mode)
