"""An engine as the server has it: what comes of requests where its process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from duoka.forecast.serving import Capacity
from duoka.serve import engine_client
from duoka.serve.engine_client import EngineClient
from duoka.serve.errors import HttpError
from duoka.serve.messages import Broken, EngineRequest, Prompt
from duoka.workers import supervision

READY = Capacity(context_tokens=8, sequences=2, pages=4, page_tokens=4, step_tokens=8)
REQUEST = EngineRequest(prompt=Prompt(text="a"))
COUNT = EngineRequest(task="tokenize", prompt=Prompt(text="a"))


class Writer:
    """What an engine's process would be written to."""

    def __init__(self) -> None:
        self.num_messages = 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.num_messages += bool(data)

    def close(self) -> None:
        return


class Short(EngineClient):
    """A client whose processes end at once, each after what the list says of it."""

    def __init__(self, lives: list[tuple[bool, Broken | None]]) -> None:
        settings: Any = None
        super().__init__(settings)
        self.lives = lives

    async def _live(self) -> Broken | None:
        is_ready, broken = self.lives.pop(0)
        if is_ready:
            self._take(READY)
        return broken


def run(client: EngineClient) -> list[float]:
    """Run it to its end; how long it waited before each start."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client.asyncio, "sleep", note)
        asyncio.run(client.run())
    return waits


def test_the_third_death_is_the_last_and_each_start_waits_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "duoka.serve")
    client = Short([(True, None), (False, Broken("no memory", 9)), (True, None), (True, None)])
    assert run(client) == [1.0, 2.0]
    assert client.state == "failed"
    assert client.num_deaths == 3
    assert client.reason is not None
    assert "3 times within ten minutes; last reason: its connection was lost" in client.reason
    assert len(client.lives) == 1
    lost = "engine 0 has ended: its connection was lost"
    assert [message.partition("; ")[0] for message in caplog.messages] == [
        *("engine 0: ready", lost, "engine 0: restarting"),
        *("engine 0 has ended: no memory", "engine 0: restarting", "engine 0: ready", lost),
        "engine 0: failed: it has ended 3 times within ten minutes",
    ]


def test_what_an_engine_logs_is_logged_by_the_server(caplog: pytest.LogCaptureFixture) -> None:
    client, _ = open_client()
    caplog.set_level(logging.INFO, "duoka.serve")
    record = logging.LogRecord("duoka.engine", logging.INFO, "", 0, "request %d", (3,), None)
    client._take(record)
    assert (caplog.records[0].levelno, caplog.messages) == (logging.INFO, ["engine 0: request 3"])


def test_one_that_cant_be_opened_isnt_started_again() -> None:
    client = Short([(False, Broken("no memory", 9))])
    assert run(client) == []
    assert (client.state, client.reason, client.num_deaths) == ("failed", "no memory", 0)


def open_client() -> tuple[EngineClient, Writer]:
    settings: Any = None
    client, writer = EngineClient(settings), Writer()
    stand_in: Any = writer
    client._writer = stand_in
    client._take(READY)
    return client, writer


async def failure(work: Callable[[], Any]) -> HttpError:
    with pytest.raises(HttpError) as raised:
        await work()
    return raised.value


def test_all_that_is_open_is_told_that_it_has_died() -> None:
    async def run() -> list[HttpError]:
        client, _ = open_client()
        asks = [client.submit(replace(REQUEST, n=2), 5) for _ in range(2)]
        tasks = [
            asyncio.create_task(failure(lambda events=events: anext(events))) for events in asks
        ]
        tasks.append(asyncio.create_task(failure(lambda: anext(client.submit(COUNT)))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.num_open == 3
        await client._lose(None)
        errors = await asyncio.gather(*tasks)
        assert (client.num_open, client.open_tokens, client.state) == (0, 0, "restarting")
        errors.append(await failure(lambda: anext(client.submit(REQUEST, 1))))
        return errors

    *died, refused = asyncio.run(run())
    assert len(died) == 3
    for error in died:
        assert (error.status, error.code, error.retry_after) == (503, "engine_died", 5)
    assert (refused.status, refused.code) == (503, "engine_not_ready")


# It answers looks, and nothing else; a start takes longer than it may be silent later.
STAND_IN = """
import sys, time
from multiprocessing.connection import Connection
from duoka.forecast.serving import Capacity
from duoka.serve.messages import Status
server = Connection(int(sys.argv[1]))
server.recv()
time.sleep(3)
server.send([Capacity(context_tokens=8, sequences=2, pages=4, page_tokens=4, step_tokens=8)])
while True:
    if server.recv().task == "status":
        server.send([Status(running=0, waiting=0, pages=4, free_pages=4)])
"""


class StandIn(EngineClient):
    _program = (sys.executable, "-c", STAND_IN)


async def until_ready(client: EngineClient) -> int:
    """Its process, when it has answered a look."""
    async with asyncio.timeout(60):
        while client.status is None:
            await asyncio.sleep(0.01)
    assert client._process is not None
    return client._process.pid


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK", 0.02), ("SILENT", 2.0), ("_FIRST_DELAY", 0.02)):
        monkeypatch.setattr(supervision, f"{name}_SECONDS", seconds)

    async def run() -> None:
        settings: Any = None
        client = StandIn(settings)
        task = asyncio.create_task(client.run())
        first = await until_ready(client)
        await asyncio.sleep(3)  # longer than it may be silent, and it isn't
        assert (client._process.pid, client.num_deaths) == (first, 0)
        question = asyncio.create_task(failure(lambda: anext(client.submit(REQUEST, 1))))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(30):
            error = await question
        assert (error.status, error.code, error.retry_after) == (503, "engine_died", 5)
        assert "no response for 2 seconds" in error.text
        assert await until_ready(client) != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert (client.state, client.num_deaths) == ("ready", 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_who_leaves_early_cancels() -> None:
    async def run() -> int:
        client, writer = open_client()
        task = asyncio.create_task(failure(lambda: anext(client.submit(REQUEST, 1))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.num_open == 0
        return writer.num_messages

    assert asyncio.run(run()) == 2  # the request, and that nobody waits for it
