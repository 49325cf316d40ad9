from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
from hub_server import COMMIT, HubServer

from .conftest import ATTEMPTS, NAME, SHARD, fetch_it, is_right, open_it, refused, some_files

# ── files ──


def test_connections_that_break_off(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # What huggingface_hub reads at once is 10 MB; what is less than that, it asks for again.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.next("config.json", hub_server.break_off(10))
    hub.next("storage", *[hub_server.break_off(100)] * 2)
    checkpoint = open_it()
    assert checkpoint.weight_bytes == 200 * (300 + 600) * 4
    hub.storage_requests.clear()
    hub.next("storage", *[hub_server.break_off(n) for n in (0, 24, 100_000, 100_000)])
    assert is_right(checkpoint.fetch())
    # Each time what had arrived was gone on with.
    ranges = [request.headers.get("range") for request in hub.storage_requests]
    assert "bytes=100000-" in ranges
    assert "bytes=200000-" in ranges


def test_a_connection_that_always_breaks_off(hub: HubServer) -> None:
    checkpoint = open_it()
    checkpoint.folder.download([n for n in checkpoint.missing if n != SHARD])
    hub.next("storage", *[hub_server.hang_up] * 6 * ATTEMPTS)  # what huggingface_hub bears
    message, hint = refused(checkpoint.fetch)
    assert message.startswith(f"{SHARD} of {NAME}@{COMMIT} can't be fetched from {hub.url}: ")
    assert hint == "run the command again: complete files are kept"
    assert open_it().missing == (SHARD,)
    assert is_right(fetch_it())


def test_a_wrong_hash(hub: HubServer) -> None:
    checkpoint = open_it()
    hub.next("storage", hub_server.spoil)
    assert refused(checkpoint.fetch) == (
        f"tokenizer.model of {NAME}@{COMMIT} in {checkpoint.path.parents[2]} differs from the "
        f"content that {hub.url} announces; it was removed",
        "run the command again; if it happens again, the file on the Hub is damaged",
    )
    assert not list((checkpoint.path.parents[1] / "blobs").glob("*.incomplete"))
    assert "tokenizer.model" in open_it().missing
    assert is_right(fetch_it())


def test_another_length_than_was_told(hub: HubServer) -> None:
    checkpoint = open_it()
    hub.next("storage", hub_server.replace(bytes(1000)))
    assert refused(checkpoint.fetch)[0] == (
        f"{hub.url} sent other content than announced for tokenizer.model of {NAME}@{COMMIT}"
    )
    assert "tokenizer.model" in open_it().missing


@pytest.mark.parametrize("told", ["bytes 5-65535/9", "bytes 5-{size}", "x", ""])
def test_another_part_of_a_header_than_was_asked_for(hub: HubServer, told: str) -> None:
    size = len(some_files()[SHARD])
    answer = hub_server.status(206, bytes(99), Content_Range=told.format(size=f"9/{size}"))
    hub.next("storage", answer, answer)
    assert "content than announced" in refused(open_it)[0]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "{path} is empty"),
        (b"short", "of {name} is not a safetensors file, or is truncated: its header length is"),
        ((2**60).to_bytes(8, "little") + b"{}", "header length is 1152921504606846976 bytes"),
        ((10**6).to_bytes(8, "little") + b"{}", "its header length is 1000000 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "its header doesn't begin with '{{'"),
        ((2).to_bytes(8, "little") + b"{}more", "bytes outside all tensors"),
    ],
)
def test_headers_that_lie(hub: HubServer, file: bytes, message: str) -> None:
    hub.repos[NAME].files = {"config.json": b"{}", "model.safetensors": file}
    path = Path(huggingface_hub.constants.HF_HUB_CACHE, "models--org--model/snapshots", COMMIT)
    expected = message.format(path=path / "model.safetensors", name=f"{NAME}@{COMMIT}")
    assert expected in refused(open_it)[0]


# ── processes ──

_FETCH = f"from duoka.checkpoint.checkpoint import Checkpoint; Checkpoint.open({NAME!r}).fetch()"


def start(hub: HubServer) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": huggingface_hub.constants.HF_HUB_CACHE,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_VERBOSITY": "error",
    }
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH], env=environment, stderr=subprocess.PIPE, text=True
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


@pytest.mark.slow
def test_killed_in_mid_file_and_run_again(hub: HubServer) -> None:
    checkpoint = open_it()
    checkpoint.folder.download([n for n in checkpoint.missing if n != SHARD])
    over = threading.Event()
    hub.storage_requests.clear()
    hub.next("storage", hub_server.stall(300_000, over))
    process = start(hub)
    blobs = checkpoint.path.parents[1] / "blobs"
    until(lambda: bool(hub.storage_requests) and any(blobs.glob("*.incomplete")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    over.set()
    assert process.returncode == -signal.SIGKILL
    assert open_it().missing == (SHARD,)
    hub.next("storage", hub_server.break_off(100))
    again = start(hub)
    _, told = again.communicate(timeout=240)
    assert (again.returncode, told) == (0, "")
    assert is_right(open_it())


def test_two_at_once(hub: HubServer) -> None:
    processes = [start(hub) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=240)[1] == ""
    assert is_right(open_it())
