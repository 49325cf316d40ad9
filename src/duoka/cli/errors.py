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
"""A check found something; no error, since that is what it is for."""
WARNED = 15
"""The doctor found nothing worse than warnings."""
DEFECT = 70
BROKEN_PIPE = 141
_SIGNALLED = 128  # and the signal's number, as shells have it

# Typer's error for options it can't read. It has had this class from Click or, later, a copy of
# Click of its own; only its subclass has a public name in both.
_WRONG_OPTIONS: Any = typer.BadParameter.__bases__[0]


# What transformers, vLLM, SGLang, llama.cpp and peft call what duoka has.
_PEERS = {
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

# Tokens and passwords must not be shown, wherever they got into a text: whoever reports an error
# copies it into a public place.
_SHOWN = "***"
_ENVIRONMENT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHORTEST = 8  # a shorter value, such as "0", would be found everywhere

# Each keeps its first group, and replaces what follows.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # Tokens of the Hub, and of the services that commonly lie in the same environment.
        r"\b((?-i:hf_|api_org_|ghp_))[A-Za-z0-9]{12,}",
        r"\b((?-i:github_pat_|glpat-|sk-))[A-Za-z0-9_-]{16,}",
        # Headers, as they are written into logs and as Python prints them: 'Authorization': 'Bea…'
        r"((?:proxy-)?authorization['\"]?\s*[:=]\s*b?['\"]?(?:(?:bearer|basic|token)\s+)?)"
        r"[^\s'\",}]+",
        r"(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
        r"((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)[^\r\n'\"]+",
        # Addresses: https://user:password@host, and signed ones.
        r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@",
        r"([?&;](?:[\w.-]*(?:token|signature|credential|secret|password|api_?key)|policy|sig|key)=)"
        r"[^\s&;'\"<>]+",
        # What a person or a library writes: token=…, "password": "…"
        r"(\b(?:\w*_)?(?:token|secret|password|api_?key)['\"]?\s*[:=]\s*b?['\"])[^'\"\s]+",
    )
]


def report(error: BaseException, *, debug: bool, arguments: Sequence[str] = ()) -> int:
    """Report an error on the standard error; return the exit code.

    A user's mistake is told in one message, and so is what the machine refuses. Anything
    unexpected is a defect, told with its traceback; `debug` shows the traceback of every error.
    Tokens and passwords are left out of all of it. `arguments` are what the program was called
    with: what would fit instead is told by them.
    """
    # What ended the program, in this order: its own exit, a signal (whatever error a library made
    # of it), a wrong option, a mistake or a limit that duoka names, what is known of the machine
    # and its GPUs, and all else: a defect.
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    _add_suggestions(error, arguments)
    signum = _signal_of(error)
    cause = error if signum is not None else _expected(error)
    code = _code(cause) if signum is None else _SIGNALLED + signum
    # When the terminal has gone, nobody can be told; the exit code is still right.
    try:
        if code == DEFECT or (debug and not isinstance(error, _WRONG_OPTIONS | BrokenPipeError)):
            _show_traceback(error)
        if signum is not None:
            stderr().print("stopped", highlight=False)
        else:
            _tell(cause)
    except (OSError, ValueError):
        if signum is None and getattr(error, "errno", None) == errno.EIO:
            return _SIGNALLED + signal.SIGHUP  # it comes with that, and may come a little later
    return code


def _add_suggestions(error: BaseException, arguments: Sequence[str]) -> None:
    """Write what would fit instead as commands into the hint of a memory shortage."""
    # Searched only here: the engine that ran out of memory has ended by now, and a library that
    # catches the error shouldn't pay for a search.
    if isinstance(error, OutOfMemory):
        with suppress(Exception):  # whatever a search among wreckage meets, the error is told
            look_for_ways(error, plan_request)
    if isinstance(error, InfeasibleError | OutOfMemory) and error.ways_out:
        from .main import app  # which imports this module

        known = suggestions.options_of(typer.main.get_command(app), arguments)
        columns = stderr().width
        hint = suggestions.format_suggestions(error.ways_out, arguments, known, columns)
        error.hint = hint or error.hint


def print_error(error: DuokaError) -> None:
    """Print an error's message and hint."""
    _print_message(f"{error}", error.hint)


def _tell(error: BaseException) -> None:
    if isinstance(error, BrokenPipeError):
        # The interpreter's own flush at exit then goes nowhere, instead of failing once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, _WRONG_OPTIONS):
        _print_usage(error)
    elif isinstance(error, DuokaError):
        print_error(error)
    else:
        _print_message(
            "this is a defect in duoka, not an error in your input",
            "please report the text above, the command, and these versions:\n" + machine.versions(),
        )


def _signal_of(error: BaseException) -> int | None:
    """Return the signal behind an error, also if a library raised another error."""
    if isinstance(error, signals.Terminated):
        return error.signum
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return signal.SIGINT
    return signals.stopped_by()


def _expected(error: BaseException) -> BaseException:
    """Return the error for refusals of the machine and its GPUs; others as they are."""
    if isinstance(error, DuokaError | BrokenPipeError | _WRONG_OPTIONS):
        return error
    if torch := sys.modules.get("torch"):  # what isn't loaded can't have raised what is looked for
        from duoka.runtime.lost_gpu import find_lost_gpu

        if isinstance(error, getattr(torch, "OutOfMemoryError", ())):
            hint = "another program may use this GPU; plan with a smaller budget (--gpus)"
            return MachineError(str(error), hint=hint)
        if lost := find_lost_gpu(error):
            return lost
    return machine.explain(error) or error


def _code(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, _WRONG_OPTIONS):
        return UsageError.exit_code
    return error.exit_code if isinstance(error, DuokaError) else DEFECT


def _print_message(message: str, hint: str | None) -> None:
    console = stderr()
    for label, style, text in (("error:", "bold red", message), ("hint:", "bold", hint)):
        if text:
            console.print(f"[{style}]{label}[/] ", end="")
            console.print(printable(redact(text)), markup=False, highlight=False, soft_wrap=True)


def _print_usage(error: Any) -> None:
    command = "duoka" if error.ctx is None else error.ctx.command_path
    hint = f"`{command} --help` lists its options"
    option_name = getattr(error, "option_name", "").lstrip("-").replace("_", "-")
    options = set() if error.ctx is None else {o for p in error.ctx.command.params for o in p.opts}
    for option, peers in _PEERS.items():
        if option_name in peers.split() and option.split()[0] in options:
            hint = f"the option here is {option}; {hint}"
            break
    _print_message(error.format_message(), hint)


def _show_traceback(error: BaseException) -> None:
    try:
        text = "".join(traceback.format_exception(error))
    except (RecursionError, MemoryError):  # a chain of causes that is too long to be told
        text = "".join(traceback.format_exception_only(error))
    sys.stderr.write(printable(redact(text)))


def redact(text: str) -> str:
    """Return a text without tokens and passwords."""
    for name in _ENVIRONMENT:
        value = os.environ.get(name, "").strip()
        if len(value) >= _SHORTEST:
            text = text.replace(value, _SHOWN)
    for pattern in _PATTERNS:
        text = pattern.sub(_replacement, text)
    return text


def _replacement(match: re.Match[str]) -> str:
    return match[1] + _SHOWN + ("@" if match[0].endswith("@") else "")
