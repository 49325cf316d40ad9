from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import hub_server
import huggingface_hub
import numpy as np
import pytest
from hub_server import COMMIT, HubServer
from safetensors.numpy import save

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.hub import listing
from duoka.errors import MachineError

from .conftest import (
    CONFIG,
    NAME,
    SHARD,
    download_by_huggingface_hub,
    fetch_it,
    is_right,
    on_disk,
    open_it,
    refused,
    some_files,
)

# ── a plan ──


def test_a_plan_needs_no_weights(hub: HubServer) -> None:
    checkpoint = open_it()
    assert checkpoint.source == f"{NAME}@{COMMIT}"
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert (checkpoint.format, checkpoint.has_weights) == ("safetensors", True)
    assert checkpoint.weight_bytes == 200 * (300 + 600) * 4
    assert set(checkpoint.missing) >= {file.name for file in checkpoint.files}
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not asked & {"tokenizer.json", "tokenizer.model", "README.md", "training_args.bin"}
    # One request for each header, and none for more than its first part.
    assert [r.headers["range"] for r in hub.storage_requests] == ["bytes=0-65535"] * 2
    snapshot = {file.name for file in checkpoint.path.iterdir()}
    assert snapshot == {"config.json", "generation_config.json", "model.safetensors.index.json"}


def test_a_second_plan_asks_for_the_commit_alone(hub: HubServer) -> None:
    first = open_it()
    hub.requests.clear()
    hub.storage_requests.clear()
    assert open_it() == first
    assert [request.path for request in hub.requests] == [
        f"/api/models/{NAME}/revision/main?blobs=true"
    ]
    assert hub.storage_requests == []
    hub.requests.clear()
    assert Checkpoint.open(first.source) == first
    assert hub.requests == []


def test_the_fingerprint_is_that_of_a_directory(hub: HubServer, tmp_path: Path) -> None:
    remote, local = open_it(), Checkpoint.open(on_disk(hub, tmp_path / "copy"))
    assert remote.fingerprint == local.fingerprint
    fetched = remote.fetch()
    assert fetched.fingerprint == local.fingerprint
    assert Checkpoint.open(fetched.path).fingerprint == local.fingerprint
    assert remote.default_dtype == local.default_dtype
    assert remote.weight_bytes == local.weight_bytes


def test_a_long_header_costs_one_request_more(hub: HubServer) -> None:
    many = save({f"a.long.name.to.fill.the.header.{n}": np.zeros(1) for n in range(2000)})
    hub.repos[NAME].files = {"config.json": b"{}", "model.safetensors": many}
    assert len(open_it().tensors or ()) == 2000
    length = int.from_bytes(many[:8], "little")
    ranges = [request.headers["range"] for request in hub.storage_requests]
    assert ranges == ["bytes=0-65535", f"bytes=65536-{8 + length - 1}"]


def test_a_server_without_ranges_is_refused(hub: HubServer) -> None:
    hub.next("storage", *[hub_server.ignore_ranges] * 2)
    assert "content than announced" in refused(open_it)[0]


def test_code_is_fetched_only_if_trusted(hub: HubServer) -> None:
    auto_map = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}
    files = hub.repos[NAME].files
    files["config.json"] = json.dumps(CONFIG | {"auto_map": auto_map}).encode()
    files["modeling.py"] = b"x = 1\n"
    assert open_it().remote_code == ()
    assert not any("modeling.py" in request.path for request in hub.requests)
    trusted = Checkpoint.open(NAME, trust_remote_code=True)
    assert trusted.remote_code == (("modeling.py", hashlib.sha256(b"x = 1\n").hexdigest()),)


# ── loading ──


def test_fetching(hub: HubServer, waits: list[float]) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = open_it().fetch(lambda done, total: told.append((done, total)))
    assert is_right(checkpoint)
    assert checkpoint.missing == ()
    assert len(checkpoint.stamps) == 2
    names = {file.name for file in checkpoint.path.iterdir()}
    assert names == some_files().keys() - {"README.md", "training_args.bin", "logs/events.out"}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == sum(len(some_files()[name]) for name in names)
    assert waits == []
    # Twice, and by huggingface_hub itself: everything is there, and where it is expected.
    hub.requests.clear()
    assert Checkpoint.open(checkpoint.source).fetch() == checkpoint
    assert hub.requests == []
    path = huggingface_hub.try_to_load_from_cache(NAME, SHARD, revision=COMMIT)
    assert path == str(checkpoint.path / SHARD)


def test_what_another_program_downloaded_is_verified_once(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    download_by_huggingface_hub(hub)
    checkpoint = open_it()
    assert checkpoint.missing == ()
    hub.storage_requests.clear()
    read: list[Path] = []
    verify = listing.has_right_hash
    monkeypatch.setattr(
        listing, "has_right_hash", lambda path, file: read.append(path) or verify(path, file)
    )
    checkpoint.fetch()
    assert {path.name for path in read} >= {file.name for file in checkpoint.files}
    read.clear()
    checkpoint.fetch()
    assert (read, hub.storage_requests) == ([], [])


def test_a_damaged_file_in_the_cache_is_removed(hub: HubServer) -> None:
    checkpoint = fetch_it()
    blob = (checkpoint.path / SHARD).resolve()
    blob.write_bytes(bytes(len(blob.read_bytes())))
    message, hint = refused(checkpoint.fetch)
    assert (message, hint) == (
        f"{SHARD} of {NAME}@{COMMIT} in {checkpoint.path.parents[2]} differs from the content "
        f"that {hub.url} announces; it was removed",
        "run the command again; if it happens again, the file on the Hub is damaged",
    )
    assert not blob.exists()
    assert is_right(fetch_it())


def test_a_file_of_another_length_in_the_cache_is_fetched_again(hub: HubServer) -> None:
    blob = (fetch_it().path / SHARD).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert open_it().missing == (SHARD,)
    assert is_right(fetch_it())


def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_it()
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_it()
    assert checkpoint == online
    assert refused(checkpoint.fetch) == (
        f"4 files of {NAME}@{COMMIT} are not in the cache, and HF_HUB_OFFLINE forbids requests to "
        "the Hub: tokenizer.json, tokenizer.model, model-00001-of-00002.safetensors, "
        "model-00002-of-00002.safetensors",
        "unset HF_HUB_OFFLINE to download them",
    )
    assert refused(lambda: Checkpoint.open("org/other")) == (
        "org/other is neither a local directory nor in the cache, and HF_HUB_OFFLINE forbids "
        "requests to the Hub",
        "unset HF_HUB_OFFLINE to download it",
    )
    assert hub.requests == []


def test_offline_with_what_another_program_downloaded(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = Checkpoint.open(on_disk(hub, tmp_path / "copy")).fingerprint
    download_by_huggingface_hub(hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_it().fetch()
    assert is_right(checkpoint)
    assert checkpoint.fingerprint == expected


def test_offline_with_blobs_that_models_share(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    download_by_huggingface_hub(hub)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    for number, blob in enumerate((cache / "models--org--model" / "blobs").iterdir()):
        shared = cache / "blobs" / "ab" / f"{number:064x}"  # under the name that Xet has for it
        shared.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(shared)
        blob.symlink_to(f"../../blobs/ab/{shared.name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = fetch_it()
    assert is_right(checkpoint)
    shared = checkpoint.files[0].resolve()
    shared.write_bytes(bytes(shared.stat().st_size))
    refused(checkpoint.fetch)
    assert not shared.exists()


def test_the_disk_is_too_small(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "duoka.checkpoint.hub.snapshot.shutil.disk_usage", lambda path: SimpleNamespace(free=2**18)
    )
    message, hint = refused(fetch_it, MachineError)
    assert "needs 703.32 KiB more disk space" in message
    assert "has 256.00 KiB free" in message
    assert hint == "free some space, or set HF_HOME to a directory on another disk"
