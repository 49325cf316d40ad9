"""An application whose engine says what a test has written down, for what no small model says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

import httpx2
from fastapi import FastAPI

from duoka.serve.app import make_app
from duoka.serve.errors import HttpError
from duoka.serve.messages import Begun, Counted, Delta, Ended, EngineRequest, Event, Failed, Token
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

MODEL = "scripted"


class ScriptedPool:
    """Answers each request with the same events; `asks` has the requests."""

    engines: Sequence[Any] = ()
    context_tokens = 128
    has_failed = False

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.asks: list[EngineRequest] = []

    async def submit(
        self, request: EngineRequest, tokens: int, key: str = ""
    ) -> AsyncGenerator[Event, None]:
        self.asks.append(request)
        if request.task != "generate":
            yield Counted(number=0)
            return
        for event in self._events:
            if isinstance(event, Failed):
                raise HttpError(event.status, event.text, code=event.code, param=event.param)
            yield event


def app_of(
    *events: Event, key: str | None = None, fetches_images: bool = False
) -> tuple[FastAPI, ScriptedPool]:
    pool = ScriptedPool(events)
    service = Service(cast(EnginePool, pool), MODEL, fetches_images=fetches_images)
    return make_app(service, key=key), pool


def transport(app: FastAPI) -> httpx2.AsyncClient:
    """An HTTP client of an application in this process."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app))


def post(app: FastAPI, path: str, *bodies: Any, **options: Any) -> list[httpx2.Response]:
    """The answers of an application to some requests at once."""

    async def ask() -> list[httpx2.Response]:
        async with transport(app) as http:
            url = f"http://localhost{path}"
            return await asyncio.gather(
                *(http.post(url, **(options or {"json": body})) for body in bodies)
            )

    return asyncio.run(ask())


def answer_of(
    events: Sequence[Event],
    open_client: Callable[[httpx2.AsyncClient], Any],
    send: Callable[..., Any],
    **request: Any,
) -> tuple[Any, ScriptedPool]:
    """What a client makes of an answer that consists of these events."""
    app, pool = app_of(*events)

    async def ask() -> Any:
        async with transport(app) as http:
            answer = await send(open_client(http))(model=MODEL, **request)
            return [event async for event in answer] if request.get("stream") else answer

    return asyncio.run(ask()), pool


def begun() -> Begun:
    return Begun(number=0, prompt_tokens=7)


def delta(text: str, kind: Any = "content", call: int = 0) -> Delta:
    tokens = tuple(Token(character, character.encode(), -0.5) for character in text)
    return Delta(
        number=0, choice=0, text=text, kind=kind, call=call, num_tokens=len(text), tokens=tokens
    )


def ended(finish: Any = "stop", stop_text: str | None = None) -> Ended:
    return Ended(
        number=0, choice=0, finish=finish, new_tokens=9, shared_tokens=3, stop_text=stop_text
    )


# Reasoning, text, and two calls, each in several pieces.
CALLS = (
    begun(),
    delta("Let me ", "reasoning"),
    delta("see.", "reasoning"),
    delta("I ask "),
    delta("two."),
    delta("weather", "tool_name", 0),
    delta('{"city": ', "tool_arguments", 0),
    delta('"Beijing"}', "tool_arguments", 0),
    delta("time", "tool_name", 1),
    delta("{}", "tool_arguments", 1),
    ended("tool_calls"),
)
