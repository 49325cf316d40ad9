"""NVML's answers as snapshots: what isn't told is None, what is lost hides nothing."""

from __future__ import annotations

import os

import pynvml
import pytest
from recordings import NAMES, Recording, replay

from duoka.errors import FleetError
from duoka.hardware import nvml

MIB = 2**20


def test_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    machine = nvml.read()
    assert machine.driver_version == "570.124.06"
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    assert [gpu.uuid for gpu in machine.gpus] == recording.uuids
    assert machine.lost == ()
    third = machine.gpus[3]
    assert (third.name, third.pci_address) == ("NVIDIA GeForce RTX 3090", "00000000:3E:00.0")
    assert third.total_bytes == 24576 * MIB
    assert third.free_bytes == (24576 - 316 - 5000) * MIB
    assert third.processes == (
        nvml.Process(pid=4242, name="python3", used_bytes=4990 * MIB, computes=True),
    )
    assert third.compute_capability == (8, 6)
    assert not third.is_mig
    assert (machine.gpus[6].max_pcie_generation, machine.gpus[6].pcie_generation) == (4, 1)
    assert (machine.gpus[6].max_pcie_lanes, machine.gpus[6].pcie_lanes) == (16, 8)


def test_nvlinks_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    first, *_, last = nvml.read().gpus
    assert first.peers == (
        nvml.Peer(kind="gpu", pci_address="00000000:1B:00.0", bytes_per_second=4 * 14.062e9),
    )
    assert last.peers == ()


def test_nvlinks_to_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "hgx-h100")
    peers = nvml.read().gpus[0].peers
    assert {peer.kind for peer in peers} == {"switch"}
    speeds = [peer.bytes_per_second for peer in peers]
    assert speeds == pytest.approx([number * 26.562e9 for number in (4, 5, 5, 4)])
    assert sum(peer.bytes_per_second or 0 for peer in peers) == pytest.approx(18 * 26.562e9)


def test_an_old_driver_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "mesh-v100")
    machine = nvml.read()
    first = machine.gpus[0]
    assert (first.total_bytes, first.free_bytes) == (16160 * MIB, 16157 * MIB)
    # Neither the other ends' kinds nor speeds are told.
    assert [(peer.kind, peer.bytes_per_second) for peer in first.peers] == [("gpu", None)] * 3


def test_links_that_sleep_or_lead_somewhere_unknown_count(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    before = nvml.read().gpus[0].peers
    for link in recording.data["devices"][0]["nvlinks"]:
        link["nvmlDeviceGetNvLinkState"] = 2
        link["nvmlDeviceGetNvLinkRemoteDeviceType"] = pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN
    assert nvml.read().gpus[0].peers == before
    for link, state in enumerate((0, 3)):  # inactive, and active with its traffic disabled
        recording.data["devices"][0]["nvlinks"][link]["nvmlDeviceGetNvLinkState"] = state
    assert nvml.read().gpus[0].peers[0].bytes_per_second == 2 * 14.062e9


def test_instances_of_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "mig")
    whole, divided = nvml.read().gpus
    assert not whole.is_mig
    assert whole.instances == ()
    assert divided.is_mig
    assert divided.free_bytes is None  # without permission
    uuids = [part["nvmlDeviceGetUUID"] for part in recording.data["devices"][1]["instances"][:2]]
    assert [instance.uuid for instance in divided.instances] == uuids
    assert divided.instances[1].total_bytes == 19968 * MIB
    assert divided.instances[1].name == "NVIDIA A100-SXM4-80GB MIG 2g.20gb"


def test_lost_gpus_hide_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "fell-off")
    machine = nvml.read()
    assert [gpu.index for gpu in machine.gpus] == [0, 2]
    assert machine.lost == (
        nvml.Lost(index=1, reason="GPU is lost"),
        nvml.Lost(index=3, reason="GPU is lost"),
    )


def test_an_unknown_error_of_one_question_loses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "fastest-first")
    devices = recording.data["devices"]
    devices[0]["nvmlDeviceGetName"] = {"error": pynvml.NVML_ERROR_UNKNOWN}
    devices[1]["nvmlDeviceGetUUID"] = {"error": pynvml.NVML_ERROR_UNKNOWN}
    machine = nvml.read()
    assert [gpu.name for gpu in machine.gpus] == [""]
    assert machine.lost == (nvml.Lost(index=1, reason="Unknown Error"),)


def test_a_process_that_draws_and_computes_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    device = recording.data["devices"][0]
    drawing = device["nvmlDeviceGetComputeRunningProcesses_v3"]
    device["nvmlDeviceGetGraphicsRunningProcesses_v3"] = [
        *drawing,
        {"pid": 5, "usedGpuMemory": None},
    ]
    found = {process.pid: process.computes for process in nvml.read().gpus[0].processes}
    assert found == {**dict.fromkeys((each["pid"] for each in drawing), True), 5: False}


def test_names_of_processes_are_fit_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    full, half, _ = nvml.read().gpus
    assert full.processes[0].name == "python3.12"
    assert [process.name for process in half.processes] == ["evil[31mname", ""]
    assert half.processes[1].used_bytes is None
    recording.data["nvmlSystemGetProcessName"]["977"] = "x" * 5000
    assert len(nvml.read().gpus[0].processes[0].name) == 60

    def undecodable(pid: int) -> str:
        return b"\xff".decode()

    monkeypatch.setattr(recording, "nvmlSystemGetProcessName", undecodable, raising=False)
    assert nvml.read().gpus[0].processes[0].name == ""


def test_this_process_is_not_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    processes = recording.data["devices"][0]["nvmlDeviceGetComputeRunningProcesses_v3"]
    processes[0]["pid"] = os.getpid()
    assert nvml.read().gpus[0].processes == ()


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1. was not found", "--gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "another version", "restart the machine"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions", "nvidia-smi"),
        (pynvml.NVML_ERROR_UNKNOWN, "doesn't respond: Unknown Error", "nvidia-smi"),
    ],
)
def test_without_an_answer_the_error_says_what_to_do(
    code: int, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording({"nvmlInitWithFlags": {"error": code}})
    monkeypatch.setattr(nvml, "pynvml", recording)
    with pytest.raises(FleetError, match=message) as caught:
        nvml.read()
    assert hint in str(caught.value.hint)
    assert recording.open_sessions == 0


# ── what they are doing ──


def look(watch: nvml.NvmlSession) -> list[nvml.Activity]:
    return [part for part in watch.look() if isinstance(part, nvml.Activity)]


def test_what_gpus_are_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    watch = nvml.NvmlSession()
    activities = look(watch)
    assert activities == look(watch)
    assert [activity.index for activity in activities] == list(range(8))
    third = activities[3]
    gpu = nvml.read().gpus[3]
    assert (third.name, third.uuid, third.processes) == (gpu.name, gpu.uuid, gpu.processes)
    assert (third.total_bytes, third.free_bytes) == (gpu.total_bytes, gpu.free_bytes)
    assert third.utilization == 0.83
    assert activities[1].utilization is None  # an older driver


def test_instances_are_told_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "mig")
    whole, *instances = look(nvml.NvmlSession())
    expected = nvml.read().gpus[1].instances
    assert whole.uuid.startswith("GPU-")
    assert [(i.index, i.uuid, i.name, i.free_bytes) for i in instances] == [
        (1, instance.uuid, instance.name, instance.free_bytes) for instance in expected
    ]


def test_a_card_that_is_lost_while_one_looks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    watch = nvml.NvmlSession()
    assert len(look(watch)) == 8
    recording.data["devices"][2]["nvmlDeviceGetUtilizationRates"] = {
        "error": pynvml.NVML_ERROR_GPU_IS_LOST
    }
    assert [activity.index for activity in look(watch)] == [0, 1, 3, 4, 5, 6, 7]
    assert watch.look()[2] == nvml.Lost(index=2, reason="GPU is lost")
    del recording.data["devices"][2]["nvmlDeviceGetUtilizationRates"]
    assert len(look(watch)) == 8


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("-driver")])
def test_a_session_is_open_while_one_watches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, name)
    watch = nvml.NvmlSession()
    assert len(watch.look()) >= len(recording.data["devices"])
    assert recording.open_sessions == 1
    watch.close()
    assert recording.open_sessions == 0
    recording.data["nvmlDeviceGetCount"] = {"error": pynvml.NVML_ERROR_UNKNOWN}
    with pytest.raises(FleetError, match="doesn't respond: Unknown Error"):
        nvml.NvmlSession()
    assert recording.open_sessions == 0


@pytest.mark.gpu
def test_the_real_library() -> None:
    try:
        machine = nvml.read()
    except FleetError as error:
        pytest.skip(f"needs a GPU: {error}")
    assert machine.driver_version
    assert all(gpu.uuid.startswith("GPU-") and gpu.name for gpu in machine.gpus)


def test_the_newest_cuda_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "two-4090")
    assert nvml.read().cuda_version == (12, 8)
    del recording.data["nvmlSystemGetCudaDriverVersion"]
    assert nvml.read().cuda_version is None
