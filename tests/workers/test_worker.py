"""The exit codes of a worker, in processes of their own."""

from __future__ import annotations

import sys

import pytest

from duoka.errors import TrainingError
from duoka.workers.process import WorkerProcess
from duoka.workers.worker import DEFECT, LOST

pytestmark = pytest.mark.process

ENDINGS = {
    "pass": 0,
    "raise EOFError": LOST,
    "raise ConnectionResetError": LOST,
    "raise TrainingError('no room')": TrainingError.exit_code,
    "raise ZeroDivisionError": DEFECT,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_ending_has_its_exit_code(ending: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "from duoka.errors import TrainingError\n"
        "from duoka.workers.worker import run_to_exit\n"
        f"def work():\n    {ending}\n"
        "run_to_exit(work)"
    )
    assert WorkerProcess([sys.executable, "-c", code]).end(60) == ENDINGS[ending]
    assert ("Traceback" in capfd.readouterr().err) == (ENDINGS[ending] == DEFECT)
