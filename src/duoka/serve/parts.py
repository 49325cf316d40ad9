"""Answers that consist of parts: reasoning, text, calls of tools, one after another.

So OpenAI's responses and Anthropic's messages have them, each in a form of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .answers import Usage
from .errors import HttpError
from .messages import Begun, Delta, Ended, Event
from .service import Events
from .streams import streamed, unless_gone

PartKind = Literal["reasoning", "content", "tool"]
Piece = dict[str, Any]
"""An event of a stream, as it is told."""


class PartsAnswer(ABC):
    """One answer, as it comes: the pieces of its stream, and all of it at the end.

    `answer` is as far as it has come.
    """

    def __init__(self) -> None:
        self.usage = Usage()
        self.reasoning_tokens = 0
        # The part that goes on: its kind, and which call it is.
        self._open: tuple[PartKind, int] | None = None

    @property
    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """All of it."""

    @abstractmethod
    def failed(self, error: HttpError) -> list[Piece]:
        """What tells that it can't go on."""

    @abstractmethod
    def _begin(self) -> Iterator[Piece]:
        """What comes before its parts."""

    @abstractmethod
    def _begin_part(self, kind: PartKind, name: str) -> Iterator[Piece]:
        """A part begins; of a call, of which tool."""

    @abstractmethod
    def _add(self, kind: PartKind, delta: Delta) -> Iterator[Piece]:
        """There is more of the part."""

    @abstractmethod
    def _end_part(self, kind: PartKind, *, is_whole: bool) -> Iterator[Piece]:
        """The part has ended; it may have been cut."""

    @abstractmethod
    def _end(self, event: Ended) -> Iterator[Piece]:
        """What comes after its parts."""

    def take(self, event: Event) -> Iterator[Piece]:
        """What there is to tell of what comes."""
        self.usage.take(event)
        if isinstance(event, Begun):
            yield from self._begin()
        elif isinstance(event, Delta):
            yield from self._take(event)
        elif isinstance(event, Ended):
            yield from self._close(is_whole=event.finish != "length")
            yield from self._end(event)

    def _take(self, delta: Delta) -> Iterator[Piece]:
        if delta.kind == "reasoning":
            self.reasoning_tokens += delta.num_tokens
        is_name = delta.kind == "tool_name"
        kind: PartKind = "tool"
        if delta.kind in ("content", "reasoning"):
            kind = delta.kind
        part = (kind, delta.call if kind == "tool" else 0)
        if not delta.text and part != self._open and not is_name:
            return  # tokens that are no text begin nothing
        if is_name or part != self._open:
            yield from self._close(is_whole=True)
            self._open = part
            yield from self._begin_part(kind, delta.text if is_name else "")
        if not is_name:
            yield from self._add(kind, delta)

    def _close(self, *, is_whole: bool) -> Iterator[Piece]:
        if self._open is not None:
            kind, self._open = self._open[0], None
            yield from self._end_part(kind, is_whole=is_whole)


async def respond(form: PartsAnswer, events: Events, http: Request, *, stream: bool) -> Response:
    """Answer with what comes of a request: as a stream, or when it is there."""

    async def pieces(events: Events, _: Usage) -> AsyncIterator[Piece]:
        async for event in events:
            for piece in form.take(event):
                yield piece

    async def whole() -> None:
        async with aclosing(events):
            async for _ in pieces(events, form.usage):
                pass

    if stream:
        return await streamed([events], pieces, failed=form.failed)
    await unless_gone(http, whole())
    return JSONResponse(form.answer)
