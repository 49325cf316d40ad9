"""The Hub: found, asked within limits, believed as little as a file."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hub_server
import huggingface_hub
import numpy as np
import pytest
from hub_server import COMMIT, HubServer, Repo
from safetensors.numpy import save

from duoka.checkpoint import Checkpoint
from duoka.errors import CheckpointError, DuokaError, MachineError, UsageError
from duoka.hub import HubName, hashes, parse_name, troubles

NAME = "org/model"
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}
SIZE = len(json.dumps(CONFIG))
TOKEN = "hf_goodtoken0000"
ATTEMPTS = 1 + len(troubles.WAITS_SECONDS)


def some_files() -> dict[str, bytes]:
    """A sharded checkpoint with a tokenizer, and things that no one needs."""
    rng = np.random.default_rng(0)
    shards = {
        f"model-0000{n}-of-00002.safetensors": save(
            {f"layer.{n}.weight": rng.standard_normal((200, 300 * n), np.float32)}
        )
        for n in (1, 2)
    }
    weight_map = {f"layer.{n}.weight": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "tokenizer.json": b"{}",
        "tokenizer.model": b"not a small file for git",
        "README.md": b"# A model",
        "training_args.bin": b"nobody needs this",
        "logs/events.out": b"nor this",
        **shards,
    }


SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(troubles.time, "sleep", waited.append)
    return waited


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[HubServer]:
    with hub_server.serve() as server:
        server.repos[NAME] = Repo(files=some_files())
        hub_server.use(server, tmp_path, monkeypatch)
        yield server
    huggingface_hub.close_session()


def refused(
    action: Callable[[], object], kind: type[DuokaError] = CheckpointError
) -> tuple[str, str | None]:
    """What the user is told: the message, and the hint. Even its traceback gives nothing away."""
    with pytest.raises(kind) as caught:
        action()
    if kind is CheckpointError:
        assert caught.value.exit_code == 4
    whole = "".join(traceback.format_exception(caught.value)) + str(caught.value.hint)
    assert not any(secret in whole for secret in ("goodtoken", "badtoken", "verysecret"))
    return str(caught.value), caught.value.hint


def open_it() -> Checkpoint:
    return Checkpoint.open(NAME)


def fetch_it() -> Checkpoint:
    return Checkpoint.open(NAME).fetch()


def on_disk(hub: HubServer, directory: Path) -> Path:
    """The same repository, downloaded by hand."""
    directory.mkdir()
    for name, content in hub.repos[NAME].files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def download_by_huggingface_hub(hub: HubServer) -> None:
    for name in hub.repos[NAME].files:
        huggingface_hub.hf_hub_download(NAME, name)


def is_right(checkpoint: Checkpoint) -> bool:
    files = some_files()
    return all(file.read_bytes() == files[file.name] for file in checkpoint.files)


# ── names ──


@pytest.mark.parametrize(
    ("text", "revision", "name"),
    [
        ("org/model", None, HubName(repo="org/model")),
        ("org/model", "v1.0", HubName(repo="org/model", revision="v1.0")),
        ("org/model@refs/pr/3", None, HubName(repo="org/model", revision="refs/pr/3")),
        ("THUDM/chatglm3-6b-128k@main", "main", HubName(repo="THUDM/chatglm3-6b-128k")),
        ("model", None, None),
        ("./org/model", None, None),
        ("/org/model", None, None),
        ("org/model/more", None, None),
        ("../model", None, None),
        ("org/..", None, None),
        ("org/mo del", None, None),
    ],
)
def test_names(text: str, revision: str | None, name: HubName | None) -> None:
    assert parse_name(text, revision) == name


@pytest.mark.parametrize("revision", ["../../etc", "a b", "-x", "", "a/", "x" * 300, "a\0"])
def test_what_is_no_revision(revision: str) -> None:
    with pytest.raises(UsageError, match="can't be a revision"):
        parse_name(NAME, revision)


def test_two_revisions() -> None:
    with pytest.raises(UsageError, match="names a revision, and 'v2' is given"):
        parse_name("org/model@v1", "v2")


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


def test_a_server_without_ranges_is_read_from_its_beginning(hub: HubServer) -> None:
    hub.next("storage", *[hub_server.ignore_ranges] * 2)
    assert open_it().weight_bytes == 200 * (300 + 600) * 4


def test_a_local_directory_wins(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    on_disk(hub, tmp_path / "org" / "model")
    assert open_it().path == Path("org/model")
    assert hub.requests == []


def test_revisions(hub: HubServer) -> None:
    other = "f" * 40
    hub.repos[NAME].revisions["v1"] = other
    assert Checkpoint.open(NAME, revision="v1").source == f"{NAME}@{other}"
    assert Checkpoint.open(f"{NAME}@v1").source == f"{NAME}@{other}"
    assert Checkpoint.open(f"{NAME}@{COMMIT}").source == f"{NAME}@{COMMIT}"


def test_code_is_fetched_only_if_trusted(hub: HubServer) -> None:
    auto_map = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}
    files = hub.repos[NAME].files
    files["config.json"] = json.dumps(CONFIG | {"auto_map": auto_map}).encode()
    files["modeling.py"] = b"x = 1\n"
    assert open_it().remote_code == ()
    assert not any("modeling.py" in request.path for request in hub.requests)
    trusted = Checkpoint.open(NAME, trust_remote_code=True)
    assert trusted.remote_code == (("modeling.py", hashlib.sha256(b"x = 1\n").hexdigest()),)


def test_a_pickle_on_the_hub(hub: HubServer) -> None:
    hub.repos[NAME].files = {"config.json": b"{}", "pytorch_model.bin": b"never opened"}
    checkpoint = open_it()
    assert (checkpoint.format, checkpoint.tensors) == ("bin", None)
    assert hub.storage_requests == []


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
    verify = hashes.has_right_hash
    monkeypatch.setattr(
        hashes, "has_right_hash", lambda path, file: read.append(path) or verify(path, file)
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
        f"{SHARD} of {NAME}@{COMMIT} has another content in {checkpoint.path.parents[2]} than "
        f"{hub.url} tells of; it was removed",
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
        f"4 files of {NAME}@{COMMIT} are not in the cache, and the Hub may not be asked, because "
        "HF_HUB_OFFLINE is set: tokenizer.json, tokenizer.model, "
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
        "unset HF_HUB_OFFLINE to download them",
    )
    assert refused(lambda: Checkpoint.open("org/other")) == (
        "org/other is neither a directory here, nor in the cache, and the Hub may not be asked: "
        "HF_HUB_OFFLINE is set",
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


def test_the_disk_is_too_small(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "duoka.hub.snapshots.shutil.disk_usage", lambda path: SimpleNamespace(free=2**18)
    )
    message, hint = refused(fetch_it, MachineError)
    assert "needs 703.32 KiB more on the disk" in message
    assert "has 256.00 KiB free" in message
    assert hint == "free some, or let HF_HOME name a place on another disk"


# ── misbehaviours: who may ask ──

LOG_IN = "log in (`hf auth login`), or set HF_TOKEN"


def test_no_such_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_other() -> Checkpoint:
        return Checkpoint.open("org/modle")

    message = f"{hub.url} has no such repository: org/modle"
    hint = "check the spelling, or give the path of a local directory"
    assert refused(open_other) == (message, f"{hint}; if it is private, log in: hf auth login")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(open_other) == (message, hint)


def test_a_private_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].private = True
    assert "has no such repository: org/model" in refused(open_it)[0]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert is_right(fetch_it())


def test_a_wrong_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_badtoken00000")
    assert refused(open_it) == (
        f"{hub.url} doesn't accept the token: it is wrong, or has expired; it was about org/model",
        "log in again (`hf auth login`), or correct or unset HF_TOKEN",
    )


def test_a_token_is_wanted(hub: HubServer) -> None:
    hub.next("api", hub_server.status(401))
    message = f"{hub.url} wants to know who asks for org/model, and there is no token"
    assert refused(open_it) == (message, LOG_IN)


def test_a_token_without_the_permission(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.next("config.json", hub_server.status(403))
    assert refused(open_it) == (
        f"{hub.url} doesn't let this token read config.json of {NAME}@{COMMIT}",
        "the token needs the permission to read this repository",
    )


def test_a_gated_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].gated = True
    message = "org/model is gated: its authors must grant you access"
    hint = "ask for it at https://huggingface.co/org/model"
    assert refused(open_it) == (message, f"{hint}, then log in: hf auth login")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(open_it) == (message, hint)


# ── misbehaviours: what is there ──


def test_no_such_revision(hub: HubServer) -> None:
    assert refused(lambda: Checkpoint.open("org/model@v9")) == (
        f"{hub.url} has no such revision: org/model@v9",
        "give a branch, a tag or a commit",
    )


def test_no_such_file(hub: HubServer) -> None:
    hub.next("config.json", hub_server.status(404, X_Error_Code="EntryNotFound"))
    message = f"{hub.url} has no such file: config.json of {NAME}@{COMMIT}"
    assert refused(open_it) == (message, None)


def test_a_repository_without_a_config(hub: HubServer) -> None:
    del hub.repos[NAME].files["config.json"]
    assert refused(open_it)[0] == f"{NAME}@{COMMIT} holds no config.json"


NO_HUB = "is HF_ENDPOINT the address of a Hub, or does a network log-in page answer?"


@pytest.mark.parametrize(
    "told", [b"[]", b"{", b"{}", b'{"id": "org/model", "siblings": [3]}', b"\xff", b"<html>"]
)
def test_what_the_hub_tells_is_no_listing(hub: HubServer, told: bytes) -> None:
    hub.next("api", hub_server.status(200, told))
    assert refused(open_it) == (
        f"{hub.url} answers with something else than a Hub does to the request for org/model",
        NO_HUB,
    )


@pytest.mark.parametrize("commit", ["../..", "main", "A" * 40, ""])
def test_what_the_hub_tells_is_no_commit(hub: HubServer, commit: str) -> None:
    told = json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode()
    hub.next("api", hub_server.status(200, told))
    assert refused(open_it)[0] == f"{hub.url} doesn't tell the commit of org/model"


def test_another_commit_than_was_asked_for(hub: HubServer) -> None:
    hub.repos[NAME].revisions[other := "a" * 40] = COMMIT
    assert refused(lambda: Checkpoint.open(NAME, revision=other))[0] == (
        f"{hub.url} tells of commit {COMMIT} instead of {NAME}@{other}"
    )


def test_names_that_lead_out_of_the_cache_are_left_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.repos[NAME].files |= {"../../../evil.json": b"{}", "/evil.json": b"{}", "..": b"{}"}
    fetch_it()
    assert not list(tmp_path.rglob("evil.json"))


def test_a_web_page_instead_of_a_file(hub: HubServer) -> None:
    hub.next("config.json", hub_server.html)
    assert refused(open_it) == (
        f"{hub.url} sends config.json of {NAME}@{COMMIT} with another length than it told of",
        "the repository may have changed, or a proxy is in between: try again",
    )
    assert open_it().config == CONFIG


# ── misbehaviours: too much, too often, out of order ──


def test_too_many_requests(hub: HubServer, waits: list[float]) -> None:
    hub.next("api", *[hub_server.status(429, Retry_After="7")] * 2, hub_server.status(429))
    open_it()
    assert waits == [7, 7, 4]
    hub.next("api", hub_server.status(429, Retry_After="3600"))
    assert refused(open_it) == (
        f"{hub.url} gets too many requests from here and asks to wait 3600 s; it was about "
        "org/model",
        "try again later; with a token (`hf auth login`) the Hub allows more",
    )
    assert waits == [7, 7, 4]
    hub.next("api", *[hub_server.status(429, Retry_After="1")] * ATTEMPTS)
    assert "too many requests" in refused(open_it)[0]
    assert waits[3:] == [1] * (ATTEMPTS - 1)


@pytest.mark.parametrize("code", [500, 502, 503, 504])
def test_a_hub_in_trouble(hub: HubServer, code: int, waits: list[float]) -> None:
    hub.next("api", *[hub_server.status(code)] * 2)
    hub.next("storage", hub_server.status(code))
    open_it()
    assert waits == [1, 2, 1]
    hub.next("api", *[hub_server.status(code)] * ATTEMPTS)
    assert refused(open_it) == (
        f"{hub.url} answers with status {code} to the request for org/model",
        "the Hub has a problem of its own: try again later",
    )
    assert waits[3:] == [1, 2, 4, 8]


def test_a_status_that_nobody_expects(hub: HubServer) -> None:
    hub.next("api", hub_server.status(418))
    message = f"{hub.url} answers with status 418 to the request for org/model"
    assert refused(open_it) == (message, None)


def test_a_config_of_any_length_is_not_downloaded(hub: HubServer) -> None:
    hub.repos[NAME].lies["config.json"] = {"size": 10**10}
    assert refused(open_it)[0] == (
        f"config.json of {NAME}@{COMMIT} has 10000000000 bytes; at most 100000000 are read"
    )


def test_nothing_is_sent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    late = threading.Event()
    hub.next("api", *[hub_server.wait_for(late)] * ATTEMPTS)
    told = refused(open_it)
    late.set()
    assert told == (
        f"{hub.url} sent nothing of org/model for 0.2 seconds",
        "try again; HF_HUB_DOWNLOAD_TIMEOUT allows for slower servers",
    )


def test_a_connection_that_is_refused(hub: HubServer, waits: list[float]) -> None:
    hub.close()
    message, hint = refused(open_it)
    assert message == f"{hub.url} can't be reached for org/model: [Errno 111] Connection refused"
    assert hint == (
        "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what was downloaded before"
    )
    assert waits == []


def test_a_name_that_no_one_has(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:pw@hub.invalid")
    message, _ = refused(open_it)
    assert message.startswith("http://hub.invalid can't be reached for org/model: ")


def test_no_http(hub: HubServer) -> None:
    hub.next("api", *[hub_server.gibberish] * ATTEMPTS)
    assert refused(open_it) == (
        f"the connection to {hub.url} broke off in org/model again and again",
        "run the command again: files that are complete are kept",
    )


# ── misbehaviours: redirects ──


def test_the_token_goes_to_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch_it()
    assert hub.requests
    assert all(request.has_token for request in hub.requests)
    assert hub.storage_requests
    assert not any(request.has_token for request in hub.storage_requests)


def test_a_redirect_within_the_hub_is_followed(hub: HubServer) -> None:
    path = f"/{NAME}/resolve/main/config.json"
    hub.next("config.json", hub_server.redirect(path))
    assert open_it().config == CONFIG


def test_redirects_without_end(hub: HubServer) -> None:
    hub.next("api", *[hub_server.redirect_to_itself] * 30)
    assert refused(open_it) == (
        f"{hub.url} redirects again and again for org/model",
        "is HF_ENDPOINT right, or a proxy in between?",
    )


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://x/y", "http://[", "//:99999/", ""])
def test_a_redirect_to_nowhere(hub: HubServer, target: str) -> None:
    hub.next("api", *[hub_server.redirect(target)] * 30)
    assert "org/model" in refused(open_it)[0]


# ── misbehaviours: files ──


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
    hub.next("storage", *[hub_server.hang_up] * 6)  # what huggingface_hub bears
    assert refused(checkpoint.fetch) == (
        f"the connection to {hub.url} broke off in {SHARD} of {NAME}@{COMMIT} again and again",
        "run the command again: files that are complete are kept",
    )
    assert open_it().missing == (SHARD,)
    assert is_right(fetch_it())


def test_a_storage_without_ranges_begins_again(hub: HubServer) -> None:
    checkpoint = open_it()
    hub.next("storage", hub_server.break_off(20), hub_server.ignore_ranges)
    assert is_right(checkpoint.fetch())


def test_a_wrong_hash(hub: HubServer) -> None:
    checkpoint = open_it()
    hub.next("storage", hub_server.spoil)
    assert refused(checkpoint.fetch) == (
        f"tokenizer.model of {NAME}@{COMMIT} has another content in {checkpoint.path.parents[2]} "
        f"than {hub.url} tells of; it was removed",
        "run the command again; if it happens again, the file on the Hub is damaged",
    )
    assert not list((checkpoint.path.parents[1] / "blobs").glob("*.incomplete"))
    assert "tokenizer.model" in open_it().missing
    assert is_right(fetch_it())


def test_a_small_file_with_a_wrong_hash(hub: HubServer) -> None:
    hub.next("config.json", hub_server.spoil)
    assert "config.json of" in refused(open_it)[0]
    assert open_it().config == CONFIG


def test_another_length_than_was_told(hub: HubServer) -> None:
    checkpoint = open_it()
    hub.next("storage", hub_server.replace(bytes(1000)))
    assert refused(checkpoint.fetch)[0] == (
        f"{hub.url} sends tokenizer.model of {NAME}@{COMMIT} with another length than it told of"
    )
    assert "tokenizer.model" in open_it().missing


@pytest.mark.parametrize("told", ["bytes 5-65535/9", "bytes 5-{size}", "bytes 0-23/*", "x", ""])
def test_another_part_of_a_header_than_was_asked_for(hub: HubServer, told: str) -> None:
    size = len(some_files()[SHARD])
    answer = hub_server.status(206, bytes(99), Content_Range=told.format(size=f"9/{size}"))
    hub.next("storage", answer, answer)
    message, _ = refused(open_it)
    assert ("and told of" in message) or ("something else than a Hub does" in message)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "{path} is empty"),
        (b"short", "of {name} is no safetensors file, or cut off: its header should have"),
        ((2**60).to_bytes(8, "little") + b"{}", "should have 1152921504606846976 bytes"),
        ((10**6).to_bytes(8, "little") + b"{}", "its header should have 1000000 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "its header doesn't begin with '{{'"),
        ((2).to_bytes(8, "little") + b"{}more", "bytes that belong to no tensor"),
    ],
)
def test_headers_that_lie(hub: HubServer, file: bytes, message: str) -> None:
    hub.repos[NAME].files = {"config.json": b"{}", "model.safetensors": file}
    path = Path(huggingface_hub.constants.HF_HUB_CACHE, "models--org--model/snapshots", COMMIT)
    expected = message.format(path=path / "model.safetensors", name=f"{NAME}@{COMMIT}")
    assert expected in refused(open_it)[0]


# ── processes ──

_FETCH = f"from duoka.checkpoint import Checkpoint; Checkpoint.open({NAME!r}).fetch()"


def start(hub: HubServer) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": huggingface_hub.constants.HF_HUB_CACHE,
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH], env=environment, stderr=subprocess.PIPE, text=True
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_killed_in_mid_file_and_run_again(hub: HubServer) -> None:
    checkpoint = open_it()
    checkpoint.folder.download([n for n in checkpoint.missing if n != SHARD])
    over = threading.Event()
    hub.next("storage", hub_server.stall(300_000, over))
    process = start(hub)
    blobs = checkpoint.path.parents[1] / "blobs"
    until(lambda: bool(hub.storage_requests) and any(blobs.glob("*.incomplete")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    over.set()
    assert process.returncode == -signal.SIGKILL
    assert open_it().missing == (SHARD,)
    again = start(hub)
    _, told = again.communicate(timeout=60)
    assert (again.returncode, told) == (0, "")
    assert is_right(open_it())


def test_two_at_once(hub: HubServer) -> None:
    processes = [start(hub) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=60)[1] == ""
    assert is_right(open_it())
