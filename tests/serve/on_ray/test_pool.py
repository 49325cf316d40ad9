"""Replicas as the server has them: what comes of requests where some are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import ray

from duoka.serve.errors import HttpError
from duoka.serve.messages import (
    Ask,
    Begun,
    Count,
    Counted,
    Delta,
    Ended,
    Failed,
    Prompt,
    Ready,
    Status,
)
from duoka.serve.on_ray.pool import RayPool, ReplicasClient, ReplicaSettings
from duoka.serve.on_ray.replica import Board, ReplicaReport

BEGUN = Begun(number=0, prompt_tokens=1)
TEXT = Delta(number=0, choice=0, text="a")
END = Ended(number=0, choice=0, finish="stop", new_tokens=1, shared_tokens=0)
LOST = ray.exceptions.ActorDiedError()


class Handle:
    """What answers for replicas: for each request a script, of pieces and errors."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.num_cancelled = 0

    @property
    def answer(self) -> Handle:
        return self

    def remote(self, message: Any) -> Answer:
        return Answer(self.scripts.pop(0), self)


class Answer:
    def __init__(self, script: Sequence[Any], handle: Handle) -> None:
        self.script, self.handle = script, handle

    async def __aiter__(self) -> AsyncIterator[Any]:
        for piece in self.script:
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                await asyncio.Event().wait()
            yield [piece]

    def cancel(self) -> None:
        self.handle.num_cancelled += 1


def reports(*names: str, running: int = 1) -> dict[str, ReplicaReport]:
    ready = Ready(context_tokens=8, sequences=2, pages=4, page_tokens=4)
    status = Status(running=running, waiting=0, pages=4, free_pages=3, reserved_bytes={"vgpu:0": 5})
    return {
        name: ReplicaReport(application="a", node_id="n", ready=ready, status=status)
        for name in names
    }


def pool_of(*handles: Handle, max_queue: int = 8) -> RayPool:
    nothing: Any = None
    part = ReplicaSettings(kind=nothing, begin=nothing, low=1, high=1)
    pool = RayPool([part] * len(handles), "model", max_queue)
    for client, handle in zip(pool.engines, handles, strict=True):
        assert isinstance(client, ReplicasClient)
        client.handle = handle
        client.hear(reports("x", "y"))
    return pool


async def ask(pool: RayPool, ask: Ask | None = None) -> list[Any]:
    message = ask or Ask(number=-1, prompt=Prompt(text="a"), params={}, is_streamed=True)
    return [event async for event in pool.ask(message, 5)]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.serve.on_ray.pool._POLL_SECONDS", 0.0)


@pytest.mark.parametrize(
    "before", [[], [BEGUN], [Failed(number=0, status=503, text="", code="engine_died")]]
)
def test_what_is_lost_before_its_answer_is_asked_elsewhere(before: list[Any]) -> None:
    pool = pool_of(Handle([*before, LOST], [BEGUN, TEXT, END]))
    assert asyncio.run(ask(pool)) == [BEGUN, TEXT, END]
    assert pool.num_open == 0


def test_what_is_lost_within_its_answer_fails() -> None:
    pool = pool_of(Handle([BEGUN, TEXT, LOST], [BEGUN, TEXT, END]))
    with pytest.raises(HttpError, match="this answer with it: ActorDiedError") as raised:
        asyncio.run(ask(pool))
    assert (raised.value.status, raised.value.code) == (503, "engine_died")


def test_what_is_always_lost_fails_at_last() -> None:
    handle = Handle(*[[LOST]] * 9)
    with pytest.raises(HttpError, match="ActorDiedError"):
        asyncio.run(ask(pool_of(handle)))
    assert len(handle.scripts) == 5


def test_a_defect_isnt_asked_again() -> None:
    defect = ray.exceptions.RayTaskError("answer", "", ValueError())
    with pytest.raises(HttpError, match="ValueError") as raised:
        asyncio.run(ask(pool_of(Handle([defect]))))
    assert raised.value.status == 500


def test_what_waits_for_replicas_that_are_gone_is_asked_elsewhere() -> None:
    async def run() -> list[Any]:
        first, second = Handle([None]), Handle([BEGUN, TEXT, END])
        pool = pool_of(first, second)
        task = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        client = pool.engines[0]
        assert isinstance(client, ReplicasClient)
        assert (client.num_open, client.state) == (1, "ready")
        client.hear({})
        assert (client.state, client.num_deaths, client.status) == ("restarting", 2, None)
        events = await task
        await asyncio.sleep(0)
        assert first.num_cancelled == 1
        return events

    assert asyncio.run(run()) == [BEGUN, TEXT, END]


def test_too_many_are_refused_by_the_room_of_all_replicas() -> None:
    async def run() -> HttpError:
        pool = pool_of(Handle(*[[None]] * 5), max_queue=1)
        tasks = [asyncio.create_task(ask(pool)) for _ in range(5)]
        await asyncio.sleep(0.01)
        with pytest.raises(HttpError) as raised:
            await ask(pool)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.num_open == 0
        return raised.value

    error = asyncio.run(run())
    assert error.status == 429
    assert "at most 5 can" in error.text


def test_tokens_are_counted_by_a_replica() -> None:
    counted = Counted(number=0, tokens=[1])
    pool = pool_of(Handle([counted]))
    message = Count(number=-1, prompt=Prompt(text="a"))
    assert asyncio.run(pool.choose().count(message)) == counted


def test_replicas_are_told_together() -> None:
    pool = pool_of(Handle())
    client = pool.engines[0]
    assert client.ready is not None
    assert client.status is not None
    assert (client.ready.sequences, client.ready.pages) == (4, 8)
    assert (client.status.running, client.status.free_pages) == (2, 6)
    assert client.status.reserved_bytes == {"vgpu:0": 5}


def test_the_board_forgets_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    (report,) = reports("x").values()
    board.put("x", report)
    assert board.read() == {"x": report}
    monkeypatch.setattr("duoka.serve.on_ray.replica._FRESH_SECONDS", -1.0)
    assert board.read() == {}
