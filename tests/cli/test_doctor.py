"""``duoka doctor``: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctoring import machine

from duoka.tools.doctor import facts, host

from .conftest import Program


@pytest.fixture(autouse=True)
def usual_host(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of these tests may be short of anything: that is another test's business."""
    check = ("software", "libraries", host.check_versions)
    monkeypatch.setattr(sys.modules["duoka.tools.doctor.diagnose"], "_HOST_CHECKS", (check,))
    monkeypatch.delitem(environment, "CUDA_VISIBLE_DEVICES", raising=False)


def test_a_machine_without_gpus(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "no-driver")
    done = program("doctor")
    assert done.returncode == 0
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    # Older versions of rich leave more between columns.
    words = [" ".join(line.split()) for line in lines]
    assert words[:2] == ["GPUs", "note driver: no NVIDIA GPU found"]
    assert done.stdout.count("NVIDIA") == 1
    assert "ok libraries: all libraries are in the supported ranges" in " ".join(words)
    assert lines[-1] == "0 errors, 0 warnings, 1 note; 1 ok"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "code", "severity"),
    [("two-4090", 0, "ok"), ("eight-3090", 15, "warning"), ("fell-off", 13, "error")],
)
def test_exit_codes(
    name: str, code: int, severity: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, name, visible=[0, 2] if name == "fell-off" else None)
    done = program("doctor", "--json")
    assert done.returncode == code
    told = json.loads(done.stdout)
    assert told["severity"] == severity
    assert told["checks"][0]["group"] == "GPUs"
    shown = program("doctor")
    assert shown.returncode == code
    assert "torch: torch 2.13.0+cu126 for CUDA 12.6 supports" in " ".join(shown.stdout.split())


def test_a_check_that_fails_stops_no_other(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "two-4090")

    def broken(devices: object) -> facts.Probed:
        raise RuntimeError("something unforeseen")

    monkeypatch.setattr(facts, "probe", broken)
    done = program("doctor")
    assert done.returncode == 13
    words = " ".join(done.stdout.split())
    assert words.count("the check failed: RuntimeError: something unforeseen") == 3
    assert "libraries: all libraries" in words


def test_a_model(tiny: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "no-driver")
    done = program("doctor", tiny)
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert "checkpoint: 1 file of safetensors" in words
    assert "no GPU to plan for" in words
    (tiny.parent / "empty").mkdir(exist_ok=True)
    done = program("doctor", tiny.parent / "empty")
    assert done.returncode == 13
    assert "has no config.json" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_model_on_gpus(tiny: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "no-driver")
    done = program("doctor", tiny, "--gpus", "virtual:2x64MiB")
    assert done.returncode == 0
    assert "fit: it fits on vgpu:0 with" in " ".join(done.stdout.split())
    done = program("doctor", tiny, "--gpus", "virtual:2MiB")
    assert done.returncode == 13
    assert f"duoka plan {tiny} --gpus virtual:2MiB" in " ".join(done.stdout.split())


@pytest.mark.process
def test_without_a_gpu_torch_is_not_imported(environment: dict[str, str], python: str) -> None:
    code = (
        "import sys; from duoka.cli.main import run; run(['doctor', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python, "-c", code], env=hidden, capture_output=True, check=False)
    told = json.loads(done.stdout)
    if told["checks"][0]["findings"][0]["severity"] == "ok":
        pytest.skip("there is a GPU here")
    assert done.returncode == 0
