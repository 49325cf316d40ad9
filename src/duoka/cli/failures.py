"""What the user sees of an error, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from duoka.errors import DuokaError, InfeasibleError

from .terminal import stderr

DEFECT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# Typer's error for options it can't read. It has had this class from Click or, later, a copy of
# Click of its own; only its subclass has a public name in both.
_WRONG_OPTIONS: Any = typer.BadParameter.__bases__[0]


def report(error: BaseException, *, debug: bool) -> int:
    """Tell an error on the standard error; return the exit code.

    A user's mistake is told in one message. Anything unexpected is a defect, told with its
    traceback; `debug` shows the traceback of every error.
    """
    if isinstance(error, BrokenPipeError):
        _close_stdout()
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        stderr().print("stopped", highlight=False)
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, _WRONG_OPTIONS):
        return _tell_usage(error)
    if debug:
        _show_traceback(error)
    if isinstance(error, DuokaError):
        _tell(str(error), _hint(error))
        return error.exit_code
    if _is_out_of_memory(error):
        _tell(str(error), "does another program use this GPU? Plan with a smaller budget (--gpus)")
        return 1
    if not debug:
        _show_traceback(error)
    _tell("this is a defect of duoka, not a mistake of yours", "please report the text above")
    return DEFECT


def _tell(message: str, hint: str | None) -> None:
    console = stderr()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
    if hint:
        console.print("[bold]hint:[/] ", end="")
        console.print(hint, markup=False, highlight=False, soft_wrap=True)


def _tell_usage(error: Any) -> int:
    command = "duoka" if error.ctx is None else error.ctx.command_path
    _tell(error.format_message(), f"`{command} --help` shows what it takes")
    return int(error.exit_code)


def _hint(error: DuokaError) -> str | None:
    if isinstance(error, InfeasibleError) and len(error.ways_out) > 1:
        return "what would fit:\n" + "\n".join(f"  - {way}" for way in error.ways_out)
    return error.hint


def _show_traceback(error: BaseException) -> None:
    sys.stderr.write("".join(traceback.format_exception(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    # Without importing torch for it: if torch isn't loaded, it can't have raised this.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _close_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, instead of failing once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
