"""``--fix``: changes that cure the faults of a report, shown and written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from duoka.errors import UsageError
from duoka.report.terminal.words import where

from .terminal import stderr, working

if TYPE_CHECKING:
    from duoka.checker.fix import Repairs
    from duoka.report.check_report import Report

_DIRECTORY = Path("duoka-fixed")
_THEME = "ansi_dark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixes:
    """What a person said about repairing."""

    wanted: bool
    in_place: bool
    output: Path | None

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that don't go together, and where nothing can be written."""
        options = [("--in-place", self.in_place), ("--output", self.output is not None)]
        said = [name for name, given in options if given]
        if said and not self.wanted:
            raise UsageError(
                f"{', '.join(said)} is for --fix", hint="give --fix as well, or leave it out"
            )
        if len(said) > 1:
            raise UsageError(
                "--in-place and --output say two places for the changes",
                hint="--output alone leaves the files as they are",
            )
        if self.wanted and not self.in_place:
            _refuse_unwritable(self._directory)

    @property
    def _directory(self) -> Path:
        return self.output or _DIRECTORY

    def repair(self, report: Report) -> Repaired:
        """Find changes and prove them; nothing is written yet."""
        from duoka.checker.fix import repair

        with working("repairing, and proving it"):
            return Repaired(repair(report), None if self.in_place else self._directory)


class Repaired:
    """What a repair came to.

    Parameters
    ----------
    repairs : Repairs
    directory : Path, optional
        Where changed copies go; None to change the files themselves, where that is proved.
    """

    def __init__(self, repairs: Repairs, directory: Path | None) -> None:
        self._repairs = repairs
        self._directory = directory

    def write(self) -> None:
        """Write the changes, and say where."""
        from duoka.checker.fix import apply, apply_in_place

        if self._directory is None:
            files = apply_in_place([patch for patch in self._repairs if patch.proved])
        else:
            files = apply(self._repairs, self._directory)
        for file in files:
            stderr().print(f"saved to {file}", markup=False, soft_wrap=True)

    def cures(self, report: Report) -> bool:
        """Whether what was checked has been changed, and nothing is wrong with it any more."""
        found = report.completeness
        # What had to stay whole had to because of the faults.
        is_named = not (found.missing or found.unknown or found.doubled or found.misplaced)
        is_well = is_named and report.fits and report.stop is None
        return self._directory is None and is_well and self._repairs.proved

    def to_dict(self) -> dict[str, Any]:
        """What is added to a report's JSON form."""
        return {
            "patches": [
                {"file": each.file, "diff": each.diff, "proved": each.proved, "reason": each.reason}
                for each in self._repairs
            ],
            "uncured": [
                {"file": fault.file, "line": fault.line, "op": fault.op, "reason": reason}
                for fault, reason in self._repairs.uncured
            ],
        }

    def print(self, console: Console) -> None:
        """Show the changes, whether each is proved, and what was not cured."""
        for patch in self._repairs:
            console.print()
            if console.is_terminal:
                diff = Syntax(patch.diff.rstrip("\n"), "diff", theme=_THEME, word_wrap=True)
                console.print(diff)
            else:
                console.print(Text(patch.diff.rstrip("\n")), soft_wrap=True)
            verdict = ("proved", "bold green") if patch.proved else ("not proved", "bold red")
            reason = f": {patch.reason}" if patch.reason else ""
            if self._directory is None and not patch.proved:
                reason += "; the file is as it was"
            console.print(Text.assemble(verdict, reason), soft_wrap=True)
        for fault, reason in self._repairs.uncured:
            console.print()
            told = f" {where(fault.place)}, {fault.op}: {reason}"
            console.print(Text.assemble(("not cured:", "bold red"), told), soft_wrap=True)


def _refuse_unwritable(directory: Path) -> None:
    """Refuse a directory that can't be made or written to, before the check."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"the changed files can't be written to {str(directory)!r}",
            hint="name a directory that you may write to: --output DIRECTORY",
        )
