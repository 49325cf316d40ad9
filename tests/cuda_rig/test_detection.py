"""What NVML and the driver tell of GPUs becomes the fleet that torch then finds."""

from __future__ import annotations

import pytest
import torch

from duoka import Fleet
from duoka.hardware.device import RESERVE_BYTES, STEP_BYTES, Device
from duoka.hardware.gpu_generation import GpuGeneration

pytestmark = pytest.mark.cuda_rig(
    gpus="80GiB,24GiB,12000MiB",
    names="NVIDIA H100 PCIe|NVIDIA GeForce RTX 3090|Tesla T4",
    capability="9.0,8.6,7.5",
)
MIB, GIB = 2**20, 2**30
BEFORE_HOPPER_BYTES = 8320 * 1024


def as_torch_sees(device: Device) -> tuple[str, int | None, str]:
    properties = torch.cuda.get_device_properties(device.name)
    return properties.name, properties.total_memory, f"GPU-{properties.uuid}"


def test_each_gpu_is_found_as_it_is() -> None:
    fleet = Fleet.detect()
    assert not torch.cuda.is_initialized()
    assert fleet.names == ("cuda:0", "cuda:1", "cuda:2")
    assert [device.memory_bytes for device in fleet.devices] == [80 * GIB, 24 * GIB, 12000 * MIB]
    assert [device.has_bfloat16 for device in fleet.devices] == [True, True, False]
    workspaces = [device.workspace_bytes for device in fleet.devices]
    assert workspaces == [32 * MIB, BEFORE_HOPPER_BYTES, BEFORE_HOPPER_BYTES]
    assert fleet.gpu_generation == GpuGeneration(workspace_bytes=32 * MIB, before_ampere=True)
    assert fleet.only(["cuda:1"]).gpu_generation == GpuGeneration(
        workspace_bytes=BEFORE_HOPPER_BYTES
    )
    for device in fleet.devices:
        assert device.memory_bytes_per_second, "the catalogue knows it"
        assert (device.product, device.memory_bytes, device.uuid) == as_torch_sees(device)


@pytest.mark.cuda_rig(context="400MiB")
def test_a_budget_is_what_is_free_less_the_reserve() -> None:
    held = torch.empty(3 * GIB + MIB, dtype=torch.uint8, device="cuda:1")
    first, second, third = Fleet.detect().devices
    free = 24 * GIB - 400 * MIB - torch.cuda.memory_reserved(held.device)
    assert second.budget_bytes == (free - RESERVE_BYTES) // STEP_BYTES * STEP_BYTES
    assert second.budget_bytes + second.reserve_bytes == free
    assert first.budget_bytes == 80 * GIB - RESERVE_BYTES
    assert third.budget_bytes == (12000 * MIB - RESERVE_BYTES) // STEP_BYTES * STEP_BYTES


@pytest.fixture
def _reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")


@pytest.mark.usefixtures("_reordered")
@pytest.mark.parametrize("started", [False, True])
def test_hidden_and_reordered(started: bool) -> None:
    if started:
        torch.cuda.init()
    fleet = Fleet.detect()
    assert torch.cuda.is_initialized() == started
    assert [(device.name, device.product) for device in fleet.devices] == [
        ("cuda:1", "NVIDIA H100 PCIe"),
        ("cuda:0", "Tesla T4"),
    ]
    assert [device.product for device in Fleet.detect("2,0").devices] == [
        "Tesla T4",
        "NVIDIA H100 PCIe",
    ]
    for device in fleet.devices:
        assert (device.product, device.memory_bytes, device.uuid) == as_torch_sees(device)
