"""Recorded machines: each planted defect is found, and a sound machine has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctoring import eight_h100, findings, machine

from duoka.hardware import cuda_driver
from duoka.tools.doctor.diagnose import diagnose

MIB = 2**20
GPUS = ("GPUs", "computing")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_eight_3090_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, "eight-3090")
    found = findings(tmp_path, *GPUS)
    drawn, busy = found["memory"]
    assert drawn.severity == "note"
    assert busy.severity == "warning"
    assert busy.text == "GPU 3: python3 (pid 4242) has 4.87 GiB"


def test_eight_h100_are_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    eight_h100(monkeypatch, machine(monkeypatch, "hgx-h100"))
    assert findings(tmp_path, *GPUS, "software") == {}


def test_busy_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recording = machine(monkeypatch, "busy")
    unseen = recording.data["devices"][2]["nvmlDeviceGetMemoryInfo_v2"]
    unseen["free"] -= 2000 * MIB
    found = findings(tmp_path, *GPUS)
    (full,) = found["CUDA"]
    assert (full.severity, full.text.partition(":")[0]) == ("warning", "GPU 0")
    assert [finding.text for finding in found["memory"]] == [
        "GPU 0: python3.12 (pid 977) has 43.93 GiB",
        "GPU 1: evil[31mname (pid 978) has 19.53 GiB, a process (pid 979) has memory",
        "GPU 2: unknown processes use 2.52 GiB",
    ]


def test_mig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, "mig", visible=[0])
    texts = [finding.text for finding in findings(tmp_path, *GPUS)["CUDA"]]
    assert texts[0] == "GPU 1: it is in MIG mode, and only its instances can compute"
    assert len(texts) == 3
    assert all("an instance of GPU 1: it is hidden" in text for text in texts[1:])


def test_cards_that_fell_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, "fell-off", visible=[0, 2])
    found = findings(tmp_path, *GPUS)
    assert [finding.text for finding in found["driver"]] == [
        "GPU 1 doesn't answer: GPU is lost",
        "GPU 3 doesn't answer: GPU is lost",
    ]
    assert all(finding.severity == "error" for finding in found["driver"])
    (numbers,) = found["CUDA"]
    assert (
        numbers.text
        == "CUDA numbers the GPUs differently from nvidia-smi: cuda:1 is nvidia-smi's GPU 2"
    )


def test_without_a_driver_it_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, "no-driver")
    found = findings(tmp_path, *GPUS, "software")
    assert list(found) == ["driver"]
    assert [(one.severity, one.text) for one in found["driver"]] == [
        ("note", "no NVIDIA GPU found")
    ]
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")  # its sound
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")
    (missing,) = findings(tmp_path, *GPUS)["driver"]
    assert missing.severity == "error"
    assert missing.text == "1 NVIDIA GPU found, without a driver"


def test_wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The limits of GPUs in WSL 2 are notes, and change no exit code."""
    write(tmp_path, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    recording = machine(monkeypatch, "two-4090")
    memory, fallback, peers = findings(tmp_path, "GPUs")["WSL"]
    assert {memory.severity, fallback.severity, peers.severity} == {"note"}
    assert "--reserve" in memory.advice
    assert "CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback" in fallback.advice
    assert "no peer-to-peer access" in peers.text
    recording.data["devices"][0]["nvmlDeviceGetMemoryInfo_v2"]["free"] -= 4096 * MIB
    assert "check processes in Windows" in findings(tmp_path, "GPUs")["memory"][0].advice
    del recording.data["devices"][1]
    assert len(findings(tmp_path, "GPUs")["WSL"]) == 2
    machine(monkeypatch, "no-driver")
    found = findings(tmp_path, "GPUs")
    assert list(found) == ["driver"]
    assert "install NVIDIA's driver in Windows, none in WSL" in found["driver"][0].advice
    write(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    assert "WSL" not in findings(tmp_path, "GPUs")["driver"][0].advice


def test_a_driver_that_is_older_than_its_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, "old-driver")
    (mismatch,) = findings(tmp_path, *GPUS)["driver"]
    assert mismatch.severity == "error"
    assert "has another version than its library" in mismatch.text
    assert "restart the machine" in mismatch.advice


def test_numbers_that_are_not_nvidia_smis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recording = machine(monkeypatch, "eight-3090", visible=[3, 1])
    monkeypatch.setenv(cuda_driver.VARIABLE, "3,1")
    *hidden, numbers = findings(tmp_path, *GPUS)["CUDA"]
    assert len(hidden) == 6
    assert "cuda:0 is nvidia-smi's GPU 3" in numbers.text
    assert numbers.meaning == "CUDA_VISIBLE_DEVICES=3,1"
    stranger = "00000000-0000-0000-0000-000000000000"
    monkeypatch.setattr(cuda_driver, "visible_uuids", lambda: (recording.uuids[0][4:], stranger))
    unknown = findings(tmp_path, *GPUS)["CUDA"][-1]
    assert (unknown.severity, unknown.text) == (
        "warning",
        "CUDA sees cuda:1, unknown to NVML",
    )


@pytest.mark.parametrize(
    ("torch", "severity", "text"),
    [
        ({"cuda": None, "version": "2.13.0+cpu"}, "error", "a CPU-only build"),
        ({"cuda": "13.0"}, "error", "built for CUDA 13.0, and the driver supports 12.8"),
        ({"cuda": "12.9"}, "note", "built for CUDA 12.9, and the driver supports 12.8"),
        ({"architectures": ["sm_90", "compute_120"]}, "error", "has compute capability 8.9"),
        ({"architectures": ["sm_80"]}, None, ""),
        ({"architectures": ["compute_70"]}, None, ""),
        ({"architectures": ["sm_86", "sm_90a"]}, None, ""),
        ({"uuids": []}, "warning", "torch sees 0 GPUs, and CUDA's driver 2"),
        ({"error": "driver too old"}, "error", "torch can't initialize CUDA: driver too old"),
    ],
)
def test_torch(
    torch: dict[str, Any],
    severity: str | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    machine(monkeypatch, "two-4090", torch=torch)
    found = findings(tmp_path, "software").get("torch", [])
    assert {finding.severity for finding in found} == ({severity} if severity else set())
    assert all(text in finding.text for finding in found)


def test_devices_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes: dict[tuple[str, ...], dict[str, Any]] = {
        ("copy", "cuda:0", "cuda:1"): {"fault": "zeros arrive"},
        ("copy", "cuda:1", "cuda:0"): {"skipped": "too little memory is free"},
        ("matrix", "cuda:1"): {"fault": "it is off by 12%"},
    }
    machine(monkeypatch, "two-4090", outcomes=outcomes)
    found = findings(tmp_path, "computing")
    broken, untested = found["copies"]
    assert (broken.severity, broken.text) == ("error", "cuda:0 → cuda:1: zeros arrive")
    assert "NCCL_P2P_DISABLE=1" in broken.advice
    assert "IOMMU" in broken.advice
    assert (untested.severity, untested.text) == (
        "skipped",
        "cuda:1 → cuda:0: too little memory is free",
    )
    (wrong,) = found["matrices"]
    assert wrong.text.startswith("cuda:1: a bfloat16 matrix product is wrong: it is off by 12%")


def test_only_named_gpus_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that isn't meant may be busy, slow or lost."""
    machine(monkeypatch, "eight-3090")

    def told(gpus: str | None) -> str:
        checks = diagnose(gpus, root=tmp_path).checks
        return " ".join(finding.text for check in checks for finding in check.findings)

    assert "GPU 3: python3 (pid 4242)" in told(None)
    assert "GPU 3: python3 (pid 4242)" not in told("1,2")
    assert "GPU 3: python3 (pid 4242)" in told("2,3")
