"""What was measured is found again, strictly, and takes the place of published figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import replay

from duoka.hardware import calibration
from duoka.hardware.calibration import Calibration, GpuFigures, HostFigures, LinkFigures
from duoka.hardware.device import STEP_BYTES
from duoka.hardware.fleet import Fleet

MIB, GIB = 2**20, 2**30
DRIVER = "550.54.15"
FIGURES = GpuFigures(
    product="NVIDIA GeForce RTX 3090",
    memory_bytes=24576 * MIB,
    overhead_bytes=400 * MIB,
    memory_bytes_per_second=850e9,
    flops_per_second=65e12,
    float32_flops_per_second=30e12,
    launch_seconds=4e-6,
    host_bytes_per_second=25e9,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    return tmp_path


def made(
    *gpus: GpuFigures, links: tuple[LinkFigures, ...] = (), driver: str = DRIVER
) -> Calibration:
    return Calibration(driver=driver, torch=calibration.torch_version(), gpus=gpus, links=links)


def link(source: str, target: str, speed: float) -> LinkFigures:
    return LinkFigures(source=source, target=target, bytes_per_second=speed, latency_seconds=8e-6)


def test_what_was_kept_is_found() -> None:
    assert calibration.read_calibration(DRIVER) == made()
    measured = made(FIGURES, links=(link("GPU-a", "GPU-b", 1e10),))
    assert calibration.keep_calibration(measured) == calibration.path_for(DRIVER)
    assert calibration.read_calibration(DRIVER) == measured
    assert calibration.read_calibration("560.1").gpus == ()


def test_what_is_measured_again_takes_the_place_of_the_old() -> None:
    other = replace(FIGURES, product="NVIDIA A10")
    calibration.keep_calibration(made(FIGURES, other, links=(link("GPU-a", "GPU-b", 1e10),)))
    faster = replace(FIGURES, memory_bytes_per_second=900e9)
    calibration.keep_calibration(made(faster, links=(link("GPU-b", "GPU-a", 2e10),)))
    found = calibration.read_calibration(DRIVER)
    assert set(found.gpus) == {other, faster}
    assert len(found.links) == 2


@pytest.mark.parametrize("damage", ["cut", "nothing", "driver", "infinite", "unknown"])
def test_what_was_damaged_was_not_measured(damage: str) -> None:
    path = calibration.keep_calibration(made(FIGURES))
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    if damage == "driver":
        data["driver"] = "1"
    elif damage == "infinite":
        data["gpus"][0]["launch_seconds"] = float("inf")
    elif damage == "unknown":
        data["gpus"][0]["colour"] = "green"
    told = json.dumps(data)
    damaged = {"cut": text[:-3], "nothing": ""}.get(damage, told)
    path.write_text(damaged, encoding="utf-8")
    assert calibration.read_calibration(DRIVER) == made()


def test_the_reserve_has_a_margin() -> None:
    assert replace(FIGURES, overhead_bytes=0).reserve_bytes == 176 * MIB
    assert FIGURES.reserve_bytes == 576 * MIB
    assert replace(FIGURES, overhead_bytes=1024 * MIB).reserve_bytes == 1264 * MIB


def test_two_kinds_of_one_name_differ_in_memory() -> None:
    small = replace(FIGURES, memory_bytes=8 * GIB)
    both = made(FIGURES, small)
    assert both.of_product(FIGURES.product, 8 * GIB - 100 * MIB) == small
    assert both.of_product(FIGURES.product, 24 * GIB) == FIGURES
    assert both.of_product(FIGURES.product, 16 * GIB) is None
    assert both.of_product(FIGURES.product, None) is None


def test_detected_gpus_are_as_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    driver = recording.data["nvmlSystemGetDriverVersion"]
    before = Fleet.detect("0,1")
    one, other = recording.uuids[:2]
    calibration.keep_calibration(made(FIGURES, links=(link(one, other, 5e9),), driver=driver))
    after = Fleet.detect("0,1")
    first = after.devices[0]
    assert (first.memory_bytes_per_second, first.flops_per_second) == (850e9, 65e12)
    assert (first.launch_seconds, first.host_bytes_per_second) == (4e-6, 25e9)
    assert {"memory_bytes_per_second", "reserve_bytes"} <= set(first.measured)
    free = before.devices[0].budget_bytes + before.devices[0].reserve_bytes
    assert first.budget_bytes == (free - FIGURES.reserve_bytes) // STEP_BYTES * STEP_BYTES
    there, back = after.link(*after.names), after.link(*reversed(after.names))
    assert there is not None
    assert back is not None
    assert (there.bytes_per_second, there.measured, back.measured) == (5e9, True, False)
    calibration.path_for(driver).unlink()
    assert Fleet.detect("0,1") == before


HOST = HostFigures(memory_bytes=64 * GIB, memory_bytes_per_second=5e10, threads=16)


def test_the_hosts_figures_are_beside_the_gpus() -> None:
    old = calibration.keep_calibration(made(FIGURES))
    assert "host" not in json.loads(old.read_text(encoding="utf-8"))  # as written before there were
    assert calibration.read_calibration(DRIVER).host is None
    assert calibration.keep_calibration(replace(made(), host=HOST)) == old
    assert calibration.read_calibration(DRIVER) == replace(made(FIGURES), host=HOST)
    calibration.keep_calibration(made(replace(FIGURES, launch_seconds=1e-6)))
    assert calibration.read_calibration(DRIVER).host == HOST
    assert HOST.is_of(62 * GIB)
    assert not HOST.is_of(128 * GIB)
    assert not HOST.is_of(0)
    data = json.loads(old.read_text(encoding="utf-8"))
    data["host"]["threads"] = "16"
    old.write_text(json.dumps(data), encoding="utf-8")
    assert calibration.read_calibration(DRIVER) == made()


def test_without_a_driver_the_host_alone_is_kept() -> None:
    calibration.keep_calibration(replace(made(driver=""), host=HOST))
    assert calibration.read_calibration("").host == HOST
    assert calibration.read_calibration(DRIVER).host is None
