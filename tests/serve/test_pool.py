"""Engines behind one address: which one a request goes to, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from duoka.serve.engine_client import EngineClient
from duoka.serve.errors import HttpError
from duoka.serve.messages import Event
from duoka.serve.pool import EngineFailure, EnginePool

from .test_engine_client import READY, REQUEST, Writer


def pool_of(number: int, max_queue: int = 1) -> EnginePool:
    settings: Any = None  # no process is started
    pool = EnginePool([settings] * number, max_queue)
    for engine in pool.engines:
        be_ready(engine)
    return pool


def be_ready(engine: EngineClient) -> None:
    writer: Any = Writer()
    engine.capacity, engine.state, engine._writer = READY, "ready", writer


async def open_request(pool: EnginePool, tokens: int, key: str = "") -> AsyncGenerator[Event, None]:
    """A request that waits for its first event."""
    events = pool.submit(REQUEST, tokens, key)
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return events


def test_the_one_with_the_fewest_tokens_to_do_is_chosen() -> None:
    async def run() -> list[int]:
        pool = pool_of(2, max_queue=10)
        counts = []
        for tokens in (100, 10, 10, 10):
            await open_request(pool, tokens)
            counts.append([engine.num_open for engine in pool.engines])
        return [counts[-1][0], counts[-1][1]]

    assert asyncio.run(run()) == [1, 3]


def test_what_begins_alike_goes_where_it_was_read_unless_much_is_to_do_there() -> None:
    async def run() -> None:
        pool = pool_of(2, max_queue=10)
        await open_request(pool, 100, "the same")
        assert pool.choose("the same") is pool.engines[0]
        assert pool.choose("another") is pool.engines[1]
        await open_request(pool, 10_000, "the same")
        assert pool.choose("the same") is pool.engines[1]

    asyncio.run(run())


def test_one_that_is_being_started_gets_nothing() -> None:
    pool = pool_of(2)
    pool.engines[0].state = "restarting"
    assert pool.choose() is pool.engines[1]
    assert pool.is_ready
    pool.engines[1].state = "failed"
    pool.engines[0].reason = "signal 9"
    with pytest.raises(HttpError, match="signal 9") as raised:
        pool.choose()
    assert raised.value.status == 503
    assert raised.value.headers == {"Retry-After": "5"}
    assert not pool.has_failed
    pool.engines[0].state = "failed"
    assert pool.has_failed


def test_no_more_wait_than_may() -> None:
    async def run() -> None:
        pool = pool_of(1, max_queue=1)
        requests = [await open_request(pool, 1) for _ in range(3)]
        with pytest.raises(HttpError, match="the limit is 3") as raised:
            pool.submit(REQUEST, 1)
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        assert raised.value.headers == {"Retry-After": "5"}
        assert len(requests) == pool.num_open == 3

    asyncio.run(run())


def test_a_pool_whose_engine_cant_be_opened_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: EngineClient) -> None:
        self.exit_code = 7
        self._set("failed", "it is too large")

    monkeypatch.setattr(EngineClient, "run", fail)

    async def run() -> None:
        settings: Any = None
        pool = EnginePool([settings], 1)
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(EngineFailure, match="it is too large") as raised:
        asyncio.run(run())
    assert raised.value.exit_code == 7
