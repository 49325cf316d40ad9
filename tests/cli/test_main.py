"""The program as a whole: help, version, wrong usage, pipes, colours."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from progress import without_progress
from recordings import replay
from typer.main import get_command

from duoka import __version__, errors
from duoka.cli.main import app, run

from .conftest import GPUS, PROGRAM, SIZES

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
PLANNING = ("plan", "check", "generate", "chat")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"duoka {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_commands_and_exit_codes(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"│ {command} " in out for command in COMMANDS)
    for cls in errors.DuokaError.__subclasses__():
        if cls.__module__ == errors.__name__:
            assert f"{cls.exit_code} " in out


@pytest.mark.parametrize(
    ("name", "place", "model"),
    [
        ("no-driver", "no usable NVIDIA GPU", "zai-org/glm-4-9b-chat"),
        ("old-driver", "no usable NVIDIA GPU", "zai-org/glm-4-9b-chat"),
        ("two-4090", "2 × NVIDIA GeForce RTX 4090", "zai-org/glm-4-9b-chat"),
        ("mig", "NVIDIA A100", "zai-org/glm-4-9b-chat"),
        ("small", "2 × NVIDIA GeForce RTX 4090", "zai-org/chatglm3-6b"),
    ],
)
def test_first_steps_fit_this_machine(
    name: str,
    place: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recording = replay(monkeypatch, "two-4090" if name == "small" else name)
    if name == "small":
        for device in recording.data["devices"]:
            device["nvmlDeviceGetMemoryInfo_v2"]["free"] = 8 * 2**30
    assert run([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert place in lines[1]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 20
    steps = [shlex.split(line) for line in lines if line.startswith("  ")]
    assert [words[1] for words in steps if words[1] != "demo"] == ["plan", "chat", "tune"]
    assert all(("--gpus" in words) == ("no " in place) for words in steps if words[1] != "demo")
    assert model in steps[0]
    for words in steps:  # Typer takes them
        COMMANDS[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_in_a_sentence_what_a_command_does_and_has_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.count(f"duoka {command}") >= 2  # the usage, and an example
    assert err == ""
    first, *examples = COMMANDS[command].help.split("\n\n")
    assert re.match(r"[A-Z][^.]+\.", first)
    assert any(f"[bold]duoka {command}[/]" in example for example in examples)
    if command in PLANNING:
        for option in ("--gpus", "--context", "--batch", "--dtype", "--plan"):
            assert f"{option} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_a_sentence_and_a_value_in_capitals(command: str) -> None:
    names = [option for item in COMMANDS[command].params for option in item.opts]
    assert "--debug" in names
    for item in COMMANDS[command].params:
        assert re.match(r"[\w\"-].*[.)\"]$", item.help, re.DOTALL), item.opts
        assert item.is_flag if item.metavar is None else re.search(r"[A-Z]", item.metavar)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_wrong_option_is_told_on_the_standard_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "--frob"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: No such option: --frob")
    assert f"hint: `duoka {command}".strip() in err


@pytest.mark.parametrize(
    "command", sorted({*COMMANDS} - {"gpus", "demo", "doctor", "selftest", "top"})
)
def test_a_command_that_is_told_nothing_asks_for_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7]) == ("", "error: ")
    assert "hint: " in err


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom duoka.cli.main import run\nfor command in sys.argv[1:]: "
        "assert run([command, '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy.testing'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, *COMMANDS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("given", ["--debug plan /no/such", "plan --debug /no/such"])
def test_debug_shows_the_traceback(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(given.split()) == 4
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: " in err


def test_a_reader_that_goes_away_is_no_error(tiny: Path, environment: dict[str, str]) -> None:
    command = [*PROGRAM, "plan", str(tiny), *GPUS, *SIZES, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert without_progress(told.decode()) == ""
