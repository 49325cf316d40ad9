from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duoka.workers.group import WorkerGroup

pytestmark = pytest.mark.process

WORKER = """
import os, signal, sys, time
from pathlib import Path
from duoka.workers.worker import end_with_parent
end_with_parent()
rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
def stop(*_):
    (directory / f"stopped{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(directory / f"began{rank}").write_text(str(os.getpid()))
what = sys.argv[2]
if what == "fail" and rank == 1:
    sys.exit(7)
if what != "end":
    time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(directory: Path, what: str, number: int = 2) -> WorkerGroup:
    return WorkerGroup("some_worker", number, [str(directory), what])


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_all_end_well(directory: Path) -> None:
    with start(directory, "end", 3) as workers:
        assert workers.wait() == {}
    assert all((directory / f"began{rank}").exists() for rank in range(3))


@pytest.mark.parametrize("how", ["fail", "killed"])
def test_the_end_of_one_ends_the_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("duoka.workers.group._GRACE_SECONDS", 0.5)
    with start(directory, how) as workers:
        if how == "killed":
            wait_for(directory / "began1")
            os.kill(workers._processes[1].pid, signal.SIGKILL)
        assert workers.wait() == {1: 7 if how == "fail" else -signal.SIGKILL}
        assert not any(is_running(process.pid) for process in workers._processes)


def test_they_are_asked_to_stop(directory: Path) -> None:
    with start(directory, "sleep") as workers:
        wait_for(directory / "began0", directory / "began1")
        workers.terminate()
        assert workers.wait() == {}
    assert all((directory / f"stopped{rank}").exists() for rank in range(2))


def test_nothing_is_left_when_the_parent_is_killed(directory: Path) -> None:
    code = (
        f"from duoka.workers.group import WorkerGroup\n"
        f"WorkerGroup('some_worker', 2, [{str(directory)!r}, 'sleep']).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(directory / "began0", directory / "began1")
    processes = [int((directory / f"began{rank}").read_text()) for rank in range(2)]
    assert all(map(is_running, processes))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
