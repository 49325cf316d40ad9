"""What NVML tells of GPUs' health; what it doesn't tell is nothing to worry about."""

from __future__ import annotations

import pytest
from recordings import NAMES, replay

from duoka.errors import FleetError
from duoka.hardware.gpu_health import GpuHealth, read_health


def test_two_4090(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "two-4090")
    health = read_health()
    assert health.cuda_version == (12, 8)
    assert health.gpus[0] == GpuHealth(
        power_limit_watts=450.0,
        default_power_limit_watts=450.0,
        is_persistent=False,
        peers={1: "the chipset doesn't support it"},
    )
    assert recording.open_sessions == 0


def test_what_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "unified-gb10")
    assert read_health().gpus == {0: GpuHealth()}
    del recording.data["nvmlSystemGetCudaDriverVersion"]
    assert read_health().cuda_version is None


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "hgx-h100")
    for link, state in enumerate((0, 2, 3)):
        recording.data["devices"][1]["nvlinks"][link]["nvmlDeviceGetNvLinkState"] = state
    gpus = read_health().gpus
    assert (gpus[0].links_up, gpus[0].links_down) == (18, 0)
    assert (gpus[1].links_up, gpus[1].links_down) == (16, 1)


def test_lost_gpus_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "fell-off")
    recording.data["devices"][3]["nvmlDeviceGetPersistenceMode"] = {"error": 15}
    assert list(read_health().gpus) == [0, 2]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-driver")])
def test_without_a_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, name)
    with pytest.raises(FleetError):
        read_health()
