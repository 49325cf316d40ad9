"""Answer requests: whole, or as a stream of server-sent events.

Work ends when the client has gone: that of a stream when it can't be sent any more, that of a whole
answer when the connection is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import chain
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .answers import Answer, Piece
from .errors import HttpError
from .messages import Prompt
from .requests import AnswerRequest
from .service import CLOSED, Events, Service

Pieces = AsyncGenerator[Piece, None]
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
    service.check_model(request.model)
    # A whole answer is a stream of which nobody sees the pieces.
    params, n = request.params(), getattr(request, "n", 1)
    pieces = _read(answer, [service.submit(prompt, params, n) for prompt in prompts])
    if request.stream:
        lines = _write_stream(answer, await anext(pieces), pieces)
        return StreamingResponse(lines, headers=_HEADERS, media_type="text/event-stream")
    await _run_unless_gone(http, _read_all(pieces))
    return JSONResponse(answer.to_dict())


async def _read_all(pieces: Pieces) -> None:
    async for _ in pieces:
        pass


async def _read(answer: Answer, sources: Sequence[Events]) -> Pieces:
    """Pass the events of the sources to an answer, source by source.

    The first event of each source comes before the first piece, and so before the status is sent:
    a refusal by the engine has a status of its own.
    """
    async with AsyncExitStack() as stack:
        for events in sources:
            await stack.enter_async_context(aclosing(events))
        first_events = [await anext(events) for events in sources]
        for number, (first_event, events) in enumerate(zip(first_events, sources, strict=True)):
            for piece in chain(answer.begin(number), answer.take(first_event, number)):
                yield piece
            async for event in events:
                for piece in answer.take(event, number):
                    yield piece
        for piece in answer.finish():
            yield piece


async def _write_stream(
    answer: Answer, first_piece: Piece, pieces: Pieces
) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        try:
            yield _write_event(first_piece)
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
