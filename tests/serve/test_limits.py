"""Limits of time and number, each so low that it is met at once; and which hosts are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast
from unittest import mock

import httpx2
import pytest
import scripted
import uvicorn
from abuse import CHAT, exchange, message, message_of

from duoka.serve.address import Address
from duoka.serve.app import make_app
from duoka.serve.messages import EngineRequest, Event
from duoka.serve.pool import EnginePool
from duoka.serve.server import config
from duoka.serve.service import Service

_PATIENCE_SECONDS = 10.0
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Writing(scripted.ScriptedPool):
    """Says so many pieces, one every so often; `is_ended` when nobody listens any more."""

    def __init__(self, number: int, pause: float = 0.0) -> None:
        super().__init__(())
        self._number, self._pause = number, pause
        self.is_ended = asyncio.Event()

    async def submit(
        self, request: EngineRequest, tokens: int, key: str = ""
    ) -> AsyncGenerator[Event, None]:
        try:
            yield scripted.begun()
            for _ in range(self._number):
                await asyncio.sleep(self._pause)
                yield scripted.delta("")
            yield scripted.ended()
        finally:
            self.is_ended.set()


@contextlib.asynccontextmanager
async def running(pool: Any, **limits: Any) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """Serve in this loop; the address, and the server."""
    service = Service(cast(EnginePool, pool), scripted.MODEL)
    server = uvicorn.Server(config(service, Address(port=0)))
    with contextlib.ExitStack() as patches, Address(port=0).bind() as bound:
        if limits:
            patches.enter_context(mock.patch.multiple("duoka.serve.limits", **limits))
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
        server.should_exit = server.force_exit = True
        await task


@contextlib.asynccontextmanager
async def serving(pool: Any, **limits: Any) -> AsyncIterator[str]:
    """Serve in this loop; the address."""
    async with running(pool, **limits) as (url, _):
        yield url


async def opened(url: str, buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, which may take little at a time."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.setblocking(False)
    address = httpx2.URL(url)
    await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
    return await asyncio.open_connection(sock=connection, limit=1024)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until it is closed."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(2**16):
            content += piece
    return content


def test_an_answer_does_not_wait_for_the_one_before_to_be_confirmed() -> None:
    """Nagle's algorithm is off: it held each answer with a body back for 40 ms."""

    async def run() -> list[int]:
        async with running(Writing(0)) as (url, server):
            _, writer = await opened(url)
            while not (connections := list(server.server_state.connections)):
                await asyncio.sleep(0.01)
            sockets = [cast(Any, one).transport.get_extra_info("socket") for one in connections]
            writer.close()
            return [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets]

    assert asyncio.run(run()) == [1]


def test_who_has_sent_all_may_wait_for_longer() -> None:
    async def run() -> tuple[int, bytes]:
        async with serving(Writing(10, 0.05), _BODY_SECONDS=0.2) as url:
            return await exchange(url, message_of(CHAT, {**HI, "stream": True}))

    code, answer = asyncio.run(run())
    assert code == 200
    assert b"[DONE]" in answer


def test_a_body_has_to_come_in_time() -> None:
    async def run() -> tuple[int, bytes]:
        async with serving(Writing(0), _BODY_SECONDS=0.2) as url:
            return await exchange(url, message(CHAT, b'{"mess', "Content-Length: 100"))

    code, answer = asyncio.run(run())
    assert code == 408
    error = json.loads(answer[answer.index(b"{") :])["error"]
    assert error["type"] == "timeout_error"
    assert error["message"] == "6 bytes of the body came within 0 s"


@pytest.mark.parametrize("kib", [60, 70, 100, 600])
@pytest.mark.parametrize("piece_bytes", [2**20, 10_000])
def test_headers_of_more_than_64_kib_are_refused(kib: int, piece_bytes: int) -> None:
    data = message("/version", b"", f"X-Long: {'x' * kib * 1024}", method="GET")

    async def run() -> bytes:
        async with serving(Writing(0)) as url:
            reader, writer = await opened(url)
            answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            for at in range(0, len(data), piece_bytes):
                writer.write(data[at : at + piece_bytes])
                await asyncio.sleep(0.001)
            head = await answer
            writer.close()
            return head

    if kib > 128:  # closed while it is still sent, of which the client may hear first
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            assert asyncio.run(run()).startswith(b"HTTP/1.1 400 ")
        return
    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 " if kib < 64 else b"HTTP/1.1 431 ")


OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:99", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.test", "127.0.0.1.evil.test", "localhost.evil.test:8000", "192.168.0.7", "::1", ""]


@pytest.mark.parametrize("host", [*OWN, *FOREIGN])
def test_a_local_server_answers_to_its_own_names_alone(host: str) -> None:
    _, pool = scripted.app_of()
    service = Service(cast(EnginePool, pool), scripted.MODEL)

    async def statuses() -> list[int]:
        codes = []
        for more in ({"is_local": True}, {}):
            async with scripted.transport(make_app(service, **cast(Any, more))) as http:
                answer = await http.get("http://localhost/version", headers={"Host": host})
            codes.append(answer.status_code)
        if codes[0] != 200:
            assert answer.json()
        return codes

    assert asyncio.run(statuses()) == [200 if host in OWN else 403, 200]


@pytest.mark.parametrize(("key", "status"), [(None, 403), ("k" * 8, 200)])
def test_a_key_lets_any_name_in(key: str | None, status: int) -> None:
    service = Service(cast(EnginePool, scripted.ScriptedPool(())), scripted.MODEL)
    app: Any = config(service, Address(key=key)).app

    async def ask() -> httpx2.Response:
        async with scripted.transport(app) as http:
            return await http.get("http://evil.test/version")

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 403:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "unknown_host")
        assert "'evil.test' is rejected" in error["message"]
