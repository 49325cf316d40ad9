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
"""Default directory for patched copies."""


def apply(patches: Iterable[Patch], directory: str | Path = OUTPUT) -> tuple[Path, ...]:
    """Write patched copies into a directory; the originals stay as they are.

    A file below the working directory keeps its path relative to that directory; a file of an
    installed package keeps its path below `site-packages`. All other files keep their paths below
    the deepest directory that they have in common, or below its parent if all lie directly in it.

    Parameters
    ----------
    patches : iterable of Patch
    directory : path
        Created if it doesn't exist. Files in it are overwritten.

    Returns
    -------
    tuple of Path
        The files that were written.

    Raises
    ------
    UsageError
        If a copy would overwrite its original.
    MachineError
        If a file can't be written.
    """
    patches = list(patches)
    targets = [Path(directory) / path for path in _kept_paths([Path(p.file) for p in patches])]
    for patch, target in zip(patches, targets, strict=True):
        if target.resolve() == Path(patch.file).resolve():
            hint = "choose another directory, or change the files themselves with --in-place"
            raise UsageError(f"the copy of {patch.file} would overwrite it", hint=hint)
    return _write_all(patches, targets)


def apply_in_place(patches: Iterable[Patch]) -> tuple[Path, ...]:
    """Write patched files over the originals, each whole or not at all.

    Returns
    -------
    tuple of Path
        The files that were written.

    Raises
    ------
    UsageError
        If a file has changed since the check, or belongs to an installed package, where the next
        installation would undo the change. Nothing has been written then.
    MachineError
        If a file can't be written; the files of earlier patches have been written then.
    """
    patches = list(patches)
    for patch in patches:
        path = Path(patch.file)
        if _in_packages(path) is not None:
            hint = "without --in-place, use the copies in duoka-fixed as your own model code"
            raise UsageError(f"{path} belongs to an installed package", hint=hint)
        text = None
        with suppress(SourceError):
            text = read_source(path)
        if text != patch.before:
            raise UsageError(
                f"{path} has changed since it was checked", hint="run the check again, then the fix"
            )
    # A symbolic link is followed: its target is the file that was checked.
    return _write_all(patches, [Path(patch.file).resolve() for patch in patches])


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
    """Return the `site-packages` directory of a file; None if the file isn't in one."""
    names = ("site-packages", "dist-packages")
    return next((folder for folder in file.parents if folder.name in names), None)


def _write_all(patches: list[Patch], paths: list[Path]) -> tuple[Path, ...]:
    """Write patched files with their directories; raise MachineError if impossible."""
    for patch, path in zip(patches, paths, strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, patch.after)
        except OSError as error:
            raise MachineError(f"{path} can't be written: {why(error)}") from error
    return tuple(paths)
