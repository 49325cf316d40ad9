"""Every GPU once, with all that is on it, and for how long its memory will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from recordings import Recording, replay
from watching import GIB, live_device

from duoka.errors import MachineError
from duoka.report import live
from duoka.report.live import LiveDevice
from duoka.tools.top.snapshot import GpuNow, Monitor

Publish = Callable[..., None]


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Let these be what is published from now on."""

    def publish(*devices: LiveDevice) -> None:
        monkeypatch.setattr(live, "read_memory", lambda: list(devices))

    publish()
    return publish


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> Recording:
    return replay(monkeypatch, "eight-3090")


def names(gpus: Sequence[GpuNow]) -> list[str]:
    return [gpu.name for gpu in gpus]


def test_virtual_gpus_are_those_of_each_process(
    monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    replay(monkeypatch, "no-driver")
    publish(live_device(), live_device("vgpu:1"), live_device(pid=7))
    first, second, third = Monitor().look().gpus
    assert names([first, second, third]) == ["vgpu:0", "vgpu:1", "vgpu:0"]
    assert (first.total_bytes, first.free_bytes) == (4 * GIB, 3 * GIB)
    assert first.reserved_bytes == GIB
    assert (first.others_bytes, first.spare_bytes) == (0, 2 * GIB)
    assert first.activity is None


def test_processes_are_on_the_gpu_that_has_their_uuid(machine: Recording, publish: Publish) -> None:
    free = nvml_free(machine, 3)
    publish(
        live_device("cuda:0", uuid=machine.uuids[3].upper()),
        live_device("cuda:1", uuid=machine.uuids[3], pid=7, now_bytes=3 * GIB),
        live_device("cuda:0", uuid="GPU-of-nobody"),
    )
    gpus = Monitor().look().gpus
    assert names(gpus) == [*map(str, range(8)), "cuda:0"]
    busy = gpus[3]
    assert [process.pid for process in busy.processes] == [4242, 7]
    assert busy.name == "3"
    assert busy.product == "NVIDIA GeForce RTX 3090"
    assert busy.reserved_bytes == 4 * GIB
    assert busy.others_bytes == 24 * GIB - free - 4 * GIB
    # The second has more than its plan forecasts; that brings nothing back.
    assert busy.spare_bytes == free - GIB
    assert gpus[0].processes == ()
    assert gpus[0].spare_bytes == gpus[0].free_bytes == nvml_free(machine, 0)


def nvml_free(machine: Recording, index: int) -> int:
    free: int = machine.data["devices"][index]["nvmlDeviceGetMemoryInfo_v2"]["free"]
    return free


def test_lost_cards_and_instances(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    replay(monkeypatch, "fell-off")
    gpus = Monitor().look().gpus
    assert names(gpus) == ["0", "1", "2", "3"]
    assert gpus[1].trouble == "it doesn't respond: GPU is lost"
    assert gpus[1].total_bytes is gpus[1].spare_bytes is None
    recording = replay(monkeypatch, "mig")
    uuid = recording.data["devices"][1]["instances"][0]["nvmlDeviceGetUUID"]
    publish(live_device("cuda:0", uuid=uuid))
    gpus = Monitor().look().gpus
    assert gpus[1].name == uuid
    assert [len(gpu.processes) for gpu in gpus] == [0, 1, 0]


def test_memory_that_the_driver_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    recording = replay(monkeypatch, "unified-gb10")
    publish(live_device("cuda:0", uuid=recording.uuids[0]))
    (gpu,) = Monitor().look().gpus
    assert (gpu.total_bytes, gpu.others_bytes, gpu.spare_bytes) == (None, None, None)
    assert gpu.reserved_bytes == GIB


def test_a_directory_that_cannot_be_trusted_is_noted(
    machine: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> list[LiveDevice]:
        raise MachineError("it is another user's", hint="delete it")

    monkeypatch.setattr(live, "read_memory", refuse)
    now = Monitor().look()
    assert now.notes == ("it is another user's; delete it",)
    assert len(now.gpus) == 8
