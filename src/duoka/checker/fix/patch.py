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
    """One change of code.

    Parameters
    ----------
    faults : tuple of Fault
        What it cures.
    step_bytes : int
        What it moves between devices in one step; 0 where tensors are made in the right place.
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
        Its absolute path.
    before, after : str
        Its whole text, line ends as they are in the file.
    diff : str
        What changes, in the unified form that `git apply` and `patch` read.
    cures : tuple of Cure
        The changes, each with what it cures and what it costs.
    proved : bool
        Checked again the code was clean, and on several devices it computed what the original
        computes on one.
    reason : str
        Why it isn't proved; or on what it was, where the model itself is too big.
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
        """Faults fixed with the help of this patch."""
        return tuple(fault for cure in self.cures for fault in cure.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs(Sequence[Patch]):
    """The patches of a report, one for each file; it can be used as the sequence of them.

    Parameters
    ----------
    patches : tuple of Patch
    uncured : tuple of (Fault, str)
        The faults for which nothing was changed, each with the reason.
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
    """Return a unified diff with paths relative to the working directory if possible."""
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
