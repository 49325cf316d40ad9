"""Write patched files, as copies in a directory or over the originals."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from duoka.base.files import why, write_whole
from duoka.errors import MachineError, UsageError

from .patch import Patch
from .sources import SourceError, read_source

OUTPUT = "duoka-fixed"
"""The directory for copies where none is named."""


def apply(patches: Iterable[Patch], directory: str | Path = OUTPUT) -> tuple[Path, ...]:
    """Write patched copies into a directory; the originals stay as they are.

    A file below the working directory keeps its path relative to it, one of an installed package
    its path below `site-packages`; others keep their names, their folders', and what is needed to
    tell them apart.

    Parameters
    ----------
    patches : iterable of Patch
    directory : path
        It is made where it isn't there. Files in it are written over.

    Returns
    -------
    tuple of Path
        The files that were written.

    Raises
    ------
    UsageError
        If a copy would lie where its original does.
    MachineError
        If a file can't be written.
    """
    patches = list(patches)
    targets = [Path(directory) / path for path in _kept_paths([Path(p.file) for p in patches])]
    for patch, target in zip(patches, targets, strict=True):
        if target.resolve() == Path(patch.file).resolve():
            raise UsageError(
                f"the copy of {patch.file} would overwrite it",
                hint="choose another directory, or change the files themselves with --in-place",
            )
    for patch, target in zip(patches, targets, strict=True):
        _write(target, patch.after)
    return tuple(targets)


def apply_in_place(patches: Iterable[Patch]) -> tuple[Path, ...]:
    """Write patched files over the originals, each whole or not at all.

    Returns
    -------
    tuple of Path
        The files that were written.

    Raises
    ------
    UsageError
        If a file is no longer what was checked, or belongs to an installed package, which the
        next installation would undo; nothing has been written then.
    MachineError
        If a file can't be written; those before it in the order of `patches` have been.
    """
    patches = list(patches)
    for patch in patches:
        path = Path(patch.file)
        if _in_packages(path) is not None:
            raise UsageError(
                f"{path} belongs to an installed package",
                hint="write changed copies with --output DIR, and use them as your own model code",
            )
        text = None
        with suppress(SourceError):
            text = read_source(path)
        if text != patch.before:
            raise UsageError(
                f"{path} has changed since it was checked", hint="run the check again, then the fix"
            )
    # A link is followed: what it points to is the file that was checked.
    targets = tuple(Path(patch.file).resolve() for patch in patches)
    for patch, target in zip(patches, targets, strict=True):
        _write(target, patch.after)
    return targets


def _kept_paths(files: list[Path]) -> list[Path]:
    """Return the paths of the copies below the output directory."""
    cwd = Path.cwd()
    bases = [_in_packages(file) or (cwd if file.is_relative_to(cwd) else None) for file in files]
    folders = [file.parent for file, base in zip(files, bases, strict=True) if base is None]
    common = Path(os.path.commonpath(folders)) if folders else Path()
    if all(folder == common for folder in folders):
        common = common.parent
    return [file.relative_to(base or common) for file, base in zip(files, bases, strict=True)]


def _in_packages(file: Path) -> Path | None:
    """Return the `site-packages` directory of a file."""
    names = ("site-packages", "dist-packages")
    return next((folder for folder in file.parents if folder.name in names), None)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise MachineError(f"{path} can't be written: {why(error)}") from error
