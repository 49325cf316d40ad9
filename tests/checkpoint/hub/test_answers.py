from __future__ import annotations

import json
from pathlib import Path

import hub_server
import pytest
from hub_server import COMMIT, HubServer

from duoka.checkpoint.checkpoint import Checkpoint

from .conftest import NAME, TOKEN, fetch_it, is_right, open_it, refused

# ── who may ask ──

LOG_IN = "log in (`hf auth login`), or correct or unset HF_TOKEN"


def test_no_such_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_other() -> Checkpoint:
        return Checkpoint.open("org/modle")

    message = f"{hub.url} has no such repository: org/modle"
    hint = "check the spelling, or give the path of a local directory"
    assert refused(open_other) == (
        message,
        f"{hint}; for private repositories log in: hf auth login",
    )
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
        f"{hub.url} denies access to org/model: the token is wrong, expired, or lacks permission",
        LOG_IN,
    )


def test_a_gated_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].gated = True
    message = "org/model is gated: its authors must grant you access"
    hint = "request access at https://huggingface.co/org/model"
    assert refused(open_it) == (message, f"{hint}; for private repositories log in: hf auth login")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refused(open_it) == (message, hint)


# ── what is there ──


def test_no_such_revision(hub: HubServer) -> None:
    assert refused(lambda: Checkpoint.open("org/model@v9")) == (
        f"{hub.url} has no such revision: org/model@v9",
        "give a branch, a tag or a commit",
    )


NO_HUB = (
    "try again; check that HF_ENDPOINT is the URL of a Hub and that no network log-in page "
    "intercepts requests"
)


@pytest.mark.parametrize(
    "told", [b"[]", b"{", b"{}", b'{"id": "org/model", "siblings": [3]}', b"\xff", b"<html>"]
)
def test_what_the_hub_tells_is_no_listing(hub: HubServer, told: bytes) -> None:
    hub.next("api", hub_server.status(200, told))
    assert refused(open_it) == (
        f"{hub.url} sent other content than announced for org/model",
        NO_HUB,
    )


@pytest.mark.parametrize("commit", ["../..", "main", "A" * 40, ""])
def test_what_the_hub_tells_is_no_commit(hub: HubServer, commit: str) -> None:
    told = json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode()
    hub.next("api", hub_server.status(200, told))
    assert refused(open_it)[0] == f"{hub.url} doesn't report the commit of org/model"


def test_another_commit_than_was_asked_for(hub: HubServer) -> None:
    hub.repos[NAME].revisions[other := "a" * 40] = COMMIT
    assert refused(lambda: Checkpoint.open(NAME, revision=other))[0] == (
        f"{hub.url} doesn't report the commit of {NAME}@{other}"
    )


def test_names_that_lead_out_of_the_cache_are_left_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.repos[NAME].files |= {"../../../evil.json": b"{}", "/evil.json": b"{}", "..": b"{}"}
    fetch_it()
    assert not list(tmp_path.rglob("evil.json"))
