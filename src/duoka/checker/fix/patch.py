"""Result of a fix: patches with proofs, and faults without a fix."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from duoka.report.check_report import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change of code and the fixed faults.

    Parameters
    ----------
    faults : tuple of Fault
        The faults that the change fixes.
    step_bytes : int
        Bytes that the change moves between devices in one step; 0 if it creates the tensors on the
        right device.
    """

    faults: tuple[Fault, ...]
    step_bytes: int

    @property
    def source(self) -> str:
        """Expressions of the faults."""
        return ", ".join(fault.source for fault in self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The changes of one file.

    Parameters
    ----------
    file : str
        Absolute path of the file.
    before, after : str
        Whole text of the file before and after the changes, with the line ends of the file.
    diff : str
        The changes in unified format, for `git apply` and `patch`.
    cures : tuple of Cure
        The changes, each with the faults that it fixes and its cost.
    proved : bool
        True if a repeated check of the patched code was clean, and on several devices it computed
        the results of the original code on one device.
    reason : str
        Why the patch isn't proved; or the smaller model on which it was proved, if the checked
        model is too large to compute.
    """

    file: str
    before: str = field(repr=False)
    after: str = field(repr=False)
    diff: str = field(repr=False)
    cures: tuple[Cure, ...] = field(default=(), repr=False)
    proved: bool = False
    reason: str = ""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults fixed by the patch, alone or together with patches of other files."""
        return tuple(fault for cure in self.cures for fault in cure.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs(Sequence[Patch]):
    """The patches for a report, as a sequence with one patch for each file.

    Parameters
    ----------
    patches : tuple of Patch
        The patches, one for each file.
    uncured : tuple of (Fault, str)
        The faults without a fix, each with the reason.
    """

    patches: tuple[Patch, ...] = ()
    uncured: tuple[tuple[Fault, str], ...] = ()

    @property
    def proved(self) -> bool:
        """Return True if every fault is fixed and every patch proved."""
        return not self.uncured and all(patch.proved for patch in self.patches)

    @property
    def diff(self) -> str:
        """Unified diff of all files."""
        return "".join(patch.diff for patch in self.patches)

    @overload
    def __getitem__(self, index: int) -> Patch: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Patch, ...]: ...
    def __getitem__(self, index: int | slice) -> Patch | tuple[Patch, ...]:
        return self.patches[index]

    def __len__(self) -> int:
        return len(self.patches)

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)


def unified_diff(file: str, before: str, after: str) -> str:
    """Return a unified diff; paths below the working directory are relative to it."""
    path = Path(file)
    folder = Path.cwd()
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
    name = name.lstrip("/")
    lines = difflib.unified_diff(
        _lines(before), _lines(after), fromfile=f"a/{name}", tofile=f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """Split into lines with their ends; only a line feed ends a line, as for `patch`."""
    return io.StringIO(text, newline="\n").readlines()
