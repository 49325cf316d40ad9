"""The text of an export, with its notes."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from duoka.base.text import printable
from duoka.errors import UsageError

_COLUMNS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan for one tool.

    The text is what the tool takes: a command line, a program or a piece of configuration. The
    notes say what will differ from the plan.
    """

    tool: str
    text: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The text with its notes as comments before it; every tool here takes "#" for one."""
        lines = [
            line
            for note in self.notes
            for line in textwrap.wrap(
                printable(" ".join(note.split())),
                width=_COLUMNS,
                initial_indent="# ",
                subsequent_indent="#   ",
            )
        ]
        return "\n".join([*lines, self.text])


def refusal(tool: str, why: str, hint: str) -> UsageError:
    """The error for a plan that a tool can't express."""
    return UsageError(f"{tool} can't be told this plan: {why}", hint=hint)


def assignments(environment: Sequence[tuple[str, str]]) -> str:
    """Environment as it stands before a command, quoted where it must be."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment)


def command_line(
    environment: Sequence[tuple[str, str]], words: Sequence[str], options: Sequence[tuple[str, str]]
) -> str:
    r"""A command for a POSIX shell, an option a line; everything is quoted where it must be."""
    lines = [assignments(environment), shlex.join(words)]
    lines += [f"  {name} {shlex.quote(value)}".rstrip() for name, value in options]
    return " \\\n".join(line for line in lines if line)
