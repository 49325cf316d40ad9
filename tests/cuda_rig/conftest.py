"""Tests on PyTorch's CUDA build without a GPU. Each has GPUs of its own, in a process of its own.

``@pytest.mark.cuda_rig(gpus="24GiB,12GiB", capability="7.5")``: the keywords are the rig's
settings (README.md). `make cuda` runs these tests; elsewhere they are skipped.

The processes are forks of a server that has one thread (`fork_server`). A fork of pytest's own
process may wait forever: xdist's workers have threads, and a lock that one of them holds at that
moment stays locked.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch

from duoka.base.quiet import quiet_libraries

with quiet_libraries():  # by itself it starts CUDA where torchao is installed
    import transformers.modeling_utils  # noqa: F401

_IS_RIG = hasattr(ctypes.CDLL(None), "rig_restart")
# Names the file that a test's process writes its reports to.
_REPORTS = "DUOKA_RIG_REPORTS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _IS_RIG and item.get_closest_marker("cuda_rig"):
            item.add_marker(pytest.mark.skip(reason="needs the CUDA rig: make cuda"))


@pytest.fixture(scope="session", autouse=True)
def _restarted_rig() -> None:
    if _REPORTS in os.environ:
        torch.set_num_threads(1)
        assert not torch.cuda.is_initialized()
        assert ctypes.CDLL(None).rig_restart() == 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a test in a process with the rig's settings; CUDA never starts in this one."""
    markers = list(item.iter_markers("cuda_rig"))  # the closest first
    if not markers or not _IS_RIG or _REPORTS in os.environ:
        return None
    settings = {
        f"RIG_{name.upper()}": str(value)
        for marker in reversed(markers)
        for name, value in marker.kwargs.items()
    }
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, settings):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item, settings: dict[str, str]) -> Iterator[Any]:
    """What a process reports of a test, and that it ended too early where it did."""
    factory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    directory = factory.mktemp("rig")
    reports = directory / "reports"
    inherited = {name: each for name, each in os.environ.items() if not name.startswith("RIG_")}
    command = [_server(item.session), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    command += ["-W", "ignore:Module already imported"]  # duoka's own plugin, by the server
    done = subprocess.run(
        [*map(str, command), "--basetemp", str(directory / "own"), item.nodeid],
        cwd=item.config.rootpath,
        env=inherited | settings | {_REPORTS: str(reports)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = reports.read_text().splitlines() if reports.exists() else []
    for line in lines:
        yield item.ihook.pytest_report_from_serializable(config=item.config, data=json.loads(line))
    if not lines or json.loads(lines[-1])["when"] != "teardown":
        text = f"the process ended with exit code {done.returncode}\n{done.stdout}{done.stderr}"
        at = item.nodeid, item.location, {}
        yield pytest.TestReport(*at, "failed", text, "call")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a test's process: write down what becomes of it."""
    if _REPORTS in os.environ:
        data = report._to_json()
        data["$report_type"] = "TestReport"
        with Path(os.environ[_REPORTS]).open("a") as file:
            file.write(f"{json.dumps(data)}\n")


def _server(session: pytest.Session) -> Path:
    """The program in Python's place, started with the first test, and ended with the session."""
    program: Path | None = getattr(session, "_rig_python", None)
    if program is None:
        factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        scope = fork_server.forking_python(factory.mktemp("forks"))
        program = session._rig_python = scope.__enter__()  # type: ignore[attr-defined]
        session.config.add_cleanup(lambda: scope.__exit__(None, None, None))
    return program
