"""Text of an export and its notes."""

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
    """A plan in the syntax of one tool.

    `text` is a command line, a program or a configuration; `notes` describe differences from the
    plan.
    """

    tool: str
    text: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the notes as comments, then the text (every tool's syntax has "#" comments)."""
        wrapper = textwrap.TextWrapper(_COLUMNS, initial_indent="# ", subsequent_indent="#   ")
        notes = [printable(" ".join(note.split())) for note in self.notes]
        lines = [line for note in notes for line in wrapper.wrap(note)]
        return "\n".join([*lines, self.text])


def export_error(tool: str, why: str, hint: str) -> UsageError:
    """Build the error for a plan that a tool cannot express."""
    return UsageError(f"{tool} can't run this plan: {why}", hint=hint)


def format_environment(environment: Sequence[tuple[str, str]]) -> str:
    """Format environment variables for a shell command, quoted if necessary."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment)


def format_command(
    environment: Sequence[tuple[str, str]], words: Sequence[str], options: Sequence[tuple[str, str]]
) -> str:
    """Format a command for a POSIX shell: environment, words, then one option per line."""
    lines = [format_environment(environment), shlex.join(words)]
    lines += [f"  {name} {shlex.quote(value)}".rstrip() for name, value in options]
    return " \\\n".join(line for line in lines if line)
