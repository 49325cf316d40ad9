from __future__ import annotations

import threading

import hub_server
import huggingface_hub
import pytest
from hub_server import COMMIT, HubServer

from .conftest import ATTEMPTS, NAME, TOKEN, fetch_it, open_it, refused

# ── too much, too often, out of order ──


def test_too_many_requests(hub: HubServer, waits: list[float]) -> None:
    hub.next("api", *[hub_server.status(429)] * 3)
    open_it()
    assert waits == [1, 2, 4]
    hub.next("api", *[hub_server.status(429)] * ATTEMPTS)
    message, hint = refused(open_it)
    assert message == f"{hub.url} answers with status 429 to the request for org/model"
    assert "log in (`hf auth login`)" in hint
    assert waits[3:] == [1, 2, 4, 8]


@pytest.mark.parametrize("code", [500, 502, 503, 504])
def test_a_hub_in_trouble(hub: HubServer, code: int, waits: list[float]) -> None:
    hub.next("api", *[hub_server.status(code)] * 2)
    hub.next("storage", hub_server.status(code))
    open_it()
    assert waits == [1, 2, 1]
    hub.next("api", *[hub_server.status(code)] * ATTEMPTS)
    message, hint = refused(open_it)
    assert message == f"{hub.url} answers with status {code} to the request for org/model"
    assert hint.startswith("try again later")
    assert waits[3:] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("misbehaviour", "message"),
    [
        (hub_server.hang_up, "{file} can't be fetched from {url}: "),
        (hub_server.gibberish, "{file} can't be fetched from {url}: "),
        (hub_server.html, "{url} sent other content than announced for"),
        (hub_server.redirect_to_itself, "{file} can't be fetched from {url}: "),
        (hub_server.status(404), "{url} answers with status 404 to the request for {file}"),
        (hub_server.status(501), "{url} answers with status 501 to the request for {file}"),
        (hub_server.status(503), "{url} answers with status 503 to the request for {file}"),
    ],
)
def test_something_else_is_told_of_a_file(
    hub: HubServer, misbehaviour: hub_server.Misbehaviour, message: str
) -> None:
    hub.next("head", *[misbehaviour] * 50)
    file = f"config.json of {NAME}@{COMMIT}"
    assert refused(open_it)[0].startswith(message.format(url=hub.url, file=file))


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
        "try again, or set a longer HF_HUB_DOWNLOAD_TIMEOUT",
    )


def test_a_connection_that_is_refused(hub: HubServer, waits: list[float]) -> None:
    hub.close()
    message, hint = refused(open_it)
    assert message == f"{hub.url} can't be reached for org/model: [Errno 111] Connection refused"
    assert hint == (
        "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses the files in the cache"
    )
    assert waits == []


# ── redirects ──


def test_the_token_goes_to_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch_it()
    assert hub.requests
    assert all(request.has_token for request in hub.requests)
    assert hub.storage_requests
    assert not any(request.has_token for request in hub.storage_requests)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://x/y", "http://[", "//:99999/", ""])
def test_a_redirect_to_nowhere(hub: HubServer, target: str) -> None:
    hub.next("api", *[hub_server.redirect(target)] * 30)
    assert "org/model" in refused(open_it)[0]
