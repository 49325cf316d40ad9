"""Responses made of blocks: reasoning, text and tool calls, one after another.

OpenAI's Responses API and Anthropic's Messages API have blocks, each in its own format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from .answers import Answer, Piece
from .messages import Begun, Delta, Ended, Event

BlockKind = Literal["reasoning", "content", "tool"]


class BlocksAnswer(Answer):
    """A response in blocks: divides a generation into blocks; subclasses define the format."""

    has_names = True

    def __init__(self) -> None:
        super().__init__()
        # The open block, at most one: its kind, and the number of its tool call. A delta of another
        # kind or call closes the block and begins the next one:
        #     reasoning, reasoning, content, tool_name 0, tool_arguments 0, tool_name 1
        #     → [reasoning] [content] [call 0] [call 1]
        self._open_block: tuple[BlockKind, int] | None = None

    @abstractmethod
    def _begin(self, event: Begun) -> Iterator[Piece]:
        """Yield the stream events before the first block."""

    @abstractmethod
    def _begin_block(self, kind: BlockKind, name: str) -> Iterator[Piece]:
        """Begin a block; yield its events. `name` is the called tool, or empty for other blocks."""

    @abstractmethod
    def _extend_block(self, kind: BlockKind, delta: Delta) -> Iterator[Piece]:
        """Add text to the last block; yield its events."""

    @abstractmethod
    def _end_block(self, kind: BlockKind, *, is_whole: bool) -> Iterator[Piece]:
        """End the last block; yield its events. `is_whole` is False if the token limit cut it."""

    @abstractmethod
    def _end(self, event: Ended) -> Iterator[Piece]:
        """Yield the stream events after the last block."""

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if isinstance(event, Begun):
            yield from self._begin(event)
        elif isinstance(event, Delta):
            yield from self._add_delta(event)
        elif isinstance(event, Ended):
            yield from self._close_block(is_whole=event.finish != "length")
            yield from self._end(event)

    def _add_delta(self, delta: Delta) -> Iterator[Piece]:
        """Add a delta to the open block, or begin a new block with the delta."""
        is_name = delta.kind == "tool_name"
        kind: BlockKind = "tool"
        if delta.kind in ("content", "reasoning"):
            kind = delta.kind
        block = (kind, delta.call)
        if block != self._open_block and not delta.text:
            return  # tokens without text begin no block
        if is_name or block != self._open_block:
            yield from self._close_block(is_whole=True)
            self._open_block = block
            yield from self._begin_block(kind, delta.text if is_name else "")
        if not is_name:
            yield from self._extend_block(kind, delta)

    def _close_block(self, *, is_whole: bool) -> Iterator[Piece]:
        """End the open block, if there is one."""
        if self._open_block is not None:
            kind, self._open_block = self._open_block[0], None
            yield from self._end_block(kind, is_whole=is_whole)
