"""Ids, HEAD, the log of requests, and the headers for web pages of other origins."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, cast

import httpx2
import pytest
import scripted
from abuse import CHAT
from scripted import CALLS

from duoka.serve.app import make_app
from duoka.serve.errors import CLOSED
from duoka.serve.limits import Gate, RequestMemory
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

KEY = {"Authorization": "Bearer correct horse"}
BODY = {"messages": [{"role": "user", "content": "my secret"}]}
PAGE = {"Origin": "https://page.example"}
LOGGER = "duoka.serve.request_log"


class Broken(scripted.ScriptedPool):
    def submit(self, *_: Any) -> Any:
        raise RuntimeError("a defect")


def ask(method: str, path: str, pool: Any = None, **options: Any) -> httpx2.Response:
    """An answer of a server with a key, for pages of one origin."""
    service = Service(cast(EnginePool, pool or scripted.ScriptedPool(CALLS)), scripted.MODEL)
    app = make_app(service, key="correct horse", origins=("https://page.example",))

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            return await http.request(method, f"http://test{path}", **options)

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["mine", "a" * 128, "a" * 129, "two words", "", "\x7f"])
def test_a_request_keeps_its_id_if_it_is_sane(name: str) -> None:
    number = ask("GET", "/version", headers={"x-request-id": name}).headers["x-request-id"]
    is_sane = name in ("mine", "a" * 128)
    assert number == name if is_sane else re.fullmatch("req_[0-9a-f]{32}", number)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "pool"),
    [
        ("GET", "/v1/models", {}, 401, None),
        ("GET", "/nothing", KEY, 404, None),
        ("POST", CHAT, {**KEY, "content-encoding": "gzip"}, 415, None),
        ("POST", CHAT, KEY, 200, None),
        ("POST", CHAT, KEY, 500, Broken(())),
    ],
)
def test_every_answer_has_an_id_and_can_be_read_by_the_page(
    method: str, path: str, headers: dict[str, str], status: int, pool: Any
) -> None:
    answer = ask(method, path, pool, headers={**headers, **PAGE}, json=BODY)
    assert answer.status_code == status
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
    other = ask(method, path, pool, headers={**headers, "Origin": "https://b"}, json=BODY)
    assert "access-control-allow-origin" not in other.headers


def test_a_page_may_ask_what_it_may_send_without_the_key() -> None:
    wish = {"Access-Control-Request-Method": "POST"}
    wish |= {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    answer = ask("OPTIONS", CHAT, headers={**PAGE, **wish})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert ask("OPTIONS", CHAT, headers={"Origin": "https://b", **wish}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/v1/models/scripted"])
def test_head_has_the_headers_of_get(path: str) -> None:
    whole, head = (ask(method, path, headers=KEY) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    assert ask("HEAD", CHAT, headers=KEY).status_code == 405


def test_a_line_says_what_was_asked_and_nothing_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for stream in (False, True):
        ask("POST", f"{CHAT}?key=hidden", headers=KEY, json={**BODY, "stream": stream})
    ask("HEAD", "/v1/models/%0Aforged", headers={**KEY, "x-request-id": "mine"})
    *lines, head = (record.getMessage() for record in caplog.records if record.name == LOGGER)
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"127\.0\.0\.1 POST /v1/chat/completions 200 id=req_\w+ model=scripted "
            r"prompt_tokens=7 completion_tokens=9 seconds=\d+\.\d{3}",
            line,
        )
    assert head.startswith("127.0.0.1 HEAD /v1/models/%0Aforged 404 id=mine model=- ")


def test_a_request_without_a_log_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    assert ask("GET", "/version").status_code == 200
    assert not caplog.records


def test_an_answer_that_is_cut_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise asyncio.CancelledError

    async def talk(message: Any = None) -> Any:
        return {"type": "http.request"} if message is None else None

    scope: Any = {"type": "http", "method": "GET", "path": "/a", "headers": [], "client": None}
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Gate(app, RequestMemory())(scope, talk, talk))
    assert caplog.messages[0].startswith(f"- GET /a {CLOSED} id=req_")
