"""What goes where: the answer alone to the standard output, in whatever surroundings."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from progress import without_progress

from duoka.cli.main import run

from .conftest import GPUS, MAIN, PROGRAM, SIZES

pytestmark = pytest.mark.process

PLAN = ("plan", *GPUS, *SIZES)
CHECK = ("check", *PLAN[1:])
GENERATE = ("generate", *GPUS, *SIZES, "-p", "hi")


def start(
    tiny: Path,
    environment: dict[str, str],
    command: tuple[str, ...],
    *,
    python: tuple[str, ...] = (),
    shell: str = "",
    **changed: str | None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command on the tiny model; `shell` redirects, and None takes a variable away."""
    name, *options = command
    program = [PROGRAM[0], *python, "-c", MAIN, name, str(tiny), *options]
    inside = {**environment, **changed}
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *program] if shell else program,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={key: value for key, value in inside.items() if value is not None},
        timeout=1200,
        check=False,
    )


def look(
    tiny: Path,
    environment: dict[str, str],
    command: tuple[str, ...],
    *,
    encoding: str = "utf-8",
    disk: str = "",
    **changed: str | None,
) -> subprocess.CompletedProcess[bytes]:
    """The same in this process, which has imported torch already; the output may go to a disk."""
    name, *options = command
    inside = {**environment, **changed}
    out, err = io.BytesIO(), io.BytesIO()
    # As the program sets up its own streams.
    form = {"encoding": encoding, "errors": "backslashreplace"}
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, {k: v for k, v in inside.items() if v is not None}, clear=True),
        open(disk, "wb", buffering=0) if disk else nullcontext(out) as target,  # noqa: PTH123
    ):
        patch.setattr(sys, "stdin", io.StringIO())
        patch.setattr(sys, "stdout", io.TextIOWrapper(target, **form))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, **form))
        code = run([name, str(tiny), *options])
        sys.stderr.flush()
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def test_json_of_a_plan_is_all_there_is(tiny: Path, environment: dict[str, str]) -> None:
    done = start(tiny, environment, (*PLAN, "--json"), python=("-W", "always"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == "duoka.plan"


def test_json_of_an_answer_is_all_there_is(tiny: Path, environment: dict[str, str]) -> None:
    done = look(tiny, environment, (*GENERATE, "--json"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["answers"][0]["prompt"] == "hi"


def test_a_locale_that_knows_only_ascii(tiny: Path, environment: dict[str, str]) -> None:
    ascii_only = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = start(tiny, environment, PLAN, **ascii_only, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", [CHECK, GENERATE], ids=["check", "generate"])
def test_streams_that_know_only_ascii(
    command: tuple[str, ...], tiny: Path, environment: dict[str, str]
) -> None:
    done = look(tiny, environment, command, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("columns", ["20", "x", "10000"])
@pytest.mark.parametrize("command", [PLAN, CHECK], ids=["plan", "check"])
def test_narrow_and_wide(
    command: tuple[str, ...], columns: str, tiny: Path, environment: dict[str, str]
) -> None:
    done = look(tiny, environment, command, COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    assert b"vgpu:0" in done.stdout


COLOURS = [
    ({"NO_COLOR": "1"}, False),
    ({"TERM": "dumb"}, False),
    ({"FORCE_COLOR": "1"}, True),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ({}, False),
]


@pytest.mark.parametrize(("changed", "coloured"), COLOURS, ids=str)
def test_colours_in_a_pipe(
    changed: dict[str, str], coloured: bool, tiny: Path, environment: dict[str, str]
) -> None:
    done = look(tiny, environment, PLAN, **changed)
    assert done.returncode == 0
    colours = [part for part in done.stdout.split(b"\x1b[")[1:] if part[:1] in b"3489"]
    assert bool(colours) == coloured


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


@FULL
@pytest.mark.parametrize(
    "command", [PLAN, (*PLAN, "--json"), (*CHECK, "--json"), GENERATE], ids=str
)
def test_an_answer_on_a_full_disk(
    command: tuple[str, ...], tiny: Path, environment: dict[str, str]
) -> None:
    done = look(tiny, environment, command, disk="/dev/full")
    assert done.returncode == 12, done.stderr
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


@FULL
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_on_a_full_disk_and_in_a_closed_pipe(option: str, environment: dict[str, str]) -> None:
    for shell, code in (('exec "$@" >/dev/full', 12), ('{ sleep 1; exec "$@"; } | true', 0)):
        done = subprocess.run(
            ["sh", "-c", shell, "sh", *PROGRAM, option],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "code"), [(">&-", 141), ("2>&-", 0), ("<&-", 0), ("<&- 2>&-", 0)]
)
def test_closed_streams(
    redirection: str, code: int, tiny: Path, environment: dict[str, str]
) -> None:
    done = start(tiny, environment, PLAN, shell=redirection)
    assert done.returncode == code, done.stderr
    assert (b"vgpu:0" in done.stdout) == (code == 0)
    assert b"Traceback" not in done.stderr


NOWHERE: dict[str, str | None] = {"DUOKA_CACHE": None, "XDG_CACHE_HOME": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"DUOKA_CACHE": "/dev/null/x"}, NOWHERE | {"HOME": "/no/such/home"}, NOWHERE | {"HOME": None}],
    ids=str,
)
def test_a_cache_that_cannot_be_written_costs_time_alone(
    changed: dict[str, str | None], tiny: Path, environment: dict[str, str]
) -> None:
    if os.getuid() == 0 and changed.get("HOME", "") is None:
        pytest.skip("the home of the superuser would be written")
    done = look(tiny, environment, PLAN, **changed)
    assert done.returncode == 0, done.stderr
    assert b"vgpu:0" in done.stdout


@pytest.mark.slow
def test_warnings_of_libraries_do_not_come_between(tiny: Path, environment: dict[str, str]) -> None:
    done = start(tiny, environment, GENERATE, python=("-W", "always"))
    quiet = look(tiny, environment, GENERATE)
    assert done.returncode == quiet.returncode == 0
    assert done.stdout == quiet.stdout
    said = without_progress(quiet.stderr.decode())
    assert said.startswith("ChatGLMForCausalLM on vgpu:0\n")
    assert "Warning" not in said
