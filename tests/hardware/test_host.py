from __future__ import annotations

from pathlib import Path

import pytest
from recordings import replay

from duoka import Device, Fleet
from duoka.errors import FleetError
from duoka.hardware import calibration, host
from duoka.hardware.calibration import Calibration, HostFigures
from duoka.hardware.host import available_bytes, host_device, host_of_this_machine, total_bytes
from duoka.planner.device_map import DeviceMap
from duoka.planner.limits import fleet_for

FLEET = Fleet.parse("virtual:2x1GiB")
GIB = 2**30


def write(root: Path, *, available: str = "", limit: str = "", used: str = "") -> Path:
    for name, content in (
        ("proc/meminfo", available),
        ("sys/fs/cgroup/memory.max", limit),
        ("sys/fs/cgroup/memory.current", used),
    ):
        if content:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
    return root


def test_what_is_available(tmp_path: Path) -> None:
    text = f"MemTotal: {2**24} kB\nMemAvailable:   {2**22} kB\nSwapFree: 9 kB\n"
    assert total_bytes(write(tmp_path, available=text)) == 16 * GIB
    assert available_bytes(write(tmp_path, available=text)) == 4 * GIB
    assert available_bytes(write(tmp_path, limit="max\n", used="5\n")) == 4 * GIB
    assert available_bytes(write(tmp_path, limit=f"{3 * GIB}\n", used=f"{GIB}\n")) == 2 * GIB
    assert total_bytes(tmp_path) == 3 * GIB
    assert available_bytes(write(tmp_path, limit="5", used="6")) == 0


def test_where_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is total_bytes(tmp_path) is None
    assert available_bytes(write(tmp_path, available="nothing of that kind")) is None
    assert (available_bytes() or 0) > 2**20


def test_the_cpu_is_in_the_fleet_when_a_map_names_it() -> None:
    assert fleet_for(FLEET, None) is FLEET
    assert fleet_for(FLEET, DeviceMap.of({"": 0})) is FLEET
    with_cpu = fleet_for(FLEET, DeviceMap.of({"": 0, "head": "cpu"}))
    assert with_cpu.names == ("vgpu:0", "vgpu:1", "cpu")
    given = Fleet(devices=(*FLEET.devices, Device(name="cpu", budget_bytes=7)))
    assert fleet_for(given, DeviceMap.of("cpu")) is given


def test_memory_that_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.planner.limits.available_bytes", lambda: None)
    with pytest.raises(FleetError, match="unknown"):
        fleet_for(FLEET, DeviceMap.of("cpu"))


def test_this_machine_has_what_is_free_and_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = replay(monkeypatch, "eight-3090").data["nvmlSystemGetDriverVersion"]
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    monkeypatch.setattr(host, "available_bytes", lambda: 50 * GIB)
    monkeypatch.setattr(host, "total_bytes", lambda: 64 * GIB)
    found = host_of_this_machine()
    assert (found.name, found.budget_bytes, found.memory_bytes) == ("cpu", 50 * GIB, 64 * GIB)
    assert (found.memory_bytes_per_second, found.measured) == (None, ())
    figures = HostFigures(memory_bytes=63 * GIB, memory_bytes_per_second=6e10, threads=8)
    torch = calibration.torch_version()
    calibration.keep_calibration(Calibration(driver=driver, torch=torch, host=figures))
    found = host_of_this_machine()
    assert (found.memory_bytes_per_second, found.measured) == (6e10, ("memory_bytes_per_second",))
    assert Fleet.parse("24GiB").with_host(found).host == found
    # Another machine that has the same cache.
    monkeypatch.setattr(host, "total_bytes", lambda: 128 * GIB)
    assert host_of_this_machine().memory_bytes_per_second is None
    replay(monkeypatch, "no-driver")
    monkeypatch.setattr(host, "total_bytes", lambda: 64 * GIB)
    assert host_of_this_machine().memory_bytes_per_second is None
    monkeypatch.setattr(host, "available_bytes", lambda: None)
    with pytest.raises(FleetError, match="memory is unknown"):
        host_of_this_machine()


def test_a_declared_host_holds_offloaded_weights_alone() -> None:
    declared = host_device(7 * GIB, 5e10)
    assert fleet_for(FLEET, None, host=declared) is FLEET
    assert fleet_for(FLEET, None, offload=True, host=declared).host == declared
    mapped = fleet_for(FLEET, DeviceMap.of({"": 0, "head": "cpu"}), host=declared)
    assert mapped.device("cpu").product == ""
    assert mapped.device("cpu").budget_bytes != declared.budget_bytes
