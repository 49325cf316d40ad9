"""The program: its commands, and the handling of errors and of Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer import rich_utils

import duoka
from duoka.base.quiet import quiet_libraries
from duoka.base.units import GIB
from duoka.errors import FleetError, UsageError
from duoka.hardware import nvml

from . import errors, signals
from .bench import bench
from .chat import chat
from .check import check
from .demo import demo
from .doctor import doctor
from .generate import generate
from .gpus import gpus
from .groups import Debug
from .merge import merge
from .plan import plan
from .selftest import selftest
from .serve import serve
from .terminal import stdout
from .top import top
from .training_options import complete_arguments
from .tune import tune

_TEXT_OPTIONS = ("--prompt", "--system")
_EPILOG = (
    "First steps on this machine: [bold]duoka[/], without a command.\n\n"
    "Exit codes: 0 done; 1 another error; 2 usage; 3 GPUs; 4 checkpoint; 5 model; 6 placement; 7 "
    "does not fit; 8 proof failed; 9 loading failed; 10 plan file; 11 virtual GPU; 12 this "
    "machine's limits; 13 check: faults found; 14 training can't continue; 15 doctor: warnings "
    "only; 16 GPU failure; 70 defect in duoka; 129, 130, 143 stopped by a signal, 130 by Ctrl-C; "
    "141 output pipe closed."
)
_FIRST_STEPS = """\
duoka runs large language models on the GPUs you have.
{}

[bold]Plan[/]: does a model fit, and which GPU holds what?
  duoka plan {}

[bold]Chat[/]; duoka serve takes the same options and opens OpenAI's API and a chat page:
  duoka {}

[bold]Fine-tune[/]: train a model on all GPUs with your data:
  duoka {}

Check this machine: duoka doctor
All commands: duoka --help"""
_GLM4_BYTES = 22 * GIB  # for its weights, a context of 8K, and the CUDA contexts
_WITHOUT_GPUS = (
    "This machine has no usable NVIDIA GPU; these commands need none.",
    "zai-org/glm-4-9b-chat --gpus 24GiB,12GiB --context 8K",
    "demo --keep demo-model\n  duoka chat demo-model --gpus virtual:2x32MiB --context 128",
    "tune demo-model train.jsonl --gpus virtual:2x64MiB --save run",
)

app = typer.Typer(
    name="duoka",
    help="Put a large language model on the GPUs you have: plan, prove, load and run it.",
    epilog=_EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OF_A_MODEL = plan, check, generate, chat, serve, tune, merge
_OF_A_MACHINE = gpus, doctor, selftest, top, bench, demo
for command in _OF_A_MODEL + _OF_A_MACHINE:
    app.command()(command)


def _show_version(wanted: bool) -> None:
    """Print the version and exit; a callback of --version."""
    if wanted:
        typer.echo(f"duoka {duoka.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    if context.invoked_subcommand is None:
        stdout().print(_first_steps(), soft_wrap=True, highlight=False)
        raise typer.Exit


def _first_steps() -> str:
    """Return commands to plan, to run and to fine-tune a model on this machine's GPUs."""
    cards: Sequence[nvml.NvmlGpu] = ()
    with suppress(FleetError):
        cards = nvml.read().gpus
    if not cards:
        return _FIRST_STEPS.format(*_WITHOUT_GPUS)
    products = Counter(card.name for card in cards)
    cards_text = ", ".join(f"{count} × {name}" for name, count in products.items())
    is_small = sum(card.free_bytes or 0 for card in cards) < _GLM4_BYTES
    model = "zai-org/chatglm3-6b" if is_small else "zai-org/glm-4-9b-chat"
    run = f"{model} --context 8K"
    tune = f"tune {model} train.jsonl --checkpointing --save run"
    return _FIRST_STEPS.format(f"This machine has {cards_text}.", run, f"chat {run}", tune)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program and end the process with its exit code."""
    signals.install()
    try:
        code = _open_streams() or run(arguments)
    except (KeyboardInterrupt, signals.Terminated):  # a further signal while the first was reported
        code = 128 + (signals.stopped_by() or signal.SIGINT)
    signals.ignore()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _discard(stream)
    # With torch imported, a normal exit of the interpreter takes seconds, and can crash on threads
    # that are in the middle of a step. All output has been written by now.
    os._exit(code)


def _discard(stream: TextIO) -> None:
    """Redirect an unwritable stream to null: a failing flush at exit would set the code to 120."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    # Set before transformers is imported: its warnings and progress bars would interleave with our
    # output, as those of ModelScope's client, and huggingface_hub's warnings print presigned URLs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("MODELSCOPE_LOG_LEVEL", "CRITICAL")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    argv = complete_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        _refuse_empty(argv)
        with quiet_libraries():
            code = _invoke([*argv])  # a copy: `_invoke` consumes the list
        # Flushed here because errors of a full disk or a closed pipe can still be reported.
        sys.stdout.flush()
    except BaseException as error:
        return errors.report(error, debug="--debug" in argv, arguments=argv)
    return code


def _refuse_empty(argv: Sequence[str]) -> None:
    """Refuse an empty option value, as from an unset shell variable, except for text options."""
    for word, value in pairwise([*argv, "-"]):
        name = word.removesuffix("=")
        if name.startswith("--") and name not in _TEXT_OPTIONS and (name != word or not value):
            raise UsageError(f"{name} is empty", hint="give it a value, or omit it")


def _invoke(arguments: list[str]) -> int:
    """Run the command, or answer a shell's completion request; return the exit code."""
    program: Any = typer.main.get_command(app)
    if "_DUOKA_COMPLETE" in os.environ:  # set by the shell's script
        rich_utils.MAX_WIDTH = 1000  # a word and its help are one line; the process ends afterwards
        program._main_shell_completion({}, "duoka")
    # Not `program.main()`, which turns Ctrl-C and a closed pipe into exit code 1.
    try:
        with program.make_context("duoka", arguments) as context:
            program.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def _open_streams() -> int:
    """Open null for a closed stdin or stderr; return an exit code if stdout is closed, else 0."""
    # In the order of file descriptors: `open` takes the lowest free descriptor. Otherwise a file
    # opened later, such as a checkpoint's, could become a standard stream and be overwritten.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stdout is None:
        return errors.BROKEN_PIPE
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal can't encode are escaped instead of raising an error.
            stream.reconfigure(errors="backslashreplace")
    return 0
