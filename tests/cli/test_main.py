"""The program as a whole: help, version, wrong usage, pipes, colours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from progress import without_progress
from typer.main import get_command

from duoka import __version__, errors
from duoka.cli.main import app, run

from .conftest import GPUS, PROGRAM, SIZES, Program

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
PLANNING = ("plan", "check", "generate", "chat")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"duoka {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_commands_and_exit_codes(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"│ {command} " in out for command in COMMANDS)
    for cls in errors.DuokaError.__subclasses__():
        if cls.__module__ == errors.__name__:
            assert f"{cls.exit_code} " in out


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


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"gpus", "demo", "doctor", "top"}))
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


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["frob"], 2, "No such command"),
        (["plan", "--frob"], 2, "No such option"),
        (["plan", "a", "b"], 2, "unexpected extra argument"),
        (["plan", "/no/such/place", "--gpus", "24GiB"], 4, "/no/such/place"),
        (["plan", "--plan", "/no/such/plan"], 10, "/no/such/plan"),
        (["plan", "x", "--plan", "p", "--gpus", "24GiB"], 2, "--gpus can't be given with --plan"),
        (["generate", "x", "-p", ""], 2, "a prompt is empty"),
        (["generate", "x", "--prompt-file", "/no/such/file"], 2, "/no/such/file"),
        (["demo", "--keep", "/"], 2, "is there already"),
    ],
)
def test_wrong_usage(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert without_progress(err).startswith("error: ")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--gpus", "frob"], 2, "no GPU 'frob' is in the catalogue"),
        (["--gpus", "24GiB", "--context", "x"], 2, "'x' is not a number of tokens"),
        (["--gpus", "24GiB", "--context", "8", "--new-tokens", "8"], 2, "no room for a prompt"),
        (["--gpus", "24GiB", "--batch", "0"], 2, "batch"),
        (["--gpus", "24GiB", "--dtype", "int3"], 2, "int3"),
        (["--gpus", "24GiB", "--prefill-chunk", "some"], 2, "some"),
        (["--gpus", "24GiB", "--objective", "beauty"], 2, "beauty"),
        (["--gpus", "24GiB", "--context", "1M"], 2, "1024"),
        pytest.param(
            *(["--gpus", "virtual:2MiB"], 7, "does not fit"), marks=pytest.mark.slow, id="unfit"
        ),
        (["--gpus", "24GiB", "--save", "/no/such/folder/p"], 2, "/no/such/folder/p"),
    ],
)
def test_wrong_wishes(
    tiny: Path,
    arguments: list[str],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
) -> None:
    monkeypatch.setenv("DUOKA_CACHE", environment["DUOKA_CACHE"])
    assert run(["plan", str(tiny), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "/no/such/place", "--debug"]) == 4
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


def test_no_colour_where_there_is_no_terminal(tiny: Path, process: Program) -> None:
    done = process("plan", tiny, *GPUS, *SIZES)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "\x1b" not in done.stdout + done.stderr


def test_a_terminal_that_knows_only_ascii(tiny: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*PROGRAM, "plan", str(tiny), *GPUS, *SIZES],
        capture_output=True,
        env={**environment, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"# weights" in done.stdout
