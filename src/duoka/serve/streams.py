"""Respond to requests: with one JSON object, or with a stream of server-sent events.

A stream without an event for 15 seconds gets a ping, so that clients and proxies keep it open.
When the client disconnects, its generations are cancelled: for a stream, when sending fails; for
one JSON object, when the connection is checked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import chain
from typing import cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Answer, Piece
from .errors import CLOSED, HttpError
from .messages import Event, Events, Prompt
from .requests import AnswerRequest
from .service import Service

Pieces = AsyncGenerator[Piece, None]
PacedPieces = AsyncGenerator[Piece | None, None]
_MOST_AHEAD = 64
# Between pings of a stream, and between checks of the connection of a request without a stream.
_PING_SECONDS, _LOOK_SECONDS = 15.0, 0.5
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
    later error, or one after a ping, is reported within the stream.
    """
    service.check_model(request.model)
    answer.head["system_fingerprint"] = service.fingerprint
    http.state.model, http.state.usage = request.model or service.model, answer.usage
    # For one JSON object, the pieces are generated as for a stream and discarded.
    params, n = request.params(), getattr(request, "n", 1)
    sources = [service.submit(prompt, params, n, request.model) for prompt in prompts]
    pieces = _generate_pieces(answer, sources)
    if request.stream:
        paced_pieces = _pace(pieces, _PING_SECONDS)
        lines = _write_stream(answer, await anext(paced_pieces), paced_pieces)
        return _EventStream(lines, headers=_HEADERS, media_type="text/event-stream")
    async with aclosing(_pace(_exhaust(pieces), _LOOK_SECONDS)) as paced_pieces:
        async for piece in paced_pieces:
            if piece is None and await http.is_disconnected():
                raise HttpError(CLOSED, "the client has gone")
    return JSONResponse(answer.to_dict())


class _EventStream(StreamingResponse):
    """Response that ends its generations with it, also when the client has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and close the iterator of its lines."""
        async with aclosing(cast(AsyncGenerator[str, None], self.body_iterator)):
            await super().__call__(scope, receive, send)


async def _exhaust(pieces: Pieces) -> Pieces:
    """Exhaust the pieces, so that the answer collects all events; yield one piece at the end."""
    async for _ in pieces:
        pass
    yield {}


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


async def _pace(pieces: Pieces, seconds: float) -> PacedPieces:
    """Yield the pieces, and None whenever none has come for so many seconds."""
    async with aclosing(pieces):
        while True:
            # A timeout of `anext` itself would end the generator.
            task = asyncio.ensure_future(anext(pieces, None))
            try:
                while not (await asyncio.wait({task}, timeout=seconds))[0]:
                    yield None
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if (piece := task.result()) is None:
                return
            yield piece


async def _write_stream(
    answer: Answer, first_piece: Piece | None, pieces: PacedPieces
) -> AsyncGenerator[str, None]:
    """Yield the lines of a stream of server-sent events; report an error as its last event."""
    async with aclosing(pieces):
        try:
            yield _write_event(first_piece) if first_piece else answer.ping
            async for piece in pieces:
                yield _write_event(piece) if piece else answer.ping
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
