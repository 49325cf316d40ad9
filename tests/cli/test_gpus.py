"""``--gpus`` of the program: recorded machines, cards, and what is told when it can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from progress import without_progress
from recordings import replay

import duoka

from .conftest import SIZES, Program


@pytest.fixture(autouse=True)
def unrestricted(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(environment, "CUDA_VISIBLE_DEVICES", raising=False)


def planned(program: Program, tiny: Path, *arguments: str) -> duoka.Plan:
    done = program("plan", tiny, *SIZES, "--json", *arguments)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    return duoka.Plan.from_json(done.stdout)


def refused(program: Program, tiny: Path, *arguments: str, code: int = 3) -> str:
    done = program("plan", tiny, *SIZES, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    return done.stderr


def test_two_of_eight(tiny: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    plan = planned(program, tiny, "--gpus", "2,3", "--use-all")
    assert plan.devices == ("cuda:2", "cuda:3")
    assert [device.uuid for device in plan.fleet.devices] == recording.uuids[2:4]
    shown = program("plan", tiny, *SIZES, "--use-all", "--gpus", "2,3").stdout
    words = " ".join(shown.split())
    assert (
        "cuda:2: NVIDIA GeForce RTX 3090 at 00000000:3D:00.0, 23.69 GiB free of 24.00 GiB, less "
        "771.00 MiB reserved for CUDA"
    ) in words
    assert "cuda:3: NVIDIA GeForce RTX 3090 at 00000000:3E:00.0, 18.81 GiB free" in words
    assert max(map(len, shown.splitlines())) <= 80


def test_other_visible_devices(
    tiny: Path, program: Program, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(monkeypatch, "eight-3090", visible=[6, 3, 2])
    monkeypatch.setitem(environment, "CUDA_VISIBLE_DEVICES", "6,3,2")
    assert planned(program, tiny, "--gpus", "2,3").fleet.names == ("cuda:2", "cuda:1")
    shown = " ".join(program("plan", tiny, *SIZES, "--gpus", "2").stdout.split())
    assert "CUDA_VISIBLE_DEVICES=6,3,2: cuda:2 is nvidia-smi's GPU 2" not in shown
    shown = " ".join(program("plan", tiny, *SIZES, "--gpus", "3").stdout.split())
    assert "CUDA_VISIBLE_DEVICES=6,3,2: cuda:1 is nvidia-smi's GPU 3" in shown
    told = refused(program, tiny, "--gpus", "1,2")
    assert "--gpus takes nvidia-smi's numbers. CUDA_VISIBLE_DEVICES=6,3,2: cuda:2 is" in told
    assert "cuda:0 is nvidia-smi's GPU 6; those are --gpus 2,3,6" in told
    told = refused(program, tiny, "--gpus", "2,5")
    assert "GPU 5 can't be used: it is hidden" in told
    assert "CUDA_VISIBLE_DEVICES='6,3,2'" in told
    assert told.count("NVIDIA GeForce RTX 3090") == 8


def test_no_driver(tiny: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "no-driver")
    for arguments in (["--gpus", "2,3"], []):
        told = refused(program, tiny, *arguments)
        assert "libnvidia-ml.so.1) was not found" in told
        assert "virtual:2x24GiB" in told


def test_what_is_there(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    done = program("gpus")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    (fourth,) = (line for line in lines if line.startswith(" 3 "))
    assert " ".join(fourth.split()[1:]) == (
        "cuda:3 NVIDIA GeForce RTX 3090 24.00 GiB 18.81 GiB 18.00 GiB"
    )
    assert "3: python3 (pid 4242) has 4.87 GiB" in lines
    assert "0–1, 2–3: about 45 GB/s by NVLink" in lines
    assert lines[-1] == "13 pairs: about 9 GB/s over PCIe, through the host"
    data = json.loads(program("gpus", "--json").stdout)
    assert [gpu["name"] for gpu in data["gpus"]] == [str(number) for number in range(8)]
    assert len(data["links"]) == 28


def test_what_cannot_be_used_is_there(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "fell-off")
    lost = [gpu for gpu in json.loads(program("gpus", "--json").stdout)["gpus"] if gpu["trouble"]]
    assert [gpu["name"] for gpu in lost] == ["1", "3"]
    assert "1 can't be used: it doesn't respond: GPU is lost" in program("gpus").stdout
    replay(monkeypatch, "no-driver")
    done = program("gpus")
    assert (done.returncode, done.stdout) == (3, "")
    assert "hint:" in done.stderr


def test_a_plan_is_shown_where_its_gpus_are_not(
    tiny: Path,
    program: Program,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    replay(monkeypatch, "eight-3090")
    made = program("plan", tiny, *SIZES, "--gpus", "2", "--save", tmp_path / "kept.plan")
    assert made.returncode == 0
    replay(monkeypatch, "no-driver")
    monkeypatch.setitem(environment, "CUDA_VISIBLE_DEVICES", "")
    done = program("plan", "--plan", tmp_path / "kept.plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cuda:2" in done.stdout
