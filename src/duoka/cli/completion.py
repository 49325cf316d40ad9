"""``duoka completion``: shell completion of commands, options and their values."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer
from typer import completion as typers

from .groups import with_groups

_typers: Any = typers  # typed as Any: some names come from private modules
_VARIABLE = "_DUOKA_COMPLETE"
"""Variable that the shell's script sets to request completions; its value depends on Typer."""


@with_groups
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="SHELL", help="Shell: bash, zsh or fish."),
    ],
) -> None:
    """Print a shell completion script for duoka's commands, options, values and files.

    [bold]duoka completion[/] bash > ~/.local/share/bash-completion/completions/duoka

    [bold]duoka completion[/] zsh > ~/.zfunc/_duoka

    [bold]duoka completion[/] fish > ~/.config/fish/completions/duoka.fish
    """
    names = {"prog_name": "duoka", "complete_var": _VARIABLE}
    typer.echo(_typers.get_completion_script(**names, shell=shell))


def completed(program: Any) -> int | None:
    """Answer a completion request of a shell; return the exit code, or None without a request."""
    instruction = os.environ.get(_VARIABLE)
    if instruction is None:
        return None
    from typer import rich_utils

    rich_utils.MAX_WIDTH = 1000  # a word and its help are one line; the process ends afterwards
    _typers.completion_init()
    code: int = _typers.shell_complete(program, {}, "duoka", _VARIABLE, instruction)
    return code
