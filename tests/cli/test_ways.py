"""What the user sees of ways out: commands that work when they are pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from duoka.cli.main import run
from duoka.cli.ways import command_line, told
from duoka.errors import InfeasibleError, WayOut


def way(*options: str, without: tuple[str, ...] = (), **more: Any) -> WayOut:
    numbers: dict[str, Any] = {"context_tokens": 9, "batch": 1, "num_gpus": 1, "free_bytes": 1024}
    return WayOut(
        kind="context", text="a way", options=options, without=without, **{**numbers, **more}
    )


@pytest.mark.parametrize(
    ("given", "change", "expected"),
    [
        ("plan m --context 8K --batch 2", way("--context", "64"), "plan m --batch 2 --context 64"),
        ("plan m --context=8K", way("--context", "64"), "plan m --context 64"),
        ("plan m --device-map a.json -x", way(without=("--device-map",)), "plan m -x"),
        (
            "plan m --master-weights --batch 2",
            way(without=("--master-weights",)),
            "plan m --batch 2",
        ),
        ("plan m", way("--offload"), "plan m --offload"),
        ("--debug plan m", way("--gpus", "A B"), "--debug plan m --gpus 'A B'"),
    ],
)
def test_commands_are_the_one_given_but_for_the_way(
    given: str, change: WayOut, expected: str
) -> None:
    assert command_line(shlex.split(given), change) == f"duoka {expected}"


def test_a_saved_plan_has_to_be_made_anew() -> None:
    arguments = ["plan", "--plan", "a.plan", "--replan"]
    assert command_line(arguments, way("--batch", "2")) == "duoka plan … --batch 2"


def test_lines_are_as_narrow_as_the_terminal_and_commands_whole() -> None:
    ways = [
        way("--context", "64", loses="very much indeed, and more than anybody would like"),
        way("--offload"),
        way("--train", "lora"),
    ]
    error = InfeasibleError("x", ways_out=ways)
    model = "a-long-name-of-a-model" * 4
    text = told(error, ["plan", model], {"--context", "--offload"}, 40)
    assert text is not None
    lines = text.splitlines()[1:]
    assert lines[0] == "  1. a way"
    assert f"     duoka plan {model} --context 64" in lines
    assert all(len(line) <= 40 for line in lines if "duoka" not in line)
    assert "--train" not in text  # which this command doesn't have
    assert told(error, ["check", model], set(), 40) is None


@pytest.fixture
def refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The commands that a refused one tells."""
    monkeypatch.setenv("COLUMNS", "80")
    arguments = f"plan {tiny} --gpus virtual:64MiB --context 1K --batch 512 --prefill-chunk none"
    assert run([*shlex.split(arguments), "--json"]) == 7
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["shortfall_bytes"] > 0
    assert [each["kind"] for each in content["ways_out"]][:2] == ["context", "batch"]
    lines = [line.strip() for line in err.splitlines() if line.startswith("     duoka ")]
    assert len(lines) == len(content["ways_out"])
    return lines


def test_every_command_that_is_told_works(
    refused: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for line in refused:
        _, *arguments = shlex.split(line)
        assert run(arguments) == 0, line
        plan = json.loads(capsys.readouterr().out)
        assert all(
            each["allocated_bytes"] <= each["budget_bytes"] for each in plan["forecast"]["devices"]
        )


def test_offload_on_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tiny), "--gpus", "virtual:64MiB", "--offload", "--context", "96"]) == 0
    assert "CPU's memory" not in capsys.readouterr().out
    assert run(["plan", str(tiny), "--gpus", "virtual:64MiB", "--offload", "--train", "lora"]) == 2
    assert "can't be trained" in capsys.readouterr().err
