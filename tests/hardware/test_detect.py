"""`Fleet.detect` on recorded machines: which GPUs, under which names, with what memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from recordings import DIRECTORY, replay

from duoka.base.serialization import from_dict
from duoka.errors import FleetError
from duoka.hardware import cuda_driver, detect, nvml
from duoka.hardware.device import RESERVE_BYTES, STEP_BYTES
from duoka.hardware.fleet import Fleet

MIB = 2**20


def stepped(free_mib: int) -> int:
    """The budget of a GPU that has so much free."""
    return (free_mib * MIB - RESERVE_BYTES) // STEP_BYTES * STEP_BYTES


@pytest.fixture(autouse=True)
def unrestricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda_driver.VARIABLE, raising=False)


def refused(which: str | None, message: str) -> str:
    """The hint of the error that naming these GPUs is."""
    with pytest.raises(FleetError, match=message) as caught:
        Fleet.detect(which)
    return str(caught.value.hint)


def test_indices_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    fleet = Fleet.detect("2,3")
    assert fleet.names == ("cuda:2", "cuda:3")
    third, fourth = fleet.devices
    assert (third.uuid, third.pci_address) == (recording.uuids[2], "00000000:3D:00.0")
    assert third.product == "NVIDIA GeForce RTX 3090"
    assert third.budget_bytes == stepped(24576 - 316 - 1)
    assert third.budget_bytes + third.reserve_bytes == (24576 - 316 - 1) * MIB
    assert RESERVE_BYTES <= third.reserve_bytes < RESERVE_BYTES + STEP_BYTES
    assert third.memory_bytes == 24576 * MIB
    # Another process has 5000 MiB of the fourth: the budget is what is free, never the total.
    assert fourth.budget_bytes == stepped(24576 - 316 - 5000)
    assert (third.memory_bytes_per_second, third.flops_per_second) == (936e9, 71.2e12)


def test_the_order_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    assert Fleet.detect("3,2").names == ("cuda:3", "cuda:2")
    assert Fleet.parse(" 3 , 2 ") == Fleet.parse("3+2") == Fleet.detect("3,2")


def test_without_a_choice_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    fleet = Fleet.detect()
    assert fleet.names == tuple(f"cuda:{index}" for index in range(8))
    assert fleet == Fleet.parse("all") == Fleet.parse(" ALL ")


def test_cuda_visible_devices_gives_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090", visible=[3, 5, 2])
    monkeypatch.setenv(cuda_driver.VARIABLE, "3,5,2")
    fleet = Fleet.detect("2,3")
    assert fleet.names == ("cuda:2", "cuda:0")
    assert [device.uuid for device in fleet.devices] == recording.uuids[2:4]
    assert Fleet.detect().names == ("cuda:2", "cuda:0", "cuda:1")  # nvidia-smi's order


def test_a_hidden_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090", visible=[0, 1])
    monkeypatch.setenv(cuda_driver.VARIABLE, "0,1")
    hint = refused("2,3", "GPU 2 can't be used: it is hidden .* by CUDA_VISIBLE_DEVICES='0,1'")
    advice, _, *lines = hint.splitlines()
    assert advice.startswith("unset CUDA_VISIBLE_DEVICES, or add the GPU to it: GPU-")
    assert len(lines) == 8
    assert [line.count("  hidden") for line in lines] == [0, 0, 1, 1, 1, 1, 1, 1]
    monkeypatch.delenv(cuda_driver.VARIABLE)
    refused("2", r"hidden from this process by CUDA\n")


def test_all_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "fastest-first", visible=[])
    monkeypatch.setenv(cuda_driver.VARIABLE, "")
    hint = refused(None, "no GPU can be used")
    assert hint.count("  hidden") == 2
    refused("0", "hidden from this process by CUDA_VISIBLE_DEVICES=''")


def test_cudas_fastest_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "fastest-first", visible=[1, 0])
    fleet = Fleet.detect("0,1")
    assert fleet.names == ("cuda:1", "cuda:0")
    assert [device.product for device in fleet.devices] == [
        "NVIDIA GeForce GTX 1080 Ti",
        "NVIDIA GeForce RTX 4090",
    ]
    assert fleet.device("cuda:0").flops_per_second == 165.2e12
    assert fleet.device("cuda:1").flops_per_second == 11.3e12  # 16 bit at the rate of fp32


def test_uuids_and_their_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    whole = recording.uuids[5]
    for text in (whole, whole.upper(), whole.lower(), whole[:12]):
        assert Fleet.detect(text).names == Fleet.parse(text).names == ("cuda:5",)
    assert Fleet.detect(f"{whole},1").names == ("cuda:5", "cuda:1")


def test_an_ambiguous_beginning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "fastest-first")
    recording.data["devices"][0]["nvmlDeviceGetUUID"] = "GPU-ab0"
    recording.data["devices"][1]["nvmlDeviceGetUUID"] = "GPU-ab01"
    monkeypatch.setattr(cuda_driver, "visible_uuids", lambda: ("ab0", "ab01"))
    refused("GPU-ab", "2 GPUs have UUIDs that begin with 'GPU-ab'")
    assert Fleet.detect("GPU-AB0").names == ("cuda:0",)


def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    hint = refused("2,8", "there is no GPU 8")
    assert "a budget needs a unit, as in 24GiB" in hint
    for index, uuid in enumerate(recording.uuids):
        assert f"  {index}  NVIDIA GeForce RTX 3090  {uuid}" in hint
    assert "18.81 GiB free of 24.00 GiB  used by python3 (pid 4242, 4.87 GiB)" in hint
    refused("24", "there is no GPU 24")
    refused("999999999", "there is no GPU 999999999")
    refused("GPU-ffff", "no GPU has the UUID 'GPU-ffff'")
    refused("x", "'x' is neither the index nor the UUID")
    refused("1,,2", "'' is neither")
    refused("1" * 4000, "is neither")


def test_doubles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    for text in ("2,3,2", f"2,{recording.uuids[2]}", "02,2"):
        refused(text, "GPU 2 is listed twice")
    refused(",".join(["1"] * 1000), "GPU 1 is listed twice")


def test_a_card_that_fell_off_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "fell-off", visible=[0, 2])
    assert Fleet.detect().names == ("cuda:0", "cuda:1")
    assert Fleet.detect("2").names == ("cuda:1",)
    hint = refused("0,1", "GPU 1 can't be used: it doesn't respond: GPU is lost")
    assert "dmesg" in hint
    indices = [line.split()[0] for line in hint.splitlines()[2:]]
    assert indices == ["0", "1", "2", "3"]
    assert [line.split()[-1] for line in hint.splitlines()[2:]].count("lost") == 2


def test_a_gpu_in_mig_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "mig", visible=[0])
    instances = [each.uuid for each in nvml.read().gpus[1].instances]
    hint = refused("1", "GPU 1 can't be used: it is in MIG mode")
    assert all(uuid in hint for uuid in instances)
    assert Fleet.detect().names == ("cuda:0",)
    assert hint.count("  hidden") == 2
    assert hint.count("  in MIG mode") == 1
    hint = refused(instances[0], "an instance of GPU 1 can't be used: it is hidden")
    assert f"CUDA_VISIBLE_DEVICES={instances[0]}" in hint
    # CUDA shows an instance where CUDA_VISIBLE_DEVICES names it.
    recording = replay(monkeypatch, "mig", visible=[instances[1]])
    (device,) = Fleet.detect(instances[1]).devices
    assert (device.name, device.uuid) == ("cuda:0", instances[1])
    assert device.budget_bytes == stepped(19949)
    assert device.flops_per_second is None
    assert Fleet.detect(f"{instances[1][:10]}") == Fleet.detect()
    assert len(recording.uuids) == 2


def test_full_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    assert Fleet.detect().names == ("cuda:1", "cuda:2")
    hint = refused("0", "GPU 0 can't be used: 488.00 MiB are free, and CUDA reserves 768.00 MiB")
    assert "end the programs that use it" in hint
    free = recording.data["devices"][2]["nvmlDeviceGetMemoryInfo_v2"]
    free["free"] = RESERVE_BYTES + STEP_BYTES - 1  # less than one step is nothing
    refused("2", r"GPU 2 can't be used: 832\.00 MiB are free")
    free["free"] += 1
    assert Fleet.detect("2").budget_bytes == STEP_BYTES
    assert "  full  used by python3.12 (pid 977, 43.93 GiB)" in hint
    assert "used by a process (pid 979)" in hint
    assert "\x1b" not in hint


def test_memory_that_isnt_told(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "unified-gb10")
    assert "  memory unknown" in refused("0", "the driver doesn't report its memory")
    refused(None, "no GPU can be used")


def test_a_prohibited_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    free = recording.data["devices"][2]
    free["nvmlDeviceGetComputeMode"] = pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert Fleet.detect().names == ("cuda:1",)
    hint = refused("2", "GPU 2 can't be used: its compute mode is Prohibited")
    assert "nvidia-smi -i 2 -c DEFAULT" in hint
    assert "  closed" in hint


def test_a_lost_gpu_that_keeps_cuda_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[str, ...]:
        raise FleetError("CUDA's driver fails", hint="restart")

    replay(monkeypatch, "fell-off")
    monkeypatch.setattr(cuda_driver, "visible_uuids", fail)
    message = r"fails; no response from GPU 1 \(GPU is lost\), GPU 3 \(GPU is lost\)"
    assert "list the others by UUID in CUDA_VISIBLE_DEVICES" in refused(None, message)
    replay(monkeypatch, "busy")
    monkeypatch.setattr(cuda_driver, "visible_uuids", fail)
    assert refused(None, r"^CUDA's driver fails\n") == "restart"


def test_bfloat16_by_compute_capability_or_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "fastest-first")
    assert [device.has_bfloat16 for device in Fleet.detect().devices] == [False, True]
    for device in recording.data["devices"]:
        del device["nvmlDeviceGetCudaComputeCapability"]
    assert [device.has_bfloat16 for device in Fleet.detect().devices] == [False, True]
    recording.data["devices"][0]["nvmlDeviceGetName"] = "NVIDIA Something New"
    assert Fleet.detect("0").devices[0].has_bfloat16 is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "no-driver")
    for which in (None, "2,3"):
        hint = refused(which, "libnvidia-ml.so.1.* was not found")
        assert "virtual:2x24GiB" in hint


def test_bridges_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    fleet = Fleet.detect()
    speeds = {
        (link.source[5:], link.target[5:]): link.bytes_per_second / 1e9 for link in fleet.links
    }
    assert len(speeds) == 56
    assert speeds["0", "1"] == speeds["1", "0"] == pytest.approx(0.8 * 56.25, rel=1e-3)
    assert speeds["0", "2"] == pytest.approx(0.6 * 31.5, rel=1e-3)
    assert speeds["5", "6"] == speeds["6", "7"] == pytest.approx(0.6 * 15.75, rel=1e-3)


def test_wsl_has_no_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "eight-3090")
    monkeypatch.setattr(detect, "is_wsl", lambda: True)
    speeds = {link.bytes_per_second for link in Fleet.detect().links}
    assert max(speeds) == pytest.approx(0.6 * 31.5e9, rel=1e-3)
    assert {way.kind for _, _, way in detect.survey()[1]} == {"PCIe"}


def test_a_mesh_without_its_fourth_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "mesh-v100")
    for device in recording.data["devices"]:
        device["nvlink_speed_mbps"] = 25000  # as newer drivers tell
    recording.data["devices"][0]["nvlinks"] = []  # the other end tells of the link, too
    fleet = Fleet.detect()
    speeds = {link.source + link.target: link.bytes_per_second / 1e9 for link in fleet.links}
    assert speeds["cuda:0cuda:1"] == pytest.approx(0.8 * 25)
    assert speeds["cuda:1cuda:2"] == pytest.approx(0.8 * 50)
    assert speeds["cuda:0cuda:3"] == pytest.approx(0.6 * 15.75, rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nvidias_own_bindings(tmp_path: Path) -> None:
    """pynvml and ctypes as they are, on a driver of our own: names, layouts and results fit."""
    library = tmp_path / "libnvidia-ml.so.1"
    source = DIRECTORY / "driver.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    shutil.copy(library, tmp_path / "libcuda.so.1")
    code = """if True:
        import duoka, json
        from duoka.base.serialization import to_dict
        from duoka.hardware import nvml
        print(json.dumps([to_dict(duoka.Fleet.parse("1,0")), to_dict(nvml.read())]))
        duoka.Fleet.parse("2")
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert "FleetError: GPU 2 can't be used: it doesn't respond: GPU is lost" in done.stderr
    told, machine = json.loads(done.stdout)
    fleet = from_dict(Fleet, told)
    assert fleet.names == ("cuda:0", "cuda:1")
    assert fleet.devices[0].product == "NVIDIA GeForce RTX 3090"
    assert fleet.devices[0].pci_address == "00000000:41:00.0"
    assert fleet.budget_bytes == 2 * stepped(24 * 1024 - 300 - 1024)
    assert {link.bytes_per_second for link in fleet.links} == {0.8 * 4 * 14.062e9}
    gpu = machine["gpus"][1]
    assert machine["driver_version"] == "570.1"
    process = {"pid": 4242, "name": "", "used_bytes": 900 * MIB, "computes": True}
    assert gpu["processes"] == [process]
    assert machine["gpus"][0]["processes"][0]["used_bytes"] is None
    assert gpu["compute_capability"] == [8, 6]
    assert machine["lost"] == [{"index": 2, "reason": "GPU is lost"}]
