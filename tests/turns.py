"""What one commit tests, and what it leaves to `make nightly`.

A twelfth of these goes by turn: the rare families of transformers; the cases of a parametrized test
that are slow, at least one; the other slow tests; the cases beyond the first of each test, which
`make test` runs; and the commands of the pages. The commit's hash selects one of twelve turns, so a
commit always tests the same. DUOKA_TURN=k selects turn k, and DUOKA_TURN=all, which `make nightly`
sets, tests all. A few tests that take minutes are for the night alone (NIGHTLY).

A test is slow if it is marked so, or if `slow_tests.txt` has it. `python tests/turns.py
build/durations.xml 4` writes that file anew: `make test-all` leaves the durations of calls
(a fixture that many tests share would count for the first of them).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree as ET

PARTS = 12
VARIABLE = "DUOKA_TURN"

_SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
SLOW = frozenset(_SLOW_TESTS.read_text(encoding="utf-8").split())
"""Tests, or files of tests, that took more than 4 s of `make test-all`, or 2 s of `make test`.

Measured on two cores without AVX-512.
"""

Case = TypeVar("Case")


def commit_turn(directory: Path) -> str:
    """Return the part that the commit of a checkout selects; "0" outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return str(int(done.stdout, 16) % PARTS)


def in_turn(cases: Sequence[Case], parts: int = PARTS, turn: str | None = None) -> list[Case]:
    """Return every `parts`-th case, beginning with the one whose turn it is."""
    turn = turn or os.environ.get(VARIABLE, "all")
    return list(cases if turn == "all" else cases[int(turn) % parts :: parts])


_PREEMPTED = "tests/engine/test_engine.py::test_preempted_answers_are_those_of_an_engine_with_room"
NIGHTLY = {
    # A run is killed in the middle, and goes on: each commit does so without new processes.
    "tests/tuner/test_tune.py::test_a_run_goes_on_wherever_it_was_killed": (
        "tests/tuner/test_checkpoints.py",
        "tests/tuner/test_tune.py::test_ctrl_c_saves_and_leaves",
    ),
    "tests/tuner/test_machines.py::test_a_run_goes_on_where_torchrun_starts_it_again": (
        "tests/tuner/test_machines.py::test_two_machines",
    ),
    "tests/tuner/test_machines.py::test_a_run_that_torchrun_stops_has_no_result_yet": (
        "tests/tuner/test_machines.py::test_two_machines",
        "tests/tuner/test_tune.py::test_ctrl_c_saves_and_leaves",
    ),
    # A server loses a part: each commit kills an engine.
    "tests/serve/test_server.py::test_a_stage_that_dies_ends_its_engine": (
        "tests/serve/test_server.py::test_an_engine_that_dies_is_told_and_started_again",
        "tests/engine/test_staged_executor.py::test_a_process_that_is_killed_ends_the_engine",
    ),
    "tests/serve/test_server.py::test_a_copy_that_dies_loses_its_own_requests_alone": (
        "tests/serve/test_server.py::test_an_engine_that_dies_is_told_and_started_again",
        "tests/serve/test_pool.py",
    ),
    # Half a minute of two processes.
    f"{_PREEMPTED}[paged-True]": (
        _PREEMPTED,
        "tests/engine/test_staged_executor.py::test_processes_answer_as_one_does",
    ),
    # A demo model learns an answer: each commit trains in layouts, and reads adapters back.
    "tests/tuner/test_demo.py::test_a_new_answer": (
        "tests/tuner/test_tune.py::test_every_layout_learns_the_same",
        "tests/tuner/test_tune.py::test_an_adapter_is_trained_on",
    ),
    # Six processes answer: each commit runs deployments of which one is killed.
    "tests/tools/bench/test_deployments.py"
    "::test_a_split_and_copies_run_and_take_the_memory_of_its_forecast": (
        "tests/tools/bench/test_deployments.py"
        "::test_a_process_that_is_killed_ends_its_deployment_alone",
        "tests/engine/test_memory.py::test_processes_take_what_was_forecast",
    ),
    # Models at full size.
    "tests/api/test_towers.py::test_a_vision_model_at_full_size_learns_from_a_picture": (
        "tests/api/test_towers.py::test_training_on_a_picture_is_checked_where_the_picture_fits",
    ),
}
"""Tests that no commit runs, and those of each commit that hold the same promise."""


def is_slow(node_id: str) -> bool:
    """Whether `slow_tests.txt` has a test, or its whole file."""
    test = node_id.partition("[")[0]
    return test in SLOW or test.partition("::")[0] in SLOW


def write_slow_tests(durations: str, most_seconds: float) -> None:
    """Add tests of which each case took long, and take out those of which one was quick.

    Tests in the root of this directory are those of the house, and stay quick.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for case in ET.parse(durations).iter("testcase"):
        folder, _, module = case.attrib["classname"].rpartition(".")
        test = case.attrib["name"].partition("[")[0]
        if folder != "tests":
            name = f"{folder.replace('.', '/')}/{module}.py::{test}"
            seconds[name].append(float(case.attrib["time"]))
    least = {test: min(taken) for test, taken in seconds.items()}
    kept = {test for test in SLOW if least.get(test, most_seconds) >= most_seconds / 2}
    found = {test for test in least if least[test] >= most_seconds}
    _SLOW_TESTS.write_text("\n".join(sorted(kept | found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_slow_tests(sys.argv[1], float(sys.argv[2]))
