"""A moment for people: narrow, without colours, nothing left out."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from recordings import Recording, replay
from rich.console import Console
from watching import GIB, MIB, live_device

from duoka.report import live
from duoka.report.live import LiveDevice
from duoka.tools.top import snapshot
from duoka.tools.top.show import View
from duoka.tools.top.snapshot import GpuSnapshot, Monitor


def shown(moment: GpuSnapshot, *, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(file=file, width=80, color_system=None)
    console.print(View(moment, " · leave" if encoding == "utf-8" else ""))
    file.flush()
    buffer = file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(encoding)


def looked(*devices: LiveDevice) -> GpuSnapshot:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "read_memory", lambda: list(devices))
        patch.setattr(snapshot, "total_bytes", lambda: 64 * GIB)
        patch.setattr(snapshot, "available_bytes", lambda: 52 * GIB)
        return Monitor().look()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return replay(monkeypatch, "eight-3090")


def test_a_virtual_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "no-driver")
    lines = shown(looked(live_device(busy_share=0.826))).splitlines()
    assert lines[0].startswith("duoka top · ")
    assert lines[0].endswith(" · leave")
    assert lines[1].startswith("no NVIDIA GPU")
    assert lines[3:] == [
        "vgpu:0 · 1.00 GiB of 4.00 GiB",
        "█████▓▓▒▒░░░░░░░░░░░" + "·" * 58,
        "in GiB              weights       KV   activ.   overh. reserved",
        "LlamaForCausalLM (pid 4242) · busy 83%",
        "  now                  0.25     0.12     0.06     0.56     1.00",
        "  plan                 0.25     0.12     0.06     1.56     2.00",
        "2.00 GiB stay free at the planned peak",
        "",
        "host memory · 12.00 GiB of 64.00 GiB",
        "",
        "█ weights  ▓ KV cache  ▒ activations  ░ overhead  x others  · free  ",
    ]


def test_what_a_gpu_is_doing_and_who_else_is_there(machine: Recording) -> None:
    text = shown(looked(live_device("cuda:0", uuid=machine.uuids[3])))
    words = " ".join(text.split())
    told = "GPU 3 NVIDIA GeForce RTX 3090 · 5.19 GiB of 24.00 GiB · 83%"
    assert told in words
    assert "python3 (pid 4242)" not in text  # it is the process of duoka's
    assert "Xorg (pid 2101) has 400.00 MiB" in text
    assert "GPU 7 NVIDIA GeForce RTX 3090 · 317.00 MiB of 24.00 GiB" in words
    assert max(map(len, text.splitlines())) <= 80


def test_training_has_its_own_kinds(machine: Recording) -> None:
    device = live_device()
    learning = replace(device.forecast, kv_cache_bytes=0, gradient_bytes=MIB, optimizer_bytes=MIB)
    text = shown(looked(replace(device, measured=learning, forecast=learning)))
    assert "weights   activ.    grad.   optim.   overh. reserved" in text
    assert "▚ gradients" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_to_be_feared(machine: Recording) -> None:
    free = machine.data["devices"][0]["nvmlDeviceGetMemoryInfo_v2"]["free"]
    moment = looked(live_device(uuid=machine.uuids[0], peak_bytes=free + 2 * GIB))
    text = shown(moment)
    assert "allocations will fail: 1.00 GiB are missing at the planned peak" in text


def test_nothing_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "no-driver")
    lines = ["this user runs no duoka process", "", "host memory · 12.00 GiB of 64.00 GiB"]
    assert shown(looked()).splitlines()[2:] == lines
    unknown = replace(looked(), host_available_bytes=None)
    assert shown(unknown).splitlines()[2:] == lines[:1]
    replay(monkeypatch, "fell-off")
    text = shown(looked())
    assert "this user runs no duoka process" in text
    assert "GPU 1 · it doesn't respond: GPU is lost" in text


def test_many_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "busy")
    recording.data["devices"][2]["nvmlDeviceGetComputeRunningProcesses_v3"] = [
        {"pid": pid, "usedGpuMemory": MIB} for pid in range(10, 17)
    ]
    text = shown(looked())
    assert "a process (pid 13) has 1.00 MiB" in text
    assert "pid 14" not in text
    assert "and 3 more processes" in text


def test_where_only_ascii_can_be_shown(machine: Recording) -> None:
    text = shown(looked(live_device()), encoding="ascii")
    assert "####" in text
    assert "█" not in text
