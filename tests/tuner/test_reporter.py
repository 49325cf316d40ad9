"""What a person sees while a run goes on: lines in a file, a bar on a terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trainers import make_layout, make_report

from duoka import TuneSettings
from duoka.tuner.checkpoints import Resumed
from duoka.tuner.layout import Layout
from duoka.tuner.reporter import RunReporter, _scalars
from duoka.tuner.run import RunDirectory

RESUMED = Resumed(
    path=Path("/[run]/step-000040"), step=40, state={}, refused=("/[run]/step-000050 is truncated",)
)
COLOURS, CONTROLS = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def layout(llama: Path) -> Layout:
    return make_layout(llama, TuneSettings(seq_length=32), stages=2)


def steps(layout: Layout, numbers: Iterator[int] | range, **changes: Any) -> list[dict[str, Any]]:
    return [asdict(make_report(layout, step, **changes)) for step in numbers]


def shown(
    directory: Path,
    metrics: list[dict[str, Any]],
    *,
    num_steps: int = 100,
    resumed: Resumed | None = None,
    columns: int = 0,
) -> list[str]:
    """The lines that are written; on a terminal with so many columns, or without one."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=columns > 0, width=columns or 10, highlight=False)
    run = RunDirectory(directory)
    reporter = RunReporter(run, num_steps, resumed, console)
    for entry in metrics:
        reporter.write(entry)
    reporter.close()
    assert [entry["step"] for entry in run.read_metrics()] == [e["step"] for e in metrics]
    text = CONTROLS.sub("\n", COLOURS.sub("", file.getvalue()))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("num_steps", "numbers"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (250, [1, *range(3, 250, 3), 250]),
    ],
)
def test_some_hundred_lines_stand_for_a_run(
    tmp_path: Path, layout: Layout, num_steps: int, numbers: list[int]
) -> None:
    metrics = steps(layout, range(1, num_steps + 1), loss=2.5)
    lines = shown(tmp_path, metrics, num_steps=num_steps)
    assert lines == [f"step {step}/{num_steps}  loss 2.5000  50 tokens/s" for step in numbers]


def test_the_speed_is_that_of_the_last_ten_steps(tmp_path: Path, layout: Layout) -> None:
    metrics = steps(layout, range(1, 12), seconds=1.0)
    metrics[0]["seconds"] = 1000.0
    lines = shown(tmp_path, metrics)
    assert [line.rpartition("  ")[2] for line in (lines[0], *lines[9:])] == [
        *("0 tokens/s", "1 tokens/s", "100 tokens/s")
    ]


def test_what_isnt_a_step_is_said(tmp_path: Path, layout: Layout) -> None:
    metrics = [*steps(layout, range(41, 42), is_skipped=True), {"step": 41, "eval_loss": 2.25}]
    assert shown(tmp_path, metrics, num_steps=1000, resumed=RESUMED) == [
        "skipped: /[run]/step-000050 is truncated",
        "resuming after step 40, from /[run]/step-000040",
        "step 41 was skipped: gradients overflowed float16",
        "step 41: evaluation loss 2.2500",
    ]


def test_rewards(tmp_path: Path, layout: Layout) -> None:
    rewards = {"chosen": 0.5, "rejected": -0.25, "accuracies": 0.875, "margins": 0.75}
    evaluated = {f"eval_rewards/{name}": value / 2 for name, value in rewards.items()}
    metrics = steps(layout, range(1, 2), loss=0.5, rewards=rewards)
    metrics.append({"step": 1, "eval_loss": 0.25, **evaluated})
    assert shown(tmp_path, metrics, num_steps=1) == [
        "step 1/1  loss 0.5000  50 tokens/s  accuracy 88%  margin 0.7500",
        "step 1: evaluation loss 0.2500, accuracy 44%",
    ]
    assert _scalars(metrics[1]) == {"eval_loss": 0.25, **evaluated}
    scalars = _scalars(steps(layout, range(1, 2), rewards=rewards)[0])
    assert rewards.items() == {
        (name.removeprefix("rewards/"), value)
        for name, value in scalars.items()
        if name.startswith("rewards/")
    }


def test_answers_are_shown_and_written(tmp_path: Path) -> None:
    samples = [{"prompt": "Hi\x1b", "answer": "Ho"}, {"prompt": "何？", "answer": ""}]
    evaluation = {"step": 41, "eval_loss": 2.25, "samples": samples}
    lines = shown(tmp_path, [evaluation], resumed=RESUMED)[2:]
    assert lines[0] == "step 41: evaluation loss 2.2500"
    assert [line for line in lines[1:] if line] == ["> Hi\\x1b", "Ho", "> 何？"]
    directory = RunDirectory(tmp_path)
    answers = directory.answers.read_text(encoding="utf-8")
    assert [json.loads(line) for line in answers.splitlines()] == [
        {"step": 41, **sample} for sample in samples
    ]
    assert "何" in answers
    # A resumed run repeats the steps after its checkpoint.
    directory.forget_after(40)
    assert directory.answers.read_text() == ""


def test_a_bar_has_loss_and_speed(tmp_path: Path, layout: Layout) -> None:
    lines = shown(tmp_path, steps(layout, range(1, 3), loss=2.5), columns=80)
    assert all(len(line) <= 80 for line in lines)
    assert re.search(r" 2/100 .* loss 2\.5000  50 tokens/s$", lines[-1])


def test_the_bar_of_a_resumed_run_begins_where_it_goes_on(tmp_path: Path) -> None:
    lines = shown(tmp_path, [{"step": 40, "eval_loss": 2.25}], resumed=RESUMED, columns=80)
    assert "resuming after step 40, from /[run]/step-000040" in lines
    assert "step 40: evaluation loss 2.2500" in lines
    assert " 40/100" in lines[-1]


def test_a_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    reporter = RunReporter(RunDirectory(tmp_path), 9, None, console)
    assert "\x1b[?25l" in file.getvalue()  # no cursor meanwhile
    reporter.close()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")
