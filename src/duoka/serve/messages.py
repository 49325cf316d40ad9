"""What the server and the process of an engine tell each other, over a socket of their own.

Neither torch nor transformers is needed for it: the server's process has none of them.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from duoka.base.answer_parts import PartKind
from duoka.planner.plan import Plan

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The plan that an engine is opened with, and how."""

    plan: Plan
    max_new_tokens: int | None = None
    trust_remote_code: bool = False
    adapter: str | None = None
    processes: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of a chat, whatever the form of its request.

    `images` are data URLs or addresses, and are shown before the text. `calls` have an id and a
    function each. A tool's result says by `call_id` to which call it belongs.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt: the messages of a chat, a text to be continued, or its tokens.

    `tools` are those that may be called; with `must_call` the answer has to call one. `field` is
    the prompt's place in the request.
    """

    messages: Sequence[Turn] | None = None
    text: str | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    parallel_tool_calls: bool = True
    field: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: `n` answers to a prompt, by sampling parameters in the names of duoka's."""

    number: int
    prompt: Prompt
    params: Mapping[str, Any]
    n: int = 1
    is_streamed: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for a request any more."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The tokens of a prompt are wanted."""

    number: int
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """The text of tokens is wanted; `field` is where the request has them."""

    number: int
    tokens: Sequence[int]
    field: str = "tokens"


@dataclass(frozen=True, slots=True)
class Look:
    """How the engine is, is wanted: a `Status` is the answer."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer, with its log-probability, and the likeliest ones in its place."""

    text: str
    data: bytes
    logprob: float
    likeliest: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A part of an answer, as `AnswerPart` has it, and its tokens."""

    number: int
    choice: int
    text: str
    kind: PartKind = "content"
    call: int = 0
    num_tokens: int = 0
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request is on its way; its prompt has so many tokens."""

    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An answer has ended."""

    number: int
    choice: int
    finish: Literal["stop", "length", "cancelled", "tool_calls"]
    new_tokens: int
    shared_tokens: int
    stop_text: str | None = None
    """What was asked to end it, where that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request can't be answered; `status` is HTTP's, the rest OpenAI's."""

    number: int
    status: int
    text: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Tokens that were asked for, or the text of some."""

    number: int
    tokens: Sequence[int] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """An engine answers; what it has room for."""

    context_tokens: int
    sequences: int
    pages: int
    page_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How an engine is."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    preemptions: int = 0
    shared_tokens: int = 0
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """No engine can be opened, or it has ended for good; `code` is the exit code that says why."""

    text: str
    code: int = 1


Event = Delta | Begun | Ended | Failed | Counted


def packed(messages: Sequence[object]) -> bytes:
    """Messages, as they are sent together."""
    content = pickle.dumps(list(messages))
    return _LENGTH.pack(len(content)) + content


LENGTH_BYTES = _LENGTH.size


def length(head: bytes) -> int:
    """How many bytes follow these first ones."""
    number: int = _LENGTH.unpack(head)[0]
    return number


def read(file: BinaryIO) -> list[Any]:
    """The next messages; EOFError where the other end is gone."""
    head = file.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError
    content = file.read(length(head))
    messages: list[Any] = pickle.loads(content)
    return messages
