"""The parts of a generated answer: text, reasoning and tool calls, in order of generation."""

from __future__ import annotations

from typing import Literal, NamedTuple

PartKind = Literal["content", "reasoning", "tool_name", "tool_arguments"]


class AnswerPart(NamedTuple):
    """A piece of text of an answer, of one kind.

    A tool call is a "tool_name", followed by pieces of "tool_arguments" whose texts together are
    one JSON object. `call` is the index of the tool call in the answer, from 0.
    """

    kind: PartKind
    text: str
    call: int = 0
