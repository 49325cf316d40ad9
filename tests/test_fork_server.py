"""Programs that are forks end, hear and say what they would as programs of their own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
WAIT = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["fork", "python"])
def program(request: pytest.FixtureRequest, python: str, forking_python: Path) -> str:
    return python if request.param else str(forking_python)


def test_streams_arguments_and_the_exit_code(program: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['COLOUR'], input()); "
        "print('wrong', file=sys.stderr); sys.exit(5)"
    )
    done = subprocess.run(
        [program, "-c", code, "a", "--b"],
        input="x\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"COLOUR": "red"},
        check=False,
    )
    assert done.stdout == f"['a', '--b'] {tmp_path} red x\n"
    assert (done.stderr, done.returncode) == ("wrong\n", 5)


def test_an_error_is_shown(program: str) -> None:
    done = subprocess.run(
        [program, "-c", "import nosuchmodule"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("No module named 'nosuchmodule'\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(program: str, signum: signal.Signals) -> None:
    with subprocess.Popen([program, "-c", WAIT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signum)
        # The stream ends when nobody is left who could write there.
        assert process.stdout.read() == b""
        assert process.wait(60) == -signum


def test_it_may_end_itself(program: str) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([program, "-c", code], check=False).returncode == -signal.SIGKILL


def test_a_handler_hears_a_signal(program: str) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); {WAIT}"
    with subprocess.Popen([program, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7


def test_files_that_are_handed_on_keep_their_numbers(program: str, tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as first, (tmp_path / "b").open("w") as second:
        numbers = [first.fileno(), second.fileno()]
        code = f"import os; os.write({numbers[0]}, b'one'); os.write({numbers[1]}, b'two')"
        subprocess.run([program, "-c", code], pass_fds=numbers, check=True)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["one", "two"]
