from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from duoka.workers.process import WorkerProcess, describe_exit

pytestmark = pytest.mark.process


def run(code: str) -> WorkerProcess:
    return WorkerProcess([sys.executable, "-IS", "-c", code])


def test_it_has_a_group_and_an_exit_code_of_its_own() -> None:
    process = run("import sys; sys.stdin.read(); sys.exit(3)")
    assert process.exit_code is None
    assert os.getpgid(process.pid) == process.pid
    assert process.wait(0.01) is None
    process._pipe.close()  # as when the parent is gone
    assert process.wait() == process.end() == 3


def test_its_children_end_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    process = run(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    while not child.exists() or not child.read_text():
        time.sleep(0.02)
    assert process.end(0.05) == -signal.SIGKILL
    end = time.monotonic() + 30
    while Path(f"/proc/{child.read_text()}/cmdline").exists():
        state = Path(f"/proc/{child.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        assert time.monotonic() < end
        time.sleep(0.02)
    assert process.end() == -signal.SIGKILL  # once more, harmlessly


def test_one_that_cant_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        WorkerProcess([str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("code", "text"),
    [(None, "its connection was lost"), (-9, "signal 9"), (75, "exit code 75")],
)
def test_how_it_has_ended_is_described(code: int | None, text: str) -> None:
    assert describe_exit(code) == text
