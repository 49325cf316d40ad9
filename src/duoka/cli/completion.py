"""``duoka completion``: a shell completes duoka's commands, options and their values."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer import completion as typers

from .groups import with_groups

_typers: Any = typers  # some of it comes from modules without public names
_VARIABLE = "_DUOKA_COMPLETE"
"""What a shell's script sets where it asks for words; the typer of each version has its form."""


class Shell(StrEnum):
    """The shells with a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@with_groups
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="Shell: bash, zsh or fish.")],
) -> None:
    """Print a shell completion script for duoka's commands, options, values and files.

    [bold]duoka completion[/] bash > ~/.local/share/bash-completion/completions/duoka

    [bold]duoka completion[/] zsh > ~/.zfunc/_duoka

    [bold]duoka completion[/] fish > ~/.config/fish/completions/duoka.fish
    """
    script = _typers.get_completion_script(
        prog_name="duoka", complete_var=_VARIABLE, shell=shell.value
    )
    typer.echo(script)


def completed(program: Any) -> int | None:
    """Answer a shell's request for words, with an exit code; None without a request."""
    instruction = os.environ.get(_VARIABLE)
    if instruction is None:
        return None
    os.environ["COLUMNS"] = "1000"  # a word and its help are a line, which must not be wrapped
    _typers.completion_init()
    code: int = _typers.shell_complete(program, {}, "duoka", _VARIABLE, instruction)
    return code
