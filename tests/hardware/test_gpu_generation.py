"""cuBLAS's workspaces and the allocator's setting: what PyTorch 2.13 does on the CUDA rig."""

from __future__ import annotations

import pytest

from duoka.hardware import gpu_generation
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.gpu_generation import GpuGeneration

BEFORE_HOPPER, FROM_HOPPER = 8_519_680, 32 * 2**20
CPU = Device(name="cpu", budget_bytes=2 * 2**30)


@pytest.fixture(autouse=True)
def without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_generation.WORKSPACE_CONFIG)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (":0:0", 0),
        (":16:8", 131_072),
        (":4096:8", FROM_HOPPER),
        (":4096:2:16:8", BEFORE_HOPPER),
        ("", BEFORE_HOPPER),
        ("junk", BEFORE_HOPPER),
        (":4096", BEFORE_HOPPER),
        ("4096:8", BEFORE_HOPPER),
    ],
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, config: str, size: int) -> None:
    monkeypatch.setenv(gpu_generation.WORKSPACE_CONFIG, config)
    assert gpu_generation.workspace_bytes() == size


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [
        ("24GiB,12GiB", [BEFORE_HOPPER] * 2),
        ("RTX3090+H100-SXM", [BEFORE_HOPPER, FROM_HOPPER]),
        ("RTX5090,B200", [FROM_HOPPER] * 2),
        ("MyCard:24GiB", [BEFORE_HOPPER]),
        ("virtual:1GiB", [BEFORE_HOPPER]),
    ],
)
def test_named_gpus(gpus: str, sizes: list[int]) -> None:
    fleet = Fleet.parse(gpus)
    assert [device.workspace_bytes for device in fleet.devices] == sizes
    assert fleet.gpu_generation.workspace_bytes == max(sizes)


def test_the_cpu_has_none() -> None:
    fleet = Fleet(devices=(*Fleet.parse("1GiB").devices, CPU))
    assert fleet.gpu_generation == GpuGeneration(BEFORE_HOPPER)
    assert fleet.only(["cpu"]).gpu_generation == GpuGeneration(0)


TRUE, FALSE = "expandable_segments:True", "expandable_segments:False"
NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("variables", "expandable"),
    [
        ({}, False),
        ({NEW: TRUE}, True),
        ({OLD: TRUE}, True),
        ({NEW: FALSE, OLD: TRUE}, True),
        ({NEW: TRUE, OLD: FALSE}, False),
        ({NEW: TRUE, OLD: "garbage_collection_threshold:0.8"}, False),
        ({NEW: TRUE, OLD: ""}, False),
        ({OLD: " garbage_collection_threshold:0.8, expandable_segments : True"}, True),
        ({OLD: f"{FALSE},{TRUE}"}, True),
        ({OLD: f"{TRUE},{FALSE}"}, False),
    ],
)
def test_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expandable: bool
) -> None:
    for variable in (NEW, OLD):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert gpu_generation.has_expandable_segments() == expandable
    fleet = Fleet(devices=(*Fleet.parse("1GiB").devices, CPU))
    assert fleet.gpu_generation.expandable_segments == expandable
    assert not fleet.only(["cpu"]).gpu_generation.expandable_segments
