"""``duoka top``: alone, on recorded machines, at a terminal, and beside a chat."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from recordings import replay
from watching import live_device

from duoka.report import live

from .conftest import GPUS, PROGRAM, SIZES, Program
from .terminals import Terminal


def test_nothing_there_is_no_error(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "no-driver")
    for arguments in ([], ["--once"]):
        done = program("top", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no NVIDIA GPU: NVIDIA's management library" in done.stdout
        assert "this user runs no duoka process" in done.stdout


def test_a_machine_as_json(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = replay(monkeypatch, "eight-3090")
    monkeypatch.setattr(live, "read_memory", lambda: [live_device(uuid=recording.uuids[2])])
    done = program("top", "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert [gpu["name"] for gpu in data["gpus"]] == list("01234567")
    assert data["gpus"][2]["processes"][0]["measured"]["weight_bytes"] == 2**28
    assert data["gpus"][3]["activity"]["utilization"] == 0.83
    assert data["host_total_bytes"] >= data["host_available_bytes"] > 2**20
    assert recording.open_sessions == 0


@pytest.mark.process
def test_at_a_terminal_ctrl_c_leaves(environment: dict[str, str]) -> None:
    started = Terminal(["top"], environment)
    started.wait_for(r"Ctrl-C quits")
    started.wait_for(r"Ctrl-C quits")
    started.send("\x03")
    assert started.process.wait(timeout=60) == 0
    started.close()


@pytest.mark.slow
@pytest.mark.process
def test_beside_a_chat(tiny: Path, program: Program, environment: dict[str, str]) -> None:
    """What the chat says of itself is there while it runs, and gone afterwards."""
    command = [*PROGRAM, "chat", str(tiny), *GPUS, *SIZES, "--use-all"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        try:
            chat.stdin.write("What is NVLink?\n")
            chat.stdin.flush()
            assert chat.stdout.read(1)  # of the answer
            for gpu in _gpus_of(chat.pid, environment):
                (process,) = gpu["processes"]
                measured, forecast = process["measured"], process["forecast"]
                assert process["model"] == "ChatGLMForCausalLM"
                assert measured["weight_bytes"] == forecast["weight_bytes"] > 0
                assert measured["kv_cache_bytes"] > 0
                assert measured["reserved_bytes"] <= forecast["reserved_bytes"]
                assert gpu["total_bytes"] == 64 * 2**20
                assert gpu["spare_bytes"] == gpu["total_bytes"] - forecast["reserved_bytes"]
            chat.stdin.close()
            assert chat.wait(timeout=120) == 0
        finally:
            chat.kill()
    assert list(Path("/tmp").glob(f"duoka-*/{chat.pid}-*")) == []


def _gpus_of(pid: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Both GPUs of a process, once it has said that its cache is there."""
    end = time.monotonic() + 60
    while True:
        command = [*PROGRAM, "top", "--once", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        gpus = [
            gpu
            for gpu in json.loads(done.stdout)["gpus"]
            for process in gpu["processes"]
            if process["pid"] == pid and process["measured"]["kv_cache_bytes"]
        ]
        if [gpu["name"] for gpu in gpus] == ["vgpu:0", "vgpu:1"]:
            return gpus
        assert time.monotonic() < end, done.stdout
