"""What an answer consists of: text, reasoning, and calls of tools, as they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More of what is said to the person who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called; `index` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all of them, one after another, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended; without being whole, its arguments are no JSON object."""

    index: int
    is_whole: bool


Part = Content | ReasoningPart | CallStart | CallArguments | CallEnd
