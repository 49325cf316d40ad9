"""The parts of an answer: text, reasoning, and calls of tools, in the order of their generation."""

from __future__ import annotations

from typing import Literal, NamedTuple

PartKind = Literal["content", "reasoning", "tool_name", "tool_arguments"]


class AnswerPart(NamedTuple):
    """A piece of an answer.

    A call begins with its "tool_name" and goes on with pieces of "tool_arguments", which make one
    JSON object together. `call` counts the calls of an answer from 0 on.
    """

    kind: PartKind
    text: str
    call: int = 0
