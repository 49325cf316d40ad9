"""Calibration, rehearsed on virtual GPUs; on a real one where there is one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from recordings import replay

from duoka.cli.main import run
from duoka.errors import FleetError, MachineError
from duoka.hardware import calibration
from duoka.hardware.calibration import Calibration, GpuFigures
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import available_bytes, host_of_this_machine, total_bytes
from duoka.tools.bench import calibrate as calibrating
from duoka.tools.bench.calibrate import calibrate

MIB = 2**20
FIGURES = GpuFigures(
    product="NVIDIA GeForce RTX 3090",
    memory_bytes=24576 * MIB,
    overhead_bytes=400 * MIB,
    memory_bytes_per_second=850e9,
    flops_per_second=65e12,
    float32_flops_per_second=30e12,
    launch_seconds=4e-6,
    host_bytes_per_second=None,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrating, "_HOST_BYTES", 64 * MIB)
    return tmp_path / "cache"


@pytest.mark.slow
def test_virtual_gpus_rehearse_and_keep_nothing(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "--calibrate", "--gpus", "virtual:2x256MiB", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    (figures,) = told["gpus"]
    # Virtual GPUs hold nothing outside their allocator, and nothing can be pinned for them.
    assert figures["overhead_bytes"] == 0
    assert figures["host_bytes_per_second"] is None
    assert figures["flops_per_second"] > figures["launch_seconds"] > 0
    assert told["host"]["memory_bytes_per_second"] > 1e8
    assert [(link["source"], link["target"]) for link in told["links"]] == [
        ("vgpu:0", "vgpu:1"),
        ("vgpu:1", "vgpu:0"),
    ]
    assert "a dry run" in err
    assert not cache.exists()


def test_one_gpu_of_each_kind_is_measured() -> None:
    fleet = Fleet.parse("2xRTX4090+A10+RTX4090")
    assert [device.name for device in calibrating.kinds(fleet)] == ["cuda:3", "cuda:2"]


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(FleetError, match="these were declared: cuda:0, cuda:1"):
        calibrate(Fleet.parse("RTX4090+24GiB"))


def test_a_gpu_without_room_is_told() -> None:
    with pytest.raises(FleetError, match="vgpu:0 has too little free memory"):
        calibrate(Fleet.parse("virtual:1MiB"))


def test_a_gpu_that_computes_for_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    with pytest.raises(FleetError, match=r"GPU 3 is busy with .* \(pid"):
        calibrate(Fleet.detect("3"))


def test_kept_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    recording = replay(monkeypatch, "eight-3090")
    for device in recording.data["devices"]:
        device.pop("nvmlDeviceGetComputeRunningProcesses_v3", None)
    driver = recording.data["nvmlSystemGetDriverVersion"]
    fleet = Fleet.detect("0,1")
    monkeypatch.setattr(calibrating.devices, "materialise", lambda fleet: None)
    monkeypatch.setattr(calibrating, "crossing_rate", lambda source, target: (5e9, 1e-5))

    def interrupted(device: Device) -> GpuFigures:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrating, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(fleet)
    assert calibration.read_calibration(driver).gpus == ()
    monkeypatch.setattr(calibrating, "_measure", lambda device: FIGURES)
    found = calibrate(fleet)
    assert found.path == calibration.path_for(driver)
    assert calibration.read_calibration(driver) == found.calibration
    assert Fleet.detect("0").devices[0].flops_per_second == 65e12

    cache.joinpath("calibration").rename(cache / "old")
    cache.joinpath("calibration").write_text("a file instead of the directory")
    with pytest.raises(MachineError, match="can't be saved"):
        calibrate(fleet)


def test_a_launch_is_its_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def seconds_of(call: calibrating.Call, *names: str) -> float:
        nonlocal calls
        call()
        calls += 1
        return 0.2

    monkeypatch.setattr(calibrating, "median_seconds", seconds_of)
    # Four layers of a few dozen kernels each.
    assert 100 < 0.2 / calibrating.launch_time("cpu") < 300
    assert calls == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_is_measured_in_a_minute() -> None:
    started = time.perf_counter()
    found = calibrate(Fleet.detect())
    assert time.perf_counter() - started < 60
    assert found.path is not None
    assert found.path.exists()
    measured: Calibration = calibration.read_calibration(found.calibration.driver)
    figures = measured.gpus[0]
    assert 64 * MIB < figures.overhead_bytes < 4096 * MIB
    assert figures.flops_per_second > figures.memory_bytes_per_second > 1e9
    assert figures.host_bytes_per_second is not None
    assert {"memory_bytes_per_second", "reserve_bytes"} <= set(Fleet.detect().devices[0].measured)


def test_without_a_gpu_the_host_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(monkeypatch, "no-driver")
    assert run(["bench", "--calibrate"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"host memory  [\d.]+ GB/s, \d+ threads?\n", out)
    assert "only host memory is measured: NVIDIA's management library" in err
    assert f"saved in {calibration.path_for('')}" in err
    kept = calibration.read_calibration("").host
    assert kept is not None
    assert (kept.threads, kept.memory_bytes) == (torch.get_num_threads(), total_bytes())
    assert host_of_this_machine().memory_bytes_per_second == kept.memory_bytes_per_second
    assert run(["bench", "--calibrate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["driver"], told["gpus"], told["links"]) == ("", [], [])
    assert told["host"]["threads"] == torch.get_num_threads()
    assert run(["bench", "--calibrate", "--gpus", "all"]) == 3
    assert "was not found" in capsys.readouterr().err


def test_the_host_multiplies_in_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def multiply(row: torch.Tensor, matrix: torch.Tensor) -> None:
        assert (row.shape, row.dtype) == ((1, matrix.shape[1]), matrix.dtype)
        sizes.append(matrix.nbytes)

    def timed(call: calibrating.Call, repeats: int, names: object) -> float:
        assert repeats == 1
        call()
        return 0.5 / len(sizes)

    monkeypatch.setattr(calibrating, "linear", multiply)
    monkeypatch.setattr(calibrating, "_time_round", timed)
    assert (available_bytes() or 0) > 256 * MIB
    found = calibrating._measure_host()
    assert {*sizes} == {64 * MIB}
    assert found.memory_bytes_per_second == float(f"{64 * MIB * 2 * len(sizes):.1e}")
    monkeypatch.setattr(calibrating, "available_bytes", lambda: 32 * MIB)
    calibrating._measure_host()
    assert sizes[-1] == 8 * MIB
