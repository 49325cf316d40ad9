from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import hub_server
import huggingface_hub
import modelscope_server
import pytest
from hub_server import COMMIT, HubServer, Repo
from modelscope_server import TOKEN, ModelScope

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import MachineError, UsageError

from .conftest import CONFIG, NAME, SHARD, is_right, on_disk, refused, some_files

pytest.importorskip("modelscope_hub")

SCOPE = f"modelscope:{NAME}"


@pytest.fixture
def scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> Iterator[HubServer]:
    with hub_server.serve(ModelScope) as server:
        revisions = {"master": COMMIT, "v1.0": COMMIT, COMMIT: COMMIT}
        server.repos[NAME] = Repo(files=some_files(), revisions=revisions)
        modelscope_server.use(server, tmp_path, monkeypatch)
        yield server


def open_it() -> Checkpoint:
    return Checkpoint.open(SCOPE)


def fetch_it() -> Checkpoint:
    return open_it().fetch()


def download_by_modelscope(revision: str = "master") -> Path:
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig

    return Path(HubApi(HubConfig()).download_repo(NAME, "model", revision=revision))


def asked_for(scope: HubServer) -> set[str]:
    """The files that were asked for."""
    queries = [parse_qs(urlsplit(request.path).query) for request in scope.requests]
    return {name for query in queries for name in query.get("FilePath", ())}


# ── a plan ──


def test_a_plan_needs_no_weights(scope: HubServer) -> None:
    checkpoint = open_it()
    assert (checkpoint.source, checkpoint.name) == (SCOPE, NAME)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert checkpoint.weight_bytes == 200 * (300 + 600) * 4
    assert set(checkpoint.missing) >= {file.name for file in checkpoint.files}
    assert [r.headers["range"] for r in scope.storage_requests] == ["bytes=0-65535"] * 2
    snapshot = {file.name for file in checkpoint.path.iterdir()}
    assert snapshot == {"config.json", "generation_config.json", "model.safetensors.index.json"}


def test_a_second_plan_asks_for_the_listing_alone(scope: HubServer) -> None:
    first = open_it()
    scope.requests.clear()
    scope.storage_requests.clear()
    assert open_it() == first
    assert [request.path for request in scope.requests] == [
        f"/api/v1/models/{NAME}/repo/files?Revision=master&Recursive=True"
    ]
    assert scope.storage_requests == []


def test_a_commit_is_asked_for_once(scope: HubServer) -> None:
    first = Checkpoint.open(f"{SCOPE}@{COMMIT}").fetch()
    scope.requests.clear()
    assert Checkpoint.open(first.source).fetch() == first
    assert (first.source, scope.requests) == (f"{SCOPE}@{COMMIT}", [])


@pytest.mark.parametrize(("text", "revision"), [(f"{SCOPE}@v1.0", None), (SCOPE, "v1.0")])
def test_a_revision(scope: HubServer, text: str, revision: str | None) -> None:
    checkpoint = Checkpoint.open(text, revision=revision).fetch()
    assert checkpoint.source == f"{SCOPE}@v1.0"
    assert all("Revision=v1.0" in request.path for request in scope.requests)
    assert checkpoint.path == download_by_modelscope("v1.0")
    assert checkpoint.path != open_it().path


def test_the_fingerprint_is_that_of_a_directory(scope: HubServer, tmp_path: Path) -> None:
    remote, local = open_it(), Checkpoint.open(on_disk(scope, tmp_path / "copy"))
    assert remote.fingerprint == local.fingerprint
    assert remote.fetch().fingerprint == local.fingerprint


def test_a_server_without_ranges_is_refused(scope: HubServer) -> None:
    scope.next("storage", *[hub_server.ignore_ranges] * 2)
    assert "content than announced" in refused(open_it)[0]


# ── loading ──


def test_fetching(scope: HubServer) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = open_it().fetch(lambda done, total: told.append((done, total)))
    assert is_right(checkpoint)
    assert checkpoint.missing == ()
    names = {file.name for file in checkpoint.path.iterdir()}
    assert names == some_files().keys() - {"README.md", "training_args.bin", "logs/events.out"}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == sum(len(some_files()[name]) for name in names)
    # ModelScope's client finds the files where it would put them itself.
    scope.requests.clear()
    assert download_by_modelscope() == checkpoint.path
    assert asked_for(scope) == some_files().keys() - names


def test_what_the_client_downloaded_is_used(scope: HubServer) -> None:
    path = download_by_modelscope()
    checkpoint = open_it()
    assert (checkpoint.path, checkpoint.missing) == (path, ())
    scope.storage_requests.clear()
    assert is_right(checkpoint.fetch())
    assert scope.storage_requests == []


def test_what_an_old_client_downloaded_is_used(scope: HubServer, tmp_path: Path) -> None:
    old = tmp_path / "modelscope" / "hub" / "models" / "org" / "model"
    old.parent.mkdir(parents=True)
    on_disk(scope, old)
    assert (open_it().path, open_it().missing) == (old, ())
    # The old directory doesn't say of which revision its files are.
    assert Checkpoint.open(f"{SCOPE}@v1.0").path != old


def test_an_interrupted_download_is_resumed(scope: HubServer) -> None:
    checkpoint = open_it()
    scope.storage_requests.clear()
    scope.next("storage", lambda handler, normal: normal(), hub_server.break_off(100_000))
    assert is_right(checkpoint.fetch())
    ranges = [request.headers.get("range") for request in scope.storage_requests]
    assert "bytes=100000-" in ranges
    assert not list(checkpoint.path.glob("*.incomplete"))


@pytest.mark.parametrize("misbehaviour", [hub_server.spoil, hub_server.replace(b"something else")])
def test_wrong_content_is_refused(scope: HubServer, misbehaviour: hub_server.Misbehaviour) -> None:
    checkpoint = open_it()
    scope.next("storage", *[misbehaviour] * 20)
    message, _ = refused(checkpoint.fetch)
    assert (
        message == f"{scope.url} sent other content than announced for tokenizer.model of {SCOPE}"
    )
    assert not (checkpoint.path / "tokenizer.model").exists()


def test_a_damaged_file_in_the_cache_is_removed(scope: HubServer) -> None:
    checkpoint = fetch_it()
    shard = checkpoint.path / SHARD
    shard.write_bytes(bytes(shard.stat().st_size))
    assert f"differs from the content that {scope.url} announces" in refused(checkpoint.fetch)[0]
    assert is_right(fetch_it())


def test_a_branch_that_moves_is_noticed(scope: HubServer) -> None:
    planned = open_it()
    files = scope.repos[NAME].files
    files[SHARD] = files[SHARD][:-1] + b"!"
    assert "sent other content than announced" in refused(planned.fetch)[0]
    assert (fetch_it().path / SHARD).read_bytes() == files[SHARD]


def test_the_disk_is_too_small(scope: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "duoka.checkpoint.hub.snapshot.shutil.disk_usage", lambda path: SimpleNamespace(free=2**18)
    )
    message, hint = refused(fetch_it, MachineError)
    assert "needs 703.32 KiB more disk space" in message
    assert hint == "free some space, or set MODELSCOPE_CACHE to a directory on another disk"


# ── offline ──


def test_offline(scope: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_it()
    scope.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_it() == online
    assert "4 files of modelscope:org/model are not in the cache" in refused(online.fetch)[0]
    assert refused(lambda: Checkpoint.open("modelscope:org/other"))[0] == (
        "modelscope:org/other is neither a local directory nor in the cache, and HF_HUB_OFFLINE "
        "forbids requests to the Hub"
    )
    assert scope.requests == []


def test_offline_with_what_the_client_downloaded(
    scope: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    download_by_modelscope()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert is_right(fetch_it())


# ── errors ──


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("modelscope:org/nothing", "modelscope:org/nothing"), (f"{SCOPE}@v9", f"{SCOPE}@v9")],
)
def test_what_is_not_there(scope: HubServer, text: str, wanted: str) -> None:
    message, hint = refused(lambda: Checkpoint.open(text))
    assert message == f"{scope.url} has no such repository, revision or file: {wanted}"
    assert "modelscope login" in str(hint)


def test_a_private_model(scope: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scope.repos[NAME].private = True
    assert "has no such repository" in refused(open_it)[0]
    scope.requests.clear()
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    assert is_right(fetch_it())
    assert all(request.has_token for request in scope.requests)
    assert not any(r.has_token or "cookie" in r.headers for r in scope.storage_requests)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-badtoken")
    assert "denies access to modelscope:org/model: the token has no access" in refused(open_it)[0]


def test_a_gated_model(scope: HubServer) -> None:
    scope.repos[NAME].gated = True
    assert refused(open_it) == (
        f"{scope.url} denies access to config.json of {SCOPE}: no token is set",
        f"request access at {scope.url}/models/{NAME}, and log in (`modelscope login`) or set "
        "MODELSCOPE_API_TOKEN",
    )


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server(scope: HubServer, code: int) -> None:
    scope.next("api", *[hub_server.status(code)] * 3)
    assert open_it().config == CONFIG
    scope.next("api", *[hub_server.status(code)] * 20)
    message, hint = refused(open_it)
    assert message == f"{scope.url} answers with status {code} to the request for {SCOPE}"
    assert str(hint).startswith("try again later; after 429 log in (`modelscope login`)")


@pytest.mark.parametrize("place", ["api", "config.json", "storage"])
@pytest.mark.parametrize(
    "misbehaviour", [hub_server.hang_up, hub_server.gibberish, hub_server.redirect_to_itself]
)
def test_broken_transfers(
    scope: HubServer, place: str, misbehaviour: hub_server.Misbehaviour
) -> None:
    scope.next(place, *[misbehaviour] * 300)
    message, _ = refused(open_it)
    assert f"can't be fetched from {scope.url}" in message


def test_a_range_that_ends_early(scope: HubServer) -> None:
    short = hub_server.status(206, b"short", Content_Range="bytes 0-4/9")
    scope.next("storage", short)
    assert open_it().weight_bytes == 200 * (300 + 600) * 4
    scope.repos[NAME].files[SHARD] += b" "  # not the one whose header is known
    scope.next("storage", *[short] * 20)
    assert refused(open_it)[0] == (
        f"{SHARD} of {SCOPE} can't be fetched from {scope.url}: the connection broke"
    )


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"[]", b'{"Data": 5}', b'{"Data": [3]}'])
def test_a_listing_that_is_none(scope: HubServer, body: bytes) -> None:
    scope.next("api", hub_server.status(200, body))
    message, _ = refused(open_it)
    assert message in (
        f"{scope.url} sent other content than announced for {SCOPE}",
        f"{SCOPE} has no config.json",
    )


def test_a_connection_that_is_refused(scope: HubServer) -> None:
    scope.close()
    message, hint = refused(open_it)
    assert message == f"{scope.url} can't be reached for {SCOPE}: [Errno 111] Connection refused"
    assert "check the network and MODELSCOPE_ENDPOINT" in str(hint)


def test_hostile_names_and_sizes(scope: HubServer) -> None:
    files = scope.repos[NAME].files
    files["../config.json"] = files["/etc/x.json"] = b"{}"
    scope.repos[NAME].lies["config.json"] = {"Size": 10**10}
    assert "has 10000000000 bytes; at most" in refused(open_it)[0]
    scope.repos[NAME].lies.clear()
    assert {f.name for f in open_it().path.iterdir()} <= some_files().keys()


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = "duoka.base.requirements.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None)
    message, hint = refused(open_it, UsageError)
    assert message == "models on ModelScope need modelscope_hub, which isn't installed"
    assert hint == 'pip install "duoka[modelscope]"'
