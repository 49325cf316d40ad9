"""The messages between the server and the process of an engine.

Neither torch nor transformers is needed for it: the server's process has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from duoka.base.answer_parts import PartKind
from duoka.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The plan and the options of an engine: the first message to its process."""

    plan: Plan
    max_new_tokens: int | None = None
    trust_remote_code: bool = False
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of a chat, whatever the form of its request.

    `images` are data URLs or addresses, and are shown before the text. `calls` have an id and a
    function each. `call_id` is the call of a tool's result.
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
class EngineRequest:
    """A message of the server to an engine.

    ``generate`` asks for `n` generations by sampling parameters in the names of duoka's: `Begun`,
    then `Delta` and `Ended` of each are sent back. ``tokenize`` asks for the tokens of a prompt and
    ``detokenize`` for the text of its tokens: `Counted`. Each may end as `Failed`. ``end`` cancels
    what is left of the request; ``status`` asks for the `Status` of the engine.
    """

    task: Literal["generate", "tokenize", "detokenize", "end", "status"] = "generate"
    number: int = -1
    prompt: Prompt = Prompt()
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token with its log-probability, and the likeliest tokens in its place."""

    text: str
    data: bytes
    logprob: float
    likeliest: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A part of an answer, as in `AnswerPart`, with its tokens."""

    number: int
    choice: int
    text: str
    kind: PartKind = "content"
    call: int = 0
    num_tokens: int = 0
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The start of a request, with the number of its prompt's tokens."""

    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an answer."""

    number: int
    choice: int
    finish: Literal["stop", "length", "cancelled", "tool_calls"]
    new_tokens: int
    shared_tokens: int
    stop_text: str | None = None
    """What was asked to end it, where that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The failure of a request; `status` is HTTP's, the rest OpenAI's."""

    number: int
    status: int
    text: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The tokens of a prompt, or the text of tokens."""

    number: int
    tokens: Sequence[int] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The load and the memory of an engine."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    preemptions: int = 0
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    busy_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """The end of an engine, or the failure to open one; `code` is an exit code."""

    text: str
    code: int = 1


Event = Delta | Begun | Ended | Failed | Counted
