"""Images that requests name by their address."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx2
import pytest
import scripted

from duoka.base import web
from duoka.errors import UsageError
from duoka.serve import remote_images

URL, OTHER = "https://pictures.test/a.png", "HTTP://pictures.test/b.png"


def messages_of(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    text = {"type": "text", "text": f"see {URL}"}
    return {"messages": [{"role": "user", "content": [text, *parts]}]}


FORMS = {
    "/v1/chat/completions": messages_of(URL),
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    },
    "/v1/messages": {
        "model": scripted.MODEL,
        "max_tokens": 5,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "url", "url": URL}}],
            }
        ],
    },
}


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is fetched, and with which limits."""
    fetches: list[tuple[str, dict[str, Any]]] = []

    async def fetch(address: str, **limits: Any) -> bytes:
        fetches.append((address, limits))
        await asyncio.sleep(0)
        if "private" in address:
            raise UsageError(f"the image {address!r} can't be fetched: it is private")
        return address.encode()

    monkeypatch.setattr(web, "fetch", fetch)
    return fetches


def post(path: str, *bodies: Any, fetches_images: bool = True) -> tuple[list[httpx2.Response], Any]:
    """The answers to some requests at once, and what came to the engine."""
    events = scripted.begun(), scripted.delta("a"), scripted.ended()
    app, pool = scripted.app_of(*events, fetches_images=fetches_images)
    return scripted.post(app, path, *bodies), pool.asks


def urls(ask: Any) -> list[str]:
    return list(ask.prompt.messages[0].images)


def data_url(address: str) -> str:
    return f"data:image/any;base64,{base64.b64encode(address.encode()).decode()}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_each_form_has_them(path: str, stream: bool, fetches: list[Any]) -> None:
    (answer,), (ask,) = post(path, {**FORMS[path], "stream": stream})
    assert answer.status_code == 200, answer.text
    assert urls(ask) == [data_url(URL)]
    ((address, limits),) = fetches
    assert (address, limits["public_only"]) == (URL, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_a_refusal_has_a_status_of_its_own(
    path: str, stream: bool, fetches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.serve.limits._MOST_MEMORY_BYTES", 2**20)
    (answer,), asks = post(path, {**FORMS[path], "stream": stream})
    assert (answer.status_code, answer.headers["Retry-After"], asks) == (503, "5", [])
    assert "are in transfer" in answer.json()["error"]["message"]


def test_several_share_the_limits(fetches: list[Any]) -> None:
    inline = data_url("inside")
    (answer,), (ask,) = post("/v1/chat/completions", messages_of(URL, inline, OTHER, URL))
    assert answer.status_code == 200
    assert urls(ask) == [data_url(URL), inline, data_url(OTHER), data_url(URL)]
    (_, first), (address, second) = fetches
    assert address == OTHER
    assert first["most_bytes"] - second["most_bytes"] == len(URL)
    assert second["most_seconds"] <= first["most_seconds"] <= 20


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (messages_of("http://private.test"), "can't be fetched: it is private"),
        (
            messages_of(*(f"{URL}?{n}" for n in range(17))),
            "17 image URLs in a request; the limit is",
        ),
    ],
    ids=["private", "many"],
)
def test_what_is_refused(said: Any, reason: str, fetches: list[Any]) -> None:
    (answer,), asks = post("/v1/chat/completions", said)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], asks) == (400, "messages", [])
    assert reason in error["message"]
    assert len(fetches) <= 1


def test_they_count_among_what_is_held(fetches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    body = messages_of(URL)
    monkeypatch.setattr(remote_images, "_MOST_BYTES", 100)
    monkeypatch.setattr("duoka.serve.limits._MOST_MEMORY_BYTES", 230)
    assert [answer.status_code for answer in post("/v1/chat/completions", body)[0]] == [503]
    monkeypatch.setattr("duoka.serve.limits._MOST_MEMORY_BYTES", 300)  # one at a time has room
    app, _ = scripted.app_of(scripted.begun(), scripted.ended(), fetches_images=True)
    for _ in range(3):
        assert scripted.post(app, "/v1/chat/completions", body)[0].status_code == 200


def test_without_the_option_nothing_is_fetched(fetches: list[Any]) -> None:
    _, (ask,) = post("/v1/chat/completions", messages_of(URL), fetches_images=False)
    assert urls(ask) == [URL]  # which the engine refuses: see test_chats
    assert fetches == []
