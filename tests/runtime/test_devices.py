"""torch's view of a fleet: virtual GPUs made, real ones looked for, memory of any kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duoka import virtual
from duoka.errors import FleetError
from duoka.hardware import cuda_driver
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.runtime.devices import give_back, materialise, peak_bytes, reset_peaks, synchronize

MIB = 2**20


def test_virtual_gpus_have_the_budgets_of_the_fleet() -> None:
    materialise(Fleet.parse("virtual:64MiB,32MiB"))
    capacities = [gpu.allocator.capacity_bytes for gpu in virtual.active_world().gpus]
    assert capacities == [64 * MIB, 32 * MIB]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(33 * MIB, dtype=torch.uint8, device="vgpu:1")


def test_the_same_virtual_gpus_stay() -> None:
    materialise(Fleet.parse("virtual:64MiB"))
    world = virtual.active_world()
    materialise(Fleet.parse("virtual:64MiB"))
    assert virtual.active_world() is world
    materialise(Fleet.parse("virtual:64MiB"), data="meta")
    assert virtual.active_world() is not world


def test_a_gap_in_the_numbers_holds_nothing() -> None:
    materialise(Fleet(devices=(Device(name="vgpu:1", budget_bytes=8 * MIB),)))
    torch.empty(1, device="vgpu:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="vgpu:0")


def test_memory_of_a_virtual_gpu() -> None:
    materialise(Fleet.parse("virtual:64MiB,63MiB"))
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="vgpu:1")
    del tensor
    now = peak_bytes("vgpu:1")
    assert now is not None
    assert now.allocated_bytes == 3 * MIB
    assert now.reserved_bytes == 20 * MIB
    reset_peaks("vgpu:1")
    now = peak_bytes(torch.device("vgpu:1"))
    assert now is not None
    assert (now.allocated_bytes, now.reserved_bytes) == (0, 20 * MIB)
    synchronize("vgpu:1")


def test_the_cpu_has_no_allocator_to_ask() -> None:
    assert peak_bytes("cpu") is None
    assert peak_bytes("meta") is None
    reset_peaks("cpu")
    synchronize("cpu")


def test_without_cuda_the_hint_is_virtual_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FleetError, match="torch has no cuda:0: it sees no CUDA GPU") as e:
        materialise(Fleet.parse("24GiB"))
    assert "virtual:" in str(e.value.hint)


def test_devices_of_other_kinds_are_refused() -> None:
    with pytest.raises(FleetError, match="npu:0"):
        materialise(Fleet(devices=(Device(name="npu:0", budget_bytes=1),)))
    materialise(Fleet(devices=(Device(name="cpu", budget_bytes=1),)))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs as torch reports them."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: SimpleNamespace(name=f"RTX {i}", uuid=f"ab-{i}"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def gpu(number: int, uuid: str) -> Fleet:
    return Fleet(devices=(Device(name=f"cuda:{number}", budget_bytes=1, product="X", uuid=uuid),))


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_that_torch_sees() -> None:
    materialise(Fleet.parse("1GiB,1GiB"))
    materialise(gpu(1, "GPU-AB-1"))
    with pytest.raises(FleetError, match="torch has no cuda:2: it sees 2"):
        materialise(Fleet.parse("1GiB,1GiB,1GiB"))


@pytest.mark.usefixtures("two_gpus")
def test_another_gpu_under_the_same_name_is_refused() -> None:
    message = r"torch has RTX 1 \(GPU-ab-1\), the plan has X \(GPU-ab-0\)"
    with pytest.raises(FleetError, match=message) as caught:
        materialise(gpu(1, "GPU-ab-0"))
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)


@pytest.mark.usefixtures("two_gpus")
def test_instances_are_known_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "visible_uuids", lambda: ("ab-9",))
    materialise(gpu(0, "MIG-ab-9"))
    with pytest.raises(FleetError, match=r"torch has RTX 0 .MIG-ab-9., the plan has X .MIG-ab-8"):
        materialise(gpu(0, "MIG-ab-8"))
    with pytest.raises(FleetError, match="cuda:1 is a different GPU"):
        materialise(gpu(1, "MIG-ab-9"))


@pytest.mark.parametrize("started", [True, False])
def test_cached_memory_is_given_back_where_there_is_any(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    give_back()
    assert calls == ["empty"] * started


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu() -> None:
    fleet = Fleet.detect()
    materialise(fleet)
    name = fleet.names[0]
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device=name)
    synchronize(name)
    now = peak_bytes(name)
    assert now is not None
    assert now.allocated_bytes >= tensor.nbytes
    assert fleet.devices[0].product == torch.cuda.get_device_name(name)
