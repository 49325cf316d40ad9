"""Messages and exit codes of errors."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

from duoka.api.plan import plan_request
from duoka.base.text import printable
from duoka.errors import DuokaError, InfeasibleError, MachineError, UsageError
from duoka.planner.out_of_memory import OutOfMemory, look_for_ways

from . import machine, signals, suggestions
from .terminal import stderr

NOT_OK = 13
"""Exit code if a check found faults: a result of the command, not an error."""
WARNED = 15
"""Exit code if the doctor found warnings and no errors."""
DEFECT = 70
BROKEN_PIPE = 141
_SIGNAL_BASE = 128  # plus the signal's number, as in shells

# Click's UsageError, which Typer raises for invalid options. Older versions of Typer use Click,
# later ones a vendored copy; only the subclass BadParameter has the same public name in both.
_WRONG_OPTIONS: Any = typer.BadParameter.__bases__[0]


# Names that transformers, vLLM, SGLang, llama.cpp and peft use for options of duoka.
_OTHER_TOOLS_OPTIONS = {
    "--quantize nf4": "load-in-4bit use-4bit",
    "--quantize int8": "load-in-8bit use-8bit",
    "--quantize": "quantization quantization-bit",
    "--dtype": "torch-dtype precision fp16 bf16",
    "--context": "max-model-len max-seq-len max-seq-length max-length ctx-size context-length "
    "cutoff-len",
    "--gpus 0,1": "tensor-parallel-size tp tp-size pipeline-parallel-size pp-size num-gpus devices",
    "--replicas": "data-parallel-size dp-size",
    "--reserve": "gpu-memory-utilization mem-fraction-static",
    "--new-tokens": "max-new-tokens max-tokens n-predict",
    "--sequences": "max-num-seqs max-running-requests",
}

# Tokens and passwords must not be printed, whatever text contains them: users paste errors into
# public issues.
_REDACTED = "***"
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN")
_MIN_TOKEN_LENGTH = 8  # a shorter value, such as "0", occurs in every text

# Patterns of secrets. The first group is kept, the rest of the match is replaced.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # Tokens of the Hub, and of services whose tokens are often in the same environment.
        r"\b((?-i:hf_|api_org_|ghp_))[A-Za-z0-9]{12,}",
        r"\b((?-i:github_pat_|glpat-|sk-))[A-Za-z0-9_-]{16,}",
        r"\b(ms-)[0-9a-f]{8}-[0-9a-f-]{20,}",
        # Headers in logs or as Python prints a dict: 'Authorization': 'Bearer …'
        r"((?:proxy-)?authorization['\"]?\s*[:=]\s*b?['\"]?(?:(?:bearer|basic|token)\s+)?)"
        r"[^\s'\",}]+",
        r"(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
        r"((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)[^\r\n'\"]+",
        # URLs: https://user:password@host, and presigned query parameters.
        r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@",
        r"([?&;](?:[\w.-]*(?:token|signature|credential|secret|password|api_?key)|policy|sig|(?:\w+_)?key)=)"
        r"[^\s&;'\"<>]+",
        # Assignments in code, JSON or logs: token="…", "password": "…"
        r"(\b(?:\w*_)?(?:token|secret|password|api_?key)['\"]?\s*[:=]\s*b?['\"])[^'\"\s]+",
    )
]


def report(error: BaseException, *, debug: bool, arguments: Sequence[str] = ()) -> int:
    """Report an error on the standard error; return the exit code.

    Mistakes of the user and limits of the machine are reported as one message. Any other error is a
    defect, reported with its traceback; `debug` adds the traceback for every error. Tokens and
    passwords are removed. `arguments` is the command line, from which the commands of suggestions
    are built.
    """
    # Possible causes in order of precedence: the program's own exit; a signal (even if a library
    # turned it into another error); a wrong option; a DuokaError; a known failure of the machine or
    # a GPU; anything else is a defect.
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    _add_suggestions(error, arguments)
    signum = _causing_signal(error)
    cause = error if signum is not None else _explain_error(error)
    code = _exit_code(cause) if signum is None else _SIGNAL_BASE + signum
    # If the terminal is closed, nothing can be printed; the exit code is still right.
    try:
        if code == DEFECT or (debug and not isinstance(error, _WRONG_OPTIONS | BrokenPipeError)):
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(printable(redact(text)))
        if signum is not None:
            stderr().print("stopped", highlight=False)
        else:
            _print_cause(cause, arguments)
    except (OSError, ValueError):
        if signum is None and getattr(error, "errno", None) == errno.EIO:
            return _SIGNAL_BASE + signal.SIGHUP  # EIO means a closed terminal; SIGHUP may follow
    return code


def _add_suggestions(error: BaseException, arguments: Sequence[str]) -> None:
    """Set the hint of a memory shortage to suggestions that fit, as commands to paste."""
    # The search runs only here: the engine that ran out of memory has ended by now, and a caller
    # that catches the error in Python should not wait for a search.
    if isinstance(error, OutOfMemory):
        with suppress(Exception):  # report the original error even if the search fails
            look_for_ways(error, plan_request)
    if isinstance(error, InfeasibleError | OutOfMemory) and error.ways_out:
        from .main import app  # imported here: `main` imports this module

        known = suggestions.options_of(typer.main.get_command(app), arguments)
        columns = stderr().width
        hint = suggestions.format_suggestions(error.ways_out, arguments, known, columns)
        error.hint = hint or error.hint


def print_error(error: DuokaError) -> None:
    """Print an error's message and hint."""
    _print_message(f"{error}", error.hint)


def _print_cause(error: BaseException, arguments: Sequence[str]) -> None:
    """Print an error by its class: nothing for a broken pipe, usage, message or defect."""
    if isinstance(error, BrokenPipeError):
        # The interpreter flushes stdout at exit; redirected to null, this flush doesn't fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, _WRONG_OPTIONS):
        _print_usage(error, arguments)
    elif isinstance(error, DuokaError):
        print_error(error)
    else:
        _print_message(
            "this is a defect in duoka, not an error in your input",
            "please report the text above, the command, and these versions:\n" + machine.versions(),
        )


def _causing_signal(error: BaseException) -> int | None:
    """Return the signal that caused an error, even if a library turned it into another; or None."""
    if isinstance(error, signals.Terminated):
        return error.signum
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return signal.SIGINT
    return signals.stopped_by()


def _explain_error(error: BaseException) -> BaseException:
    """Return a MachineError for a known failure of the machine or a GPU, else the same error."""
    if isinstance(error, DuokaError | BrokenPipeError | _WRONG_OPTIONS):
        return error
    if torch := sys.modules.get("torch"):  # without torch no GPU error is possible
        from duoka.runtime.lost_gpu import find_lost_gpu

        if isinstance(error, getattr(torch, "OutOfMemoryError", ())):
            hint = "another program may use this GPU; plan with a smaller budget (--gpus)"
            return MachineError(str(error), hint=hint)
        if lost := find_lost_gpu(error):
            return lost
    return machine.explain(error) or error


def _exit_code(error: BaseException) -> int:
    """Return the exit code of an error that was not caused by a signal."""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, _WRONG_OPTIONS):
        return UsageError.exit_code
    return error.exit_code if isinstance(error, DuokaError) else DEFECT


def _print_message(message: str, hint: str | None) -> None:
    """Print a message and its hint, without secrets and control characters."""
    console = stderr()
    for label, style, text in (("error:", "bold red", message), ("hint:", "bold", hint)):
        if text:
            console.print(f"[{style}]{label}[/] ", end="")
            console.print(printable(redact(text)), markup=False, highlight=False, soft_wrap=True)


def _print_usage(error: Any, arguments: Sequence[str]) -> None:
    """Print an error of Typer, with duoka's option if another tool's name was used."""
    # An option without its value is an error without a context.
    names = [error.ctx.command_path] if error.ctx else ["duoka", *arguments[:1]]
    hint = f"`{' '.join(n for n in names if not n.startswith('-'))} --help` lists its options"
    option_name = getattr(error, "option_name", "").lstrip("-").replace("_", "-")
    options = set() if error.ctx is None else {o for p in error.ctx.command.params for o in p.opts}
    for option, peers in _OTHER_TOOLS_OPTIONS.items():
        if option_name in peers.split() and option.split()[0] in options:
            hint = f"the option here is {option}; {hint}"
            break
    _print_message(error.format_message(), hint)


def redact(text: str) -> str:
    """Replace tokens and passwords in a text by asterisks."""
    for name in _TOKEN_VARIABLES:
        value = os.environ.get(name, "").strip()
        if len(value) >= _MIN_TOKEN_LENGTH:
            text = text.replace(value, _REDACTED)
    for pattern in _PATTERNS:
        text = pattern.sub(_replacement, text)
    return text


def _replacement(match: re.Match[str]) -> str:
    """Return the replacement of a secret: its prefix, and the "@" after a password in a URL."""
    return match[1] + _REDACTED + ("@" if match[0].endswith("@") else "")
