"""Answer requests: whole, or as a stream of server-sent events.

Work ends when the client has gone: that of a stream when it can't be sent any more, that of a whole
answer when the connection is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .answers import Answer, Piece
from .errors import HttpError
from .messages import Event, Prompt
from .requests import AnswerRequest
from .service import CLOSED, Events, Service

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def respond(
    service: Service,
    request: AnswerRequest,
    prompts: Sequence[Prompt],
    answer: Answer,
    http: Request,
) -> Response:
    """Return the answers to some prompts in a form.

    What can't be begun is an error with a status of its own; what fails later is reported within a
    stream.
    """
    # A whole answer is a stream of which nobody sees the pieces. The first event of every source
    # is awaited before the status is sent, so that a refusal by the engine has a status of its own.
    params, n = request.params(), getattr(request, "n", 1)
    sources = [service.submit(prompt, params, n) for prompt in prompts]
    if request.stream:
        lines = _write_stream(answer, await _begin(sources))
        return StreamingResponse(lines, headers=_HEADERS, media_type="text/event-stream")
    await _run_unless_gone(http, _read_all(answer, sources))
    return JSONResponse(answer.to_dict())


async def _begin(sources: Sequence[Events]) -> list[Events]:
    """Wait for the first event of each source; return the sources with it."""
    started: list[Events] = []
    try:
        for events in sources:
            started.append(_resume(await anext(events), events))
    except BaseException:
        for events in (*started, *sources):
            await events.aclose()
        raise
    return started


async def _resume(first_event: Event, events: Events) -> Events:
    async with aclosing(events):
        yield first_event
        async for event in events:
            yield event


async def _read_all(answer: Answer, sources: Sequence[Events]) -> None:
    async for _ in _read(answer, await _begin(sources)):
        pass


async def _read(answer: Answer, sources: Sequence[Events]) -> AsyncGenerator[Piece, None]:
    """Pass the events of the sources to an answer, source by source."""
    async with AsyncExitStack() as stack:
        for events in sources:
            await stack.enter_async_context(aclosing(events))
        for number, events in enumerate(sources):
            for piece in answer.begin(number):
                yield piece
            async for event in events:
                for piece in answer.take(event, number):
                    yield piece
        for piece in answer.finish():
            yield piece


async def _write_stream(answer: Answer, sources: Sequence[Events]) -> AsyncIterator[str]:
    async with aclosing(_read(answer, sources)) as pieces:
        try:
            async for piece in pieces:
                yield _write_event(piece)
        except Exception as error:  # the status is sent already
            for piece in answer.fail(HttpError.of(error)):
                yield _write_event(piece)
            if isinstance(error, HttpError):
                return
            raise
    if not answer.has_names:
        yield "data: [DONE]\n\n"


def _write_event(piece: Piece) -> str:
    data = f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    return f"event: {piece['type']}\n{data}" if "type" in piece else data


async def _run_unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for work, and cancel the work if the client goes away."""
    # ASGI reports a closed connection by a message only; nothing is raised in `work`.
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_until_gone(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(CLOSED, "the client has gone")
        task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _wait_until_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
