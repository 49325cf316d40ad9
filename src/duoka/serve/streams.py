"""Respond to requests: with one JSON object, or with a stream of server-sent events.

When the client disconnects, its generations are cancelled: for a stream, when sending fails; for
one JSON object, when the closed connection is reported.
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
from .messages import Event, Events, Prompt
from .requests import AnswerRequest
from .service import CLOSED, Service

Pieces = AsyncGenerator[Piece, None]
_MOST_AHEAD = 64
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def respond(
    service: Service,
    request: AnswerRequest,
    prompts: Sequence[Prompt],
    answer: Answer,
    http: Request,
) -> Response:
    """Run the prompts of a request; return the response in the format of `answer`.

    An error before the first event of each prompt raises HttpError, which sets the HTTP status. A
    later error is reported within the stream.
    """
    service.check_model(request.model)
    # For one JSON object, the pieces are generated as for a stream and discarded.
    params, n = request.params(), getattr(request, "n", 1)
    sources = [service.submit(prompt, params, n, request.model) for prompt in prompts]
    pieces = _generate_pieces(answer, sources)
    if request.stream:
        lines = _write_stream(answer, await anext(pieces), pieces)
        return StreamingResponse(lines, headers=_HEADERS, media_type="text/event-stream")
    await _run_unless_gone(http, _exhaust(pieces))
    return JSONResponse(answer.to_dict())


async def _exhaust(pieces: Pieces) -> None:
    """Exhaust the pieces, so that the answer collects all events."""
    async for _ in pieces:
        pass


async def _generate_pieces(answer: Answer, sources: Sequence[Events]) -> Pieces:
    """Pass the events of each prompt in `sources` to the answer, in order; yield the pieces.

    Waits for the first event of the first sources before it yields the first piece, so that a
    refusal by the engine is raised before the HTTP status is sent. At most `_MOST_AHEAD` sources
    run at the same time.
    """
    first_events: list[Event] = []
    async with AsyncExitStack() as stack:
        for number, events in enumerate(sources):
            for source in sources[len(first_events) : number + _MOST_AHEAD]:
                await stack.enter_async_context(aclosing(source))
                first_events.append(await anext(source))
            for piece in chain(answer.begin(number), answer.take(first_events[number], number)):
                yield piece
            async for event in events:
                for piece in answer.take(event, number):
                    yield piece
        for piece in answer.finish():
            yield piece


async def _write_stream(
    answer: Answer, first_piece: Piece, pieces: Pieces
) -> AsyncGenerator[str, None]:
    """Yield the lines of a stream of server-sent events; report an error as its last event."""
    async with aclosing(pieces):
        try:
            yield _write_event(first_piece)
            async for piece in pieces:
                yield _write_event(piece)
        except Exception as error:  # the HTTP status has been sent
            for piece in answer.fail(HttpError.of(error)):
                yield _write_event(piece)
            if isinstance(error, HttpError):
                return
            raise
    if not answer.has_names:
        yield "data: [DONE]\n\n"


def _write_event(piece: Piece) -> str:
    """Format a piece as a server-sent event, which is named if the piece has a type."""
    data = f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    return f"event: {piece['type']}\n{data}" if "type" in piece else data


async def _run_unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`; cancel it and raise HttpError if the client disconnects first."""
    # ASGI reports a closed connection only as a message; no error is raised in `work`.
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
    """Wait until the client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
