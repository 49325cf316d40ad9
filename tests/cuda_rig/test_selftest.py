"""`duoka selftest` on GPUs with and without planted defects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from duoka.checkpoint.checkpoint import Checkpoint  # noqa: F401  (imported before a test's fork)
from duoka.cli.main import run
from duoka.tools.doctor import Examined
from duoka.tools.selftest import run as parts

pytestmark = pytest.mark.cuda_rig(gpus="2GiB,2GiB", context="40MiB", peers=1, copy_limit="1GiB")

# Numbers in the self-test's processes: all in those that compare numbers, small ones in the others.
VALUES = """
import os, sys
modules = "duoka.tools.doctor.device_tests", "duoka.tools.selftest.parts", "duoka.tuner"
if set(modules) & set(sys.orig_argv):
    from cuda_rig.values import values
    compares = '"kernels"' in sys.orig_argv[-1] or '"matrix"' in sys.orig_argv[-1]
    values(**({"most": None} if compares else {})).__enter__()
"""
WRONG_GRAPHS = """
if '"kernels"' in sys.orig_argv[-1]:
    from duoka.runtime.call import paged_model
    paged_model.fill = lambda table, numbers: table.zero_()
"""
# Copies that are computed would arrive.
WITHOUT_DOCTOR = VALUES.replace("duoka.tools.doctor.device_tests", "")
CRASH = """
if '"kernels"' in sys.orig_argv[-1]:
    from duoka.runtime.call.paged_model import PagedModel
    PagedModel.start = lambda self: os._exit(3)
"""
Findings = dict[str, list[dict[str, Any]]]


def selftest(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    customize: str = VALUES,
) -> tuple[int, Findings]:
    """Run the command; return its exit code, and the findings of each part."""
    (path / "sitecustomize.py").write_text(customize)
    paths = [str(path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    code = run(["selftest", "--quick", "--json"])
    checks = json.loads(capfd.readouterr().out)["checks"]
    return code, {f"{check['group']}: {check['name']}": check["findings"] for check in checks}


def errors(findings: Findings) -> list[str]:
    return [
        f"{name}: {each['text']}"
        for name, part in findings.items()
        for each in part
        if each["severity"] == "error"
    ]


def figures_of(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["figures"].get("name", ""): each["figures"] for each in findings}


@pytest.fixture
def _only_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the workloads out."""
    run_part = parts._run_part

    def run_if_kernels(part: str, group: str, *arguments: Any, **options: Any) -> Examined:
        if part == "kernels":
            return run_part(part, group, *arguments, **options)
        return Examined(group=group, name=part, findings=())

    monkeypatch.setattr(parts, "_run_part", run_if_kernels)


@pytest.mark.nightly
def test_memory_is_as_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, findings = selftest(tmp_path, monkeypatch, capfd)
    assert (code, errors(findings)) == (0, [])
    for gpus in ("cuda:0", "cuda:0 + cuda:1"):
        for part in ("{}, CUDA graphs: engine", "{}, --no-graphs: engine", "{}: tune"):
            figures = figures_of(findings[part.format(gpus)])
            for gpu in gpus.split(" + "):
                reserved = figures[f"{gpu} reserved"]
                unused_bytes = reserved["forecast_bytes"] - reserved["measured_bytes"]
                assert 0 <= unused_bytes <= (2 * 2**20 if "tune" in part else 0)
    outside = figures_of(findings["cuda:0, CUDA graphs: engine"])["cuda:0 outside PyTorch"]
    assert outside["measured_bytes"] == 40 * 2**20  # RIG_CONTEXT
    assert figures_of(findings["cuda:1: kernels"])["CUDA graphs"] == {
        "name": "CUDA graphs",
        "difference_from_eager": 0,
    }


@pytest.mark.usefixtures("_only_numbers")
@pytest.mark.cuda_rig(bad_peers="0>1=zeros")
def test_copies_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, findings = selftest(tmp_path, monkeypatch, capfd, WITHOUT_DOCTOR)
    assert code == 13
    wrong = [error for error in errors(findings) if "matrix product" not in error]
    assert wrong == ["numbers: copies: cuda:0 → cuda:1: zeros arrive"]


@pytest.mark.usefixtures("_only_numbers")
def test_graphs_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, findings = selftest(tmp_path, monkeypatch, capfd, VALUES + WRONG_GRAPHS)
    assert code == 13
    wrong = errors(findings)
    assert len(wrong) == 2
    for number, text in enumerate(wrong):
        assert text.startswith(f"cuda:{number}: kernels: CUDA graphs: difference from eager ")


@pytest.mark.usefixtures("_only_numbers")
def test_a_part_that_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, findings = selftest(tmp_path, monkeypatch, capfd, VALUES + CRASH)
    assert code == 13
    for number, text in enumerate(errors(findings)):
        assert text.startswith(f"cuda:{number}: kernels: its process ended with 3")
