"""What processes say of their memory: read from where nobody else can write, and while they run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from staged import GIB, forecast

from duoka.errors import MachineError
from duoka.report import live
from duoka.report.live import (
    LiveDevice,
    live_directory,
    publish_memory,
    read_memory,
    withdraw_memory,
)

DEVICE = LiveDevice(
    pid=os.getpid(),
    model="LlamaForCausalLM",
    uuid="",
    measured=forecast("vgpu:0", 1, GIB),
    forecast=forecast("vgpu:0", 2, GIB),
    busy_share=0.5,
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_ROOT", tmp_path)


def file_of(name: str = "a", pid: int | None = None) -> Path:
    return live_directory() / f"{os.getpid() if pid is None else pid}-{name}.json"


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_is_published_is_read_until_it_is_withdrawn() -> None:
    assert read_memory() == []
    other = replace(DEVICE, measured=replace(DEVICE.measured, device="vgpu:1"))
    publish_memory([other], "b")
    publish_memory([DEVICE], "a")
    assert read_memory() == [DEVICE, other]
    newer = replace(DEVICE, busy_share=None)
    publish_memory([newer], "a")
    assert read_memory() == [newer, other]
    withdraw_memory("a")
    assert read_memory() == [other]
    withdraw_memory("a")  # it needn't be there
    assert [path.name for path in live_directory().iterdir()] == [file_of("b").name]


def test_nobody_else_may_look() -> None:
    before = os.umask(0)
    try:
        publish_memory([DEVICE], "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(live_directory().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710, 0o702])
def test_a_directory_that_is_open_to_others_is_not_used(mode: int) -> None:
    publish_memory([DEVICE], "a")
    live_directory().chmod(mode)
    for use in (read_memory, lambda: publish_memory([DEVICE], "b")):
        with pytest.raises(MachineError, match="is open to others") as refused:
            use()
        assert str(refused.value.hint).startswith("delete it")
    withdraw_memory("a")
    assert sorted(live_directory().iterdir()) == [file_of()]


def test_a_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_memory([DEVICE], "a")
    place = live_directory()
    monkeypatch.setattr(live, "live_directory", lambda: place)
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(MachineError, match="belongs to another user"):
        read_memory()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_the_place_of_the_directory_is_not_followed(
    tmp_path: Path, is_there: bool
) -> None:
    target = tmp_path / "elsewhere"
    if is_there:
        target.mkdir(mode=0o700)
    live_directory().symlink_to(target)
    for use in (read_memory, lambda: publish_memory([DEVICE], "a")):
        with pytest.raises(MachineError, match="is no directory"):
            use()
    assert not target.exists() or list(target.iterdir()) == []


@pytest.mark.parametrize("suffix", [".json", ".partial"])
def test_files_of_processes_that_are_gone_are_removed(suffix: str) -> None:
    publish_memory([DEVICE], "a")
    gone = file_of("b", dead_pid()).with_suffix(suffix)
    gone.write_bytes(file_of().read_bytes())
    assert read_memory() == [DEVICE]
    assert not gone.exists()


def test_files_that_nobody_replaces_are_removed() -> None:
    publish_memory([DEVICE], "a")
    long_ago = file_of().stat().st_mtime - 61
    os.utime(file_of(), (long_ago, long_ago))
    assert read_memory() == []
    assert not file_of().exists()


def test_whatever_else_lies_there_is_passed_over() -> None:
    publish_memory([DEVICE], "a")
    content = json.loads(file_of().read_text())
    for number, text in enumerate(
        ["", "{", "[]", "{}", '{"devices": [{}]}', json.dumps({**content, "more": 1}), "x" * 2**21]
    ):
        file_of(f"bad{number}").write_text(text)
    file_of("bytes").write_bytes(b"\xff")
    file_of("folder").mkdir()
    os.mkfifo(file_of("fifo"))
    (live_directory() / "note.txt").write_text("mine")
    # One process can't speak for another.
    file_of("other", os.getppid()).write_bytes(file_of().read_bytes())
    assert read_memory() == [DEVICE]
    assert (live_directory() / "note.txt").exists()
