"""Streams of server-sent events, and work that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from .answers import Usage
from .errors import HttpError
from .messages import Event
from .service import CLOSED, Events

T = TypeVar("T")


async def streamed(
    sources: Sequence[Events],
    pieces: Callable[[Events, Usage], AsyncIterator[Any]],
    *,
    failed: Callable[[HttpError], Iterable[Any]] | None = None,
) -> Response:
    """A stream of the events of some requests, one after another.

    What can't be begun is an error with a status of its own; what fails later is told in the
    stream. With `failed`, which says how, each piece is an event with its type as its name.
    """
    begun = await _begun(sources)
    tell = failed or (lambda error: [error.body])

    async def lines() -> AsyncIterator[str]:
        usage = Usage()
        async with AsyncExitStack() as stack:
            for events in begun:
                await stack.enter_async_context(aclosing(events))
            try:
                for events in begun:
                    async for piece in pieces(events, usage):
                        yield _line(piece)
            except Exception as error:  # the status is told already
                for piece in tell(HttpError.of(error)):
                    yield _line(piece)
                if isinstance(error, HttpError):
                    return
                raise
        if failed is None:
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), headers=headers, media_type="text/event-stream")


async def _begun(sources: Sequence[Events]) -> list[Events]:
    """The same, of which each is on its way."""
    begun: list[Events] = []
    try:
        for events in sources:
            begun.append(_resumed(await anext(events), events))
    except BaseException:
        for events in (*begun, *sources):
            await events.aclose()
        raise
    return begun


def _line(piece: dict[str, Any]) -> str:
    data = f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    return f"event: {piece['type']}\n{data}" if "type" in piece else data


async def _resumed(first: Event, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What work comes to; it is ended where the client has gone."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(CLOSED, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def awaited(work: asyncio.Future[T]) -> T:
    """The same, as `unless_gone` takes it."""
    return await work
