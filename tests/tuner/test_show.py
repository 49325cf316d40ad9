"""What a person sees while a run goes on: lines in a file, a bar on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from trainers import make_layout, make_report

from duoka import TuneSettings
from duoka.tuner.checkpoints import Resumed
from duoka.tuner.layout import Layout
from duoka.tuner.show import TuneProgress

RESUMED = Resumed(
    path=Path("/[run]/step-000040"), step=40, state={}, refused=("/[run]/step-000050 is cut off",)
)
COLOURS, CONTROLS = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
Watch = Callable[..., str]


@pytest.fixture
def layout(llama: Path) -> Layout:
    return make_layout(llama, TuneSettings(seq_length=32), stages=2)


def watch(
    use: Callable[[TuneProgress], None], *, num_steps: int = 100, columns: int = 0
) -> list[str]:
    """The lines that are written; on a terminal with so many columns, or without one."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=columns > 0, width=columns or 10, highlight=False)
    progress = TuneProgress(num_steps, console)
    try:
        use(progress)
    finally:
        progress.close()
    text = CONTROLS.sub("\n", COLOURS.sub("", file.getvalue()))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


# ── without a terminal ──


@pytest.mark.parametrize(
    ("num_steps", "shown"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (250, [1, *range(3, 250, 3), 250]),
        (1001, [1, *range(11, 1001, 11), 1001]),
    ],
)
def test_some_hundred_lines_stand_for_a_run(
    layout: Layout, num_steps: int, shown: list[int]
) -> None:
    def run(progress: TuneProgress) -> None:
        for step in range(1, num_steps + 1):
            progress.show(make_report(layout, step, loss=2.5))

    lines = watch(run, num_steps=num_steps)
    assert lines == [f"step {step}/{num_steps}  loss 2.5000  50 tokens/s" for step in shown]
    assert len(lines) <= 102


def test_the_speed_is_that_of_the_last_ten_steps(layout: Layout) -> None:
    def run(progress: TuneProgress) -> None:
        progress.show(make_report(layout, 1, seconds=1000.0))
        for step in range(2, 12):
            progress.show(make_report(layout, step, seconds=0.5 if step % 2 else 1.5))

    lines = watch(run)
    assert lines[0].endswith("  0 tokens/s")
    assert lines[9].endswith("  1 tokens/s")
    assert lines[10].endswith("  100 tokens/s")


def test_what_isnt_a_step_is_said(layout: Layout) -> None:
    def run(progress: TuneProgress) -> None:
        progress.resumed(RESUMED)
        progress.show(make_report(layout, 41, is_skipped=True))
        progress.evaluated(41, 2.25)

    assert watch(run, num_steps=1000) == [
        "passed over: /[run]/step-000050 is cut off",
        "going on after step 40, from /[run]/step-000040",
        "step 41 was skipped: gradients overflowed float16",
        "step 41: evaluation loss 2.2500",
    ]


# ── on a terminal ──


def test_a_bar_has_loss_and_speed(layout: Layout) -> None:
    def run(progress: TuneProgress) -> None:
        progress.show(make_report(layout, 1))
        progress.show(make_report(layout, 2, loss=2.5))

    lines = watch(run, columns=80)
    assert all(len(line) <= 80 for line in lines)
    assert re.search(r" 2/100 .* loss 2\.5000  50 tokens/s$", lines[-1])


def test_the_bar_of_a_resumed_run_begins_where_it_goes_on() -> None:
    def run(progress: TuneProgress) -> None:
        progress.resumed(RESUMED)
        progress.evaluated(40, 2.25)

    lines = watch(run, columns=80)
    assert "going on after step 40, from /[run]/step-000040" in lines
    assert "step 40: evaluation loss 2.2500" in lines
    assert " 40/100" in lines[-1]


def test_a_terminal_is_left_as_it_was() -> None:
    file = io.StringIO()
    progress = TuneProgress(9, Console(file=file, force_terminal=True, width=80))
    assert "\x1b[?25l" in file.getvalue()  # no cursor meanwhile
    progress.close()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")
