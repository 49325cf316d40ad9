"""``duoka demo``: train a small model, plan, prove and load it, and ask it questions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duoka.errors import DuokaError, UsageError

from .groups import with_groups
from .terminal import check_file, stderr, stdout

if TYPE_CHECKING:
    from duoka.tools.demo import Demo


@with_groups
def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the checkpoint in this directory, for `duoka chat` and `duoka plan`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a small ChatGLM3, plan it for two virtual GPUs, load it, and ask it questions.

    [bold]duoka demo[/]

    [bold]duoka demo[/] --keep demo-model
    """
    _refuse_existing(keep)
    # Built in a scratch directory, so that an interrupted demo leaves no incomplete checkpoint.
    with tempfile.TemporaryDirectory(
        prefix=".duoka-demo-", suffix=".partial", dir=None if keep is None else keep.parent
    ) as scratch:
        checkpoint = Path(scratch) / "chatglm3-demo"
        done = _run_demo(checkpoint)
        if keep is not None:
            checkpoint.rename(keep)
    _print_results(done)
    if not done.is_right:
        raise DuokaError("the model's answers differ from its training data")


def _refuse_existing(keep: Path | None) -> None:
    """Raise UsageError if `keep` can't be created, or exists and is no empty directory."""
    if keep is None:
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"{keep} already exists", hint="give a new directory")
    if not keep.exists():
        check_file(keep, "the checkpoint")


def _run_demo(directory: Path) -> Demo:
    """Run the demo with a status line; report each stage except the training steps."""
    # Waiting threads must not spin: if other programs use the CPU, training would take ten times as
    # long. OpenMP reads the variable when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = stderr()
    with console.status("starting") as status:
        from duoka.tools.demo import run_demo

        def report(text: str) -> None:
            status.update(text)
            if not text.startswith("training step"):
                console.print(f"{text} …")

        return run_demo(directory, report=report)


def _print_results(done: Demo) -> None:
    """Print the plan, the answers and the measured memory."""
    from duoka.report.terminal import render_measured, render_plan

    console = stdout()
    console.print(f"A single GPU: {done.one_gpu}.", soft_wrap=True)
    console.print()
    console.print(render_plan(done.plan))
    console.print()
    for answer in done.answers:
        verdict = "[green]right[/]" if answer.is_right else "[red]wrong[/]"
        console.print(f"[bold]{answer.question}[/]")
        console.print(f"  {answer.answer}  ({verdict})")
    console.print()
    console.print(render_measured(done.plan, done.measured))
