"""Patched files: as copies in a directory of their own, or over the originals."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import MachineError, UsageError
from ..files import why, write_whole
from .patches import Patch
from .sources import SourceError, read_source

OUTPUT = "duoka-fixed"
"""The directory for copies where none is named."""


def apply(patches: Iterable[Patch], directory: str | Path = OUTPUT) -> tuple[Path, ...]:
    """Write patched copies into a directory; the originals stay as they are.

    A file below the working directory keeps its path relative to it, one of an installed package
    its path below `site-packages`; any other keeps its name and the folder's that it lies in.

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
    targets = [Path(directory) / kept_path(Path(patch.file)) for patch in patches]
    for patch, target in zip(patches, targets, strict=True):
        if target.resolve() == Path(patch.file).resolve():
            raise UsageError(
                f"the copy of {patch.file} would take its place",
                hint="name another directory, or write over the files with --in-place",
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
                hint="write copies instead (--output DIR), and use the patched model code as "
                "your own",
            )
        if _text_now(path) != patch.before:
            raise UsageError(
                f"{path} has changed since it was checked", hint="check it again, then repair"
            )
    # A link is followed: what it points to is the file that was checked.
    targets = tuple(Path(patch.file).resolve() for patch in patches)
    for patch, target in zip(patches, targets, strict=True):
        _write(target, patch.after)
    return targets


def kept_path(file: Path) -> Path:
    """Where a copy lies below the directory of copies."""
    packages = _in_packages(file)
    if packages is not None:
        return file.relative_to(packages)
    if file.is_relative_to(Path.cwd()):
        return file.relative_to(Path.cwd())
    return Path(file.parent.name) / file.name


def _in_packages(file: Path) -> Path | None:
    """The `site-packages` directory that a file lies in."""
    names = ("site-packages", "dist-packages")
    return next((each for each in file.parents if each.name in names), None)


def _text_now(path: Path) -> str | None:
    try:
        return read_source(path)
    except SourceError:
        return None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise MachineError(f"{path} can't be written: {why(error)}") from error
