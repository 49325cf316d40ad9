"""Answers in blocks: reasoning, text and calls of tools, one after another.

OpenAI's responses and Anthropic's messages have blocks, each in a form of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from .answers import Answer, Piece
from .messages import Begun, Delta, Ended, Event

BlockKind = Literal["reasoning", "content", "tool"]


class BlocksAnswer(Answer):
    """An answer in blocks: the events of its stream, and the whole answer at the end."""

    has_names = True

    def __init__(self) -> None:
        super().__init__()
        self.reasoning_tokens = 0
        # At most one block is open: its kind, and the number of its call. A delta of another kind
        # or another call closes the block and begins the next one:
        #     reasoning, reasoning, content, tool_name 0, tool_arguments 0, tool_name 1
        #     → [reasoning] [content] [call 0] [call 1]
        self._open: tuple[BlockKind, int] | None = None

    @abstractmethod
    def _begin(self) -> Iterator[Piece]:
        """Return the events before the blocks."""

    @abstractmethod
    def _begin_block(self, kind: BlockKind, name: str) -> Iterator[Piece]:
        """Begin a block; a call has the name of a tool."""

    @abstractmethod
    def _extend_block(self, kind: BlockKind, delta: Delta) -> Iterator[Piece]:
        """Add to the last block."""

    @abstractmethod
    def _end_block(self, kind: BlockKind, *, is_whole: bool) -> Iterator[Piece]:
        """End the last block; a limit may have cut it."""

    @abstractmethod
    def _end(self, event: Ended) -> Iterator[Piece]:
        """Return the events after the blocks."""

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
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
        kind: BlockKind = "tool"
        if delta.kind in ("content", "reasoning"):
            kind = delta.kind
        block = (kind, delta.call)
        if block != self._open and not delta.text:
            return  # tokens without a text begin nothing
        if is_name or block != self._open:
            yield from self._close(is_whole=True)
            self._open = block
            yield from self._begin_block(kind, delta.text if is_name else "")
        if not is_name:
            yield from self._extend_block(kind, delta)

    def _close(self, *, is_whole: bool) -> Iterator[Piece]:
        if self._open is not None:
            kind, self._open = self._open[0], None
            yield from self._end_block(kind, is_whole=is_whole)
