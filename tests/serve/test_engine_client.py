"""An engine as the server has it: what comes of requests where its process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from duoka.serve import engine_client
from duoka.serve.engine_client import EngineClient
from duoka.serve.errors import HttpError
from duoka.serve.messages import Ask, Broken, Count, Prompt, Ready

READY = Ready(context_tokens=8, sequences=2, pages=4, page_tokens=4)
ASK = Ask(number=-1, prompt=Prompt(text="a"), params={})


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
        begin: Any = None
        super().__init__(begin)
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


def test_the_third_death_is_the_last_and_each_start_waits_longer() -> None:
    client = Short([(True, None), (False, Broken("no memory", 9)), (True, None), (True, None)])
    assert run(client) == [1.0, 2.0]
    assert client.state == "failed"
    assert client.num_deaths == 3
    assert client.reason is not None
    assert "3 times within ten minutes; the last time: it was closed" in client.reason
    assert len(client.lives) == 1


def test_one_that_cant_be_opened_isnt_started_again() -> None:
    client = Short([(False, Broken("no memory", 9))])
    assert run(client) == []
    assert (client.state, client.reason, client.num_deaths) == ("failed", "no memory", 0)


def open_client() -> tuple[EngineClient, Writer]:
    begin: Any = None
    client, writer = EngineClient(begin), Writer()
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
        asks = [client.ask(replace(ASK, n=2), 5) for _ in range(2)]
        tasks = [
            asyncio.create_task(failure(lambda events=events: anext(events))) for events in asks
        ]
        count = Count(number=-1, prompt=Prompt(text="a"))
        tasks.append(asyncio.create_task(failure(lambda: client.count(count))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.num_open == 3
        await client._lose(None)
        errors = await asyncio.gather(*tasks)
        assert (client.num_open, client.open_tokens, client.state) == (0, 0, "restarting")
        errors.append(await failure(lambda: anext(client.ask(ASK, 1))))
        return errors

    *died, refused = asyncio.run(run())
    assert len(died) == 3
    for error in died:
        assert (error.status, error.code, error.retry_after) == (503, "engine_died", 5)
    assert (refused.status, refused.code) == (503, "engine_not_ready")


def test_texts_that_are_counted_at_once_are_few() -> None:
    async def run() -> HttpError:
        client, writer = open_client()
        count = Count(number=-1, prompt=Prompt(text="a"))
        tasks = [asyncio.create_task(client.count(count)) for _ in range(64)]
        await asyncio.sleep(0)
        error = await failure(lambda: client.count(count))
        assert writer.num_messages == 64
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert client.num_open == 0
        return error

    assert asyncio.run(run()).status == 429


def test_who_leaves_early_cancels() -> None:
    async def run() -> int:
        client, writer = open_client()
        task = asyncio.create_task(failure(lambda: anext(client.ask(ASK, 1))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.num_open == 0
        return writer.num_messages

    assert asyncio.run(run()) == 2  # the request, and that nobody waits for it
