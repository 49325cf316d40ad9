"""Pings of streams, whenever nothing else comes for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx2
import pytest
import scripted
from abuse import CHAT, COMPLETIONS

from duoka.serve import streams
from duoka.serve.app import make_app
from duoka.serve.messages import EngineRequest, Event, Failed
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "", "max_tokens": 9, "messages": HI},
}
REFUSED = Failed(number=0, status=400, text="it is refused")


class Slow(scripted.ScriptedPool):
    """Waits before the first event and before the last one."""

    def __init__(self, *events: Event, pause: float = 0.12) -> None:
        super().__init__(events)
        self._pause = pause
        self.is_ended = False

    async def submit(
        self, request: EngineRequest, tokens: int, key: str = ""
    ) -> AsyncGenerator[Event, None]:
        try:
            await asyncio.sleep(self._pause)
            async for event in super().submit(request, tokens, key):
                if event is self._events[-1]:
                    await asyncio.sleep(self._pause)
                yield event
        finally:
            self.is_ended = True


def app_of(pool: Slow) -> Any:
    return make_app(Service(cast(EnginePool, pool), scripted.MODEL))


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_has_pings(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PING_SECONDS", 0.05)
    events = scripted.begun(), scripted.delta("a"), scripted.ended()
    body = {**BODIES[path], "stream": True}
    (slow,) = scripted.post(app_of(Slow(*events)), path, body)
    ping = ": ping\n\n"
    if path == "/v1/messages":
        ping = 'event: ping\ndata: {"type": "ping"}\n\n'
    begin, *_, end = slow.text.split(ping)
    assert (begin, slow.text.count(ping)) == ("", 4)
    assert "data: " in end
    (fast,) = scripted.post(app_of(Slow(*events, pause=0)), path, body)
    names = [line[:8] for line in slow.text.replace(ping, "").splitlines()]
    assert names == [line[:8] for line in fast.text.splitlines()]


def test_a_refusal_has_a_status_until_the_first_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**BODIES[CHAT], "stream": True}
    (answer,) = scripted.post(app_of(Slow(REFUSED)), CHAT, body)
    assert answer.status_code == 400
    monkeypatch.setattr(streams, "_PING_SECONDS", 0.05)
    (answer,) = scripted.post(app_of(Slow(REFUSED)), CHAT, body)
    assert answer.status_code == 200
    assert "it is refused" in answer.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_ends_with_its_client(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LOOK_SECONDS", 0.02)
    pool = Slow(scripted.begun(), scripted.ended(), pause=0 if is_stream else 30)
    if is_stream:
        pool._events = [scripted.begun(), scripted.delta("a"), *pool._events[1:]]
    app = app_of(pool)

    async def leave() -> None:
        messages = [{"type": "http.request", "body": httpx2.Request("POST", "http://a", json={
            **BODIES[CHAT], "stream": is_stream}).content}]  # fmt: skip

        is_gone = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, is_gone.set)

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0 if message["type"] == "http.response.start" else 30)

        headers = [(b"host", b"a"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        scope |= {"query_string": b"", "scheme": "http", "server": ("a", 80), "client": ("b", 1)}
        async with asyncio.timeout(5):
            task = asyncio.create_task(app({**scope, "http_version": "1.1"}, receive, send))
            while not pool.is_ended:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
