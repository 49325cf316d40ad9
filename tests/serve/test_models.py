"""The list of models, as OpenAI's and Anthropic's clients read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anthropic
import httpx2
import openai
import pytest
import scripted

from duoka.serve.app import make_app
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

NAMES = ["a", "org/b", "c"]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
VERSION = {"anthropic-version": "2023-06-01"}


def app_of(*events: Any) -> Any:
    return make_app(Service(cast(EnginePool, scripted.ScriptedPool(events)), NAMES))


def call(open_client: Any, send: Callable[[Any], Awaitable[Any]], url: str = "http://test") -> Any:
    """What a client makes of an answer."""

    async def run() -> Any:
        async with scripted.transport(app_of()) as http:
            options = {"base_url": url, "api_key": "x", "max_retries": 0, "http_client": http}
            return await send(open_client(**options, _strict_response_validation=True))

    return asyncio.run(run())


def of_anthropic(send: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]]) -> Any:
    return call(anthropic.AsyncAnthropic, send)


def test_openais_client_lists_all_names() -> None:
    page = call(openai.AsyncOpenAI, lambda client: client.models.list(), "http://test/v1")
    assert [model.id for model in page.data] == NAMES
    assert all(abs(model.created - time.time()) < 60 for model in page.data)


def test_anthropics_client_lists_all_names_in_pages() -> None:
    async def ids(client: anthropic.AsyncAnthropic) -> list[str]:
        return [model.id async for model in client.models.list(limit=2)]

    assert of_anthropic(ids) == NAMES
    page = of_anthropic(lambda client: client.models.list())
    assert [(model.display_name, model.type, model.max_tokens) for model in page.data] == [
        (name, "model", 128) for name in NAMES
    ]
    assert abs(page.data[0].created_at.timestamp() - time.time()) < 60


@pytest.mark.parametrize(
    ("query", "expected", "has_more"),
    [
        ({"after_id": "a"}, ["org/b", "c"], False),
        ({"after_id": "a", "limit": 1}, ["org/b"], True),
        ({"before_id": "c", "limit": 1}, ["org/b"], True),
        ({"before_id": "c"}, ["a", "org/b"], False),
        ({"after_id": "a", "before_id": "c"}, ["org/b"], False),
        ({"after_id": "c"}, [], False),
        ({"limit": 3}, NAMES, False),
    ],
)
def test_a_page_is_chosen(query: dict[str, Any], expected: list[str], has_more: bool) -> None:
    page = of_anthropic(lambda client: client.models.list(**query))
    assert [model.id for model in page.data] == expected
    ends = (expected[0], expected[-1]) if expected else (None, None)
    assert (page.first_id, page.last_id, page.has_more) == (*ends, has_more)


def test_one_model_is_retrieved() -> None:
    model = of_anthropic(lambda client: client.models.retrieve("org/b"))
    assert (model.id, model.type) == ("org/b", "model")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models/x", 404), ("/v1/models?after_id=x", 404), ("/v1/models?limit=0", 400)],
)
def test_errors_have_the_form_of_the_client(path: str, status: int) -> None:
    async def ask() -> list[httpx2.Response]:
        async with scripted.transport(app_of()) as http:
            return [await http.get(f"http://test{path}", headers=more) for more in (VERSION, {})]

    theirs, ours = asyncio.run(ask())
    assert (theirs.status_code, theirs.json()["type"]) == (status, "error")
    assert "type" not in ours.json()
    if status == 400:
        assert theirs.json()["error"]["message"].startswith("limit: ")


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_an_answer_has_the_name_that_was_asked_for(name: str) -> None:
    app = app_of(scripted.begun(), scripted.delta("a"), scripted.ended())
    (answer,) = scripted.post(app, CHAT, {"model": name, "messages": HI})
    assert answer.json()["model"] == (name or "a")
    (answer,) = scripted.post(app, CHAT, {"model": "d", "messages": HI})
    assert answer.json()["error"]["message"] == (
        "there is no model 'd'; this is 'a' or 'org/b' or 'c'"
    )
